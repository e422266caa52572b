"""An op whose kernel oneDNN cannot compile on a thread any more runs again once another thread has compiled it."""

from __future__ import annotations

import _thread
import threading
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.runtime.memory.shortages import Shortage, outcome, run
from tests.runtime.programs import same_bits
from torchdelta._torch.modes import num_modes
from torchdelta._torch.ops import execute
from torchdelta.aten.facts import Kind, facts_of
from torchdelta.runtime.memory import onednn
from torchdelta.runtime.memory.onednn import compile_elsewhere

if TYPE_CHECKING:
    import os

ERROR = "could not create a primitive"
ADD = facts_of(torch.ops.aten.add.Tensor)


class Stuck(Shortage):
    """Fails as oneDNN does after a shortage: always on this thread, until another one has compiled the kernel."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.thread = threading.get_ident()
        self.compiled: list[tuple[int, int, bool]] = []  # threads, modes and grad mode, where it was compiled

    def __call__(self, func: Any, facts: Any, args: Any, kwargs: Any) -> Any:
        """Run or fail."""
        if facts.name.startswith(self.name) and not self.compiled:
            if threading.get_ident() == self.thread:
                self.num_failures += 1
                raise RuntimeError(ERROR)
            self.compiled.append((torch.get_num_threads(), num_modes(), torch.is_grad_enabled()))
        return execute(func, facts, args, kwargs)


@pytest.mark.parametrize(("name", "is_backward"), [("aten.addmm.", False), ("aten.gelu_backward.", True)])
def test_the_op_is_compiled_on_another_thread(name: str, *, is_backward: bool) -> None:
    """With the number of threads and the grad mode of the op, since kernels depend on both; nothing has to leave."""
    expected, _, expected_state = run(None)
    stuck = Stuck(name)
    observed, session, state = run(stuck)
    assert stuck.num_failures == 1
    assert stuck.compiled == [(torch.get_num_threads(), 0, not is_backward)]
    assert session.counters.num_evictions == 0
    assert same_bits(expected, observed)
    assert torch.equal(expected_state, state)


def test_a_replayed_op_is_compiled_on_another_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in forward and backward."""
    from torchdelta.runtime.memory import replay

    expected, _, _ = run(None)
    caller, original = threading.get_ident(), replay.replay_op
    threads: list[int] = []

    def stuck(entry: Any, args: Any, kwargs: Any) -> Any:
        if entry.facts.kind is Kind.COMPUTE and not entry.facts.is_random and len(threads) < 3:
            threads.append(threading.get_ident())
            if len(threads) == 1:
                raise RuntimeError(ERROR)
        return original(entry, args, kwargs)

    monkeypatch.setattr(replay, "replay_op", stuck)
    observed, _, _ = run(None, decisions=lambda saved: "recompute" if saved.index % 2 else "keep")
    assert threads[0] == threads[2] == caller
    assert threads[1] != caller
    assert same_bits(expected, observed)


def test_an_op_that_first_fails_in_the_allocator_is_compiled_as_well() -> None:
    """Outputs are allocated before kernels are created: with room for them, the op meets the earlier error."""
    expected, _, _ = run(None)
    stuck = Stuck("aten.addmm.")
    shortage = Shortage("aten.addmm.", skip=1)

    def both(func: Any, facts: Any, args: Any, kwargs: Any) -> Any:
        if shortage.num_failures:
            return stuck(func, facts, args, kwargs)
        return shortage(func, facts, args, kwargs)

    observed, session, _ = run(both)
    assert (shortage.num_failures, stuck.num_failures, len(stuck.compiled)) == (1, 1, 1)
    assert session.counters.num_evictions > 0
    assert same_bits(expected, observed)


THREADS_PROGRAM = """
import threading, torch
from torchdelta.aten.facts import facts_of
from torchdelta.runtime.memory.onednn import compile_elsewhere
add = facts_of(torch.ops.aten.add.Tensor)
torch.set_num_threads(2)
seen = []
def note():
    seen.append(torch.get_num_threads())
assert compile_elsewhere(add, note)
other = threading.Thread(target=torch.set_num_threads, args=(1,))  # for threads that are new, not for this one
other.start()
other.join()
assert torch.get_num_threads() == 2
assert compile_elsewhere(add, note)
new = threading.Thread(target=note)
new.start()
new.join()
print(*seen, torch.get_num_threads())
"""


