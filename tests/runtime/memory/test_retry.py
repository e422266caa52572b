"""An op that runs out of memory runs again when everything that can has left, and only when that is safe."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.faults.switches import disabled
from tests.runtime.memory.shortages import Shortage, model, outcome, run
from tests.runtime.programs import UNLIMITED, running, same_bits
from torchdelta.aten.facts import Kind, facts_of
from torchdelta.runtime.errors import BudgetError
from torchdelta.runtime.memory.out_of_memory import is_out_of_memory
from torchdelta.runtime.memory.retry import may_retry

if TYPE_CHECKING:
    import os


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


@pytest.mark.rest
def test_a_real_limit_below_the_budget(tmp_path: os.PathLike[str]) -> None:
    """The system refuses memory: plain ends in an error, inside a budget that is far too large the step finishes."""
    free = outcome(PROGRAM, tmp_path, "free")
    assert free.returncode == 0, free.stderr
    plain = outcome(PROGRAM, tmp_path, "plain")
    assert "can't allocate memory" in plain.stderr
    ours = outcome(PROGRAM, tmp_path, "budget")
    assert ours.returncode == 0, ours.stderr[-2000:]
    assert ours.stdout == free.stdout
    assert "cannot start its threads" not in ours.stderr  # what can be recomputed was dropped before
    assert "ran out of memory below the budget" in ours.stderr
