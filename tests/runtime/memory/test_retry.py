"""An op that runs out of memory runs again when everything that can has left, and only when that is safe."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from tests.faults.switches import disabled
from tests.runtime.programs import UNLIMITED, mlp, running, same_bits, train
from torchdelta._torch.ops import execute
from torchdelta.aten.facts import Kind, facts_of
from torchdelta.runtime.errors import BudgetError
from torchdelta.runtime.memory.retry import is_out_of_memory, may_retry

if TYPE_CHECKING:
    from collections.abc import Callable

    from torchdelta.runtime.session import Session


class Shortage:
    """Runs ops, and lets one of a kind fail once, as an allocator does, after it has drawn random numbers."""

    def __init__(self, name: str, skip: int = 0, error: Callable[[], BaseException] | None = None) -> None:
        self.name = name
        self.skip = skip
        self.num_failures = 0
        self.error = error or (lambda: torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"))

    def __call__(self, func: Any, facts: Any, args: Any, kwargs: Any) -> Any:
        """Run or fail."""
        if facts.name.startswith(self.name):
            self.skip -= 1
            if self.skip == -1:
                self.num_failures += 1
                if facts.is_random:
                    torch.rand(100)
                raise self.error()
        return execute(func, facts, args, kwargs)


class Noise(nn.Module):
    """Adds random numbers that an op draws into a new tensor."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Scale by noise."""
        return x * (torch.rand_like(x) + 0.5)


def model() -> tuple[nn.Module, torch.Tensor]:
    """Build a net with random numbers, statistics and in-place ops."""
    torch.manual_seed(3)
    net = nn.Sequential(mlp(64, 3, dropout=0.2), Noise(), nn.BatchNorm1d(64), nn.ReLU(inplace=True))
    return net, torch.randn(96, 64)


def run(shortage: Shortage | None, **options: Any) -> tuple[list[torch.Tensor], Session, torch.Tensor]:
    """Train two steps, with a shortage somewhere in them."""
    net, x = model()
    with running(UNLIMITED, **options) as (_, session):
        if shortage is not None:
            session.recorder.execute = shortage
        observed = train(net, x)
    return observed, session, torch.default_generator.get_state()


@pytest.mark.parametrize("name", ["aten.addmm.", "aten.rand_like.", "aten.gelu_backward.", "aten.native_layer_norm."])
def test_an_op_that_writes_nothing_runs_again(name: str) -> None:
    """In forward and in backward, random or not: what can leaves, and the bits are the plain run's."""
    expected, _, expected_state = run(None)
    shortage = Shortage(name, skip=1)
    observed, session, state = run(shortage)
    assert shortage.num_failures == 1
    assert session.counters.num_evictions > 0
    assert same_bits(expected, observed)
    assert torch.equal(expected_state, state)


@pytest.mark.parametrize("name", ["aten.addmm.", "aten.rand_like."])
def test_without_the_retry_the_error_ends_the_step(name: str) -> None:
    """The control: the shortage is real to whoever does not handle it."""
    with disabled("oom-retry"), pytest.raises(torch.OutOfMemoryError):
        run(Shortage(name, skip=1))


@pytest.mark.parametrize("name", ["aten.relu_.", "aten.native_batch_norm."])
def test_an_op_that_writes_its_arguments_never_runs_twice(name: str) -> None:
    """Half-written arguments cannot be told from whole ones: the allocator's own error propagates."""
    shortage = Shortage(name, skip=0)
    with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate"):
        run(shortage)
    assert shortage.num_failures == 1


def test_random_numbers_that_cannot_be_put_back_are_not_drawn_twice() -> None:
    """An op that is not on the tape has no noted state: without gradients a random op ends in the error."""
    shortage = Shortage("aten.rand.")
    with running(UNLIMITED) as (_, session):
        session.recorder.execute = shortage
        with torch.no_grad(), pytest.raises(torch.OutOfMemoryError):
            torch.rand(64, 64)
    assert shortage.num_failures == 1