def test_it_has_the_callers_number_of_threads_and_changes_none(tmp_path: os.PathLike[str]) -> None:
    """Whatever new threads begin with; they begin with the same afterwards."""
    done = outcome(THREADS_PROGRAM, tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["2", "2", "1", "2"]


def test_the_number_of_threads_is_not_set_without_need(monkeypatch: pytest.MonkeyPatch) -> None:
    """Setting it, even to what it is, changes settings of MKL for the whole process, and with them bits."""

    def refuse(_: int) -> None:
        raise AssertionError("it was set")

    monkeypatch.setattr(torch, "set_num_threads", refuse)
    assert compile_elsewhere(ADD, lambda: None)


@pytest.mark.parametrize("op", [torch.ops.aten.rand_like.default, torch.ops.prims.sin.default])
def test_some_ops_never_run_on_another_thread(op: Any) -> None:
    """Random numbers must not be drawn twice, and what is no kernel of torch's own may depend on its thread."""
    calls: list[int] = []
    assert not compile_elsewhere(facts_of(op), lambda: calls.append(1))
    assert calls == []


def test_without_a_new_thread_the_error_is_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    """The system refuses a thread: nothing hangs, and the error is oneDNN's."""

    def refuse(*_: Any) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(_thread, "start_new_thread", refuse)
    with pytest.raises(RuntimeError, match=ERROR):
        run(Stuck("aten.addmm."))


def test_a_thread_that_dies_before_it_runs_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory may run out between the start of a thread and its first line."""
    original = _thread.start_new_thread

    def die(function: Any, args: Any) -> Any:
        del function
        return original(raise_memory_error, args)

    def raise_memory_error(*_: Any) -> None:
        raise MemoryError

    monkeypatch.setattr(_thread, "start_new_thread", die)
    monkeypatch.setattr("sys.unraisablehook", lambda _: None)
    assert not compile_elsewhere(ADD, lambda: None)


def test_without_memory_for_the_threads_of_a_team_none_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """OpenMP's library ends the process if it cannot start one."""

    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    monkeypatch.setattr(onednn.mmap, "mmap", refuse)
    calls: list[int] = []
    assert not compile_elsewhere(ADD, lambda: calls.append(1))
    assert calls == []


PROGRAM = """
import resource, sys
import torch
from torchdelta import Config, MemoryBudget
torch.set_num_threads(int(sys.argv[2]))
torch.manual_seed(0)
x, g = torch.randn(4096, 512), torch.randn(4096, 512)  # 8 MiB
torch.ops.aten.gelu_backward(g[:64], x[:64])  # libraries are loaded
weight = torch.randn(512, requires_grad=True)
with MemoryBudget("1TiB", Config(tier="memory")):
    saved = [(x * weight).sin() for _ in range(12)]
    used_bytes = int(next(l for l in open("/proc/self/status") if l.startswith("VmData")).split()[1]) * 1024
    if sys.argv[1] != "free":
        limit_bytes = used_bytes + 8 * 2**20 + 64 * 2**10  # its output, and not what oneDNN compiles
        resource.setrlimit(resource.RLIMIT_DATA, (limit_bytes, limit_bytes))
    result = torch.ops.aten.gelu_backward(g, x)
print(result.double().sum().item().hex())
"""


@pytest.mark.rest
@pytest.mark.parametrize("num_threads", ["1", "8"])
def test_a_real_limit_at_which_onednn_cannot_compile(tmp_path: os.PathLike[str], num_threads: str) -> None:
    """The op's output fits below the process's limit, and what oneDNN maps for the code does not: the op runs again."""
    free = outcome(PROGRAM, tmp_path, "free", num_threads)
    assert free.returncode == 0, free.stderr
    ours = outcome(PROGRAM, tmp_path, "budget", num_threads)
    assert ours.returncode == 0, ours.stderr[-2000:]
    assert ours.stdout == free.stdout
    assert "aten.gelu_backward.default ran out of memory below the budget" in ours.stderr


SPENT_PROGRAM = """
import resource, sys, time, torch
from torchdelta.aten.facts import facts_of
from torchdelta.runtime.memory.onednn import compile_elsewhere
add = facts_of(torch.ops.aten.add.Tensor)
torch.set_num_threads(1)
assert compile_elsewhere(add, lambda: None)
time.sleep(0.2)  # glibc keeps the stack of a thread that has ended, and gives it to the next one
used_bytes = int(next(l for l in open("/proc/self/status") if l.startswith("VmData")).split()[1]) * 1024
resource.setrlimit(resource.RLIMIT_DATA, (used_bytes + int(sys.argv[1]), resource.RLIM_INFINITY))
has_compiled = compile_elsewhere(add, lambda: None)
resource.setrlimit(resource.RLIMIT_DATA, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
print("returned", has_compiled)
"""


@pytest.mark.rest
@pytest.mark.parametrize("left_bytes", ["0", "4096", "12288", "20480"])
def test_a_thread_without_memory_for_one_line_is_not_waited_for(tmp_path: os.PathLike[str], left_bytes: str) -> None:
    """Its first frame and every destructor need some."""
    done = outcome(SPENT_PROGRAM, tmp_path, left_bytes, timeout_s=60)
    assert done.stdout.startswith("returned"), done.stderr[-2000:]


GREEDY_PROGRAM = """
import resource, sys, torch
from torchdelta.aten.facts import facts_of
from torchdelta.runtime.memory.onednn import compile_elsewhere
torch.set_num_threads(8)
x = torch.randn(32768, 512)  # 64 MiB
x.sin()
used_bytes = int(next(l for l in open("/proc/self/status") if l.startswith("VmData")).split()[1]) * 1024
resource.setrlimit(resource.RLIMIT_DATA, (used_bytes + int(sys.argv[1]) * 2**20, resource.RLIM_INFINITY))
print("returned", compile_elsewhere(facts_of(torch.ops.aten.sin.default), x.sin))
"""


@pytest.mark.rest
@pytest.mark.parametrize("left_mib", ["60", "100", "120", "140"])
def test_the_op_does_not_take_the_memory_of_its_team(tmp_path: os.PathLike[str], left_mib: str) -> None:
    """Each of both would fit alone."""
    done = outcome(GREEDY_PROGRAM, tmp_path, left_mib)
    assert done.stdout.startswith("returned"), done.stderr[-2000:]
    assert "libgomp" not in done.stderr


@pytest.mark.rest
def test_a_real_limit_below_a_teams_stacks(tmp_path: os.PathLike[str]) -> None:
    """No memory for so many threads, whatever leaves: the step ends in oneDNN's error, and not the process."""
    ours = outcome(PROGRAM, tmp_path, "budget", "48")
    assert ours.returncode == 1
    assert "RuntimeError: could not create a primitive" in ours.stderr
    assert "libgomp" not in ours.stderr