def test_a_second_shortage_is_the_users() -> None:
    """When nothing is left to leave, the error is told as it came."""
    net, x = model()
    gc.collect()  # other tests' garbage would be room
    with running(UNLIMITED) as (_, session):
        session.recorder.execute = Shortage("aten.addmm.", skip=0)
        with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate"):  # nothing is saved so far
            net(x)


def test_a_replay_that_runs_out_of_memory_runs_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Recomputing needs memory too; what can leave makes room for it."""
    from torchdelta.runtime.memory import replay

    expected, _, _ = run(None)
    calls: list[str] = []
    failed_at: list[int] = []
    original = replay.replay_op

    def failing(entry: Any, args: Any, kwargs: Any) -> Any:
        calls.append(entry.facts.name)
        if len(calls) > 1 and entry.facts.kind is Kind.COMPUTE and not failed_at:
            failed_at.append(len(calls) - 1)
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return original(entry, args, kwargs)

    monkeypatch.setattr(replay, "replay_op", failing)
    observed, _, _ = run(None, decisions=lambda saved: "recompute" if saved.index % 2 else "keep")
    assert calls[failed_at[0]] == calls[failed_at[0] + 1]
    assert same_bits(expected, observed)


class Stuck(Shortage):
    """Fails as oneDNN does: from one shortage on, a kernel that is new fails on this thread, whatever is free."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.thread = threading.current_thread()
        self.is_compiled = False

    def __call__(self, func: Any, facts: Any, args: Any, kwargs: Any) -> Any:
        """Run or fail."""
        if facts.name.startswith(self.name) and not self.is_compiled:
            if threading.current_thread() is self.thread:
                self.num_failures += 1
                raise RuntimeError("could not create a primitive")
            self.is_compiled = True
        return execute(func, facts, args, kwargs)


@pytest.mark.parametrize("name", ["aten.addmm.", "aten.gelu_backward."])
def test_what_onednn_cannot_compile_on_this_thread_is_compiled_on_another(name: str) -> None:
    """Its compiler keeps the error of a shortage for good on a thread; the op runs again when its kernel is there."""
    expected, _, expected_state = run(None)
    stuck = Stuck(name)
    observed, _, state = run(stuck)
    assert stuck.num_failures == 1
    assert stuck.is_compiled
    assert same_bits(expected, observed)
    assert torch.equal(expected_state, state)


def test_a_collective_is_never_called_twice() -> None:
    """The other ranks would wait for ever: its shortage is told as it came."""
    facts = facts_of(torch.ops._c10d_functional.all_reduce.default)
    assert facts.is_collective
    assert facts.kind is Kind.COMPUTE
    with running(UNLIMITED) as (_, session):
        total = (torch.ones(64, 64, requires_grad=True) * 2).sin().sum()
        error = torch.OutOfMemoryError("CUDA out of memory.")
        assert not may_retry(error, facts, (), None, session.room)
        assert may_retry(error, facts_of(torch.ops.aten.mm.default), (), None, session.room)
        del total


def test_only_allocators_run_out_of_memory() -> None:
    """Other errors, and the budget's own answer, are none of it."""
    budget_error = BudgetError(budget_bytes=1, least_budget_bytes=2, op="aten.mm.default", largest=[])
    cpu_error = RuntimeError("[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory")
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory."))
    assert is_out_of_memory(cpu_error)
    assert is_out_of_memory(RuntimeError("could not create a primitive"))
    assert not is_out_of_memory(budget_error)
    assert not is_out_of_memory(RuntimeError("shapes cannot be multiplied: out of memory of what was meant"))


PROGRAM = """
import resource, sys
import torch
from torchdelta import Config, MemoryBudget
torch.set_num_threads(1)
torch.manual_seed(0)
width, depth, batch = 512, 24, 4096  # 8 MiB an activation
net = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.GELU()) for _ in range(depth)))
x = torch.randn(batch, width)
net(x[:64]).sum().backward()  # libraries are loaded, gradients are there
with MemoryBudget("1TiB", Config(tier="disk")) as warm:
    net(x[:64]).sum().backward()
used_bytes = int(next(l for l in open("/proc/self/status") if l.startswith("VmData")).split()[1]) * 1024
if sys.argv[1] != "free":
    limit_bytes = used_bytes + 220 * 2**20
    resource.setrlimit(resource.RLIMIT_DATA, (limit_bytes, limit_bytes))
if sys.argv[1] == "plain":
    loss = net(x).square().mean()
    loss.backward()
else:
    with MemoryBudget("1TiB", Config(tier="disk")):
        loss = net(x).square().mean()
        loss.backward()
print(loss.item().hex(), sum(p.grad.double().sum().item() for p in net.parameters()).hex())
"""


ONEDNN_PROGRAM = """
import resource, sys
import torch
from torchdelta import Config, MemoryBudget
torch.set_num_threads(1)
torch.manual_seed(0)
x, g = torch.randn(4096, 512), torch.randn(4096, 512)  # 8 MiB
torch.ops.aten.gelu_backward(g[:64], x[:64])  # libraries are loaded
weight = torch.randn(512, requires_grad=True)
with MemoryBudget("1TiB", Config(tier="memory")):
    saved = [(x * weight).sin() for _ in range(8)]
    used_bytes = int(next(l for l in open("/proc/self/status") if l.startswith("VmData")).split()[1]) * 1024
    if sys.argv[1] != "free":
        limit_bytes = used_bytes + 8 * 2**20 + 64 * 2**10  # its output, and not what oneDNN compiles
        resource.setrlimit(resource.RLIMIT_DATA, (limit_bytes, limit_bytes))
    result = torch.ops.aten.gelu_backward(g, x)
print(result.double().sum().item().hex())
"""


def outcome(mode: str, tmp_path: os.PathLike[str], program: str = PROGRAM) -> subprocess.CompletedProcess[str]:
    """Run the program in a process of its own.

    Each activation is mapped alone: in glibc's heap aligned blocks leave holes that no block of their size fits into,
    so that whether a step fits would depend on the order in which they were freed.
    """
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "TORCHDELTA_SWAP_DIR": str(tmp_path),
        "MALLOC_ARENA_MAX": "1",
        "MALLOC_MMAP_THRESHOLD_": str(2**20),
    }
    return subprocess.run(
        [sys.executable, "-c", program, mode], env=environment, capture_output=True, text=True, check=False
    )


@pytest.mark.rest
def test_a_real_limit_below_the_budget(tmp_path: os.PathLike[str]) -> None:
    """The kernel refuses memory: plain ends in an error, inside a budget that is far too large the step finishes."""
    free = outcome("free", tmp_path)
    assert free.returncode == 0, free.stderr
    plain = outcome("plain", tmp_path)
    assert "can't allocate memory" in plain.stderr
    ours = outcome("budget", tmp_path)
    assert ours.returncode == 0, ours.stderr[-2000:]
    assert ours.stdout == free.stdout
    assert "ran out of memory below the budget" in ours.stderr


@pytest.mark.rest
def test_a_real_limit_at_which_onednn_cannot_compile(tmp_path: os.PathLike[str]) -> None:
    """The op's output fits below the kernel's limit and what oneDNN maps for the code does not: the op runs again."""
    free = outcome("free", tmp_path, ONEDNN_PROGRAM)
    assert free.returncode == 0, free.stderr
    ours = outcome("budget", tmp_path, ONEDNN_PROGRAM)
    assert ours.returncode == 0, ours.stderr[-2000:]
    assert ours.stdout == free.stdout
    assert "aten.gelu_backward.default ran out of memory below the budget" in ours.stderr
