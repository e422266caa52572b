"""Tensors that nobody can reach any more take no room from a step that fits."""

from __future__ import annotations

import gc
import weakref
from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn

from tests.faults.switches import disabled
from tests.runtime.memory.test_retry import Shortage
from tests.runtime.parts import buffer_of
from tests.runtime.programs import UNLIMITED, mlp, running, same_bits, train
from torchdelta import BudgetError
from torchdelta._torch.modes import Quietly
from torchdelta._torch.ops import execute
from torchdelta.native.counting import counting_status
from torchdelta.runtime.policies.base import Action
from torchdelta.runtime.record.needs import Need
from torchdelta.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torchdelta import MemoryBudget

NUM_CYCLES = 16
CYCLE_BYTES = 2**16
GARBAGE_BYTES = NUM_CYCLES * CYCLE_BYTES
"""About as much as the step needs."""


class Cycle:
    """Holds a tensor, and itself: only the collector frees it."""

    def __init__(self) -> None:
        self.itself = self
        self.tensor = torch.ones(CYCLE_BYTES // 4)


def _make_garbage() -> None:
    for _ in range(NUM_CYCLES):
        Cycle()


@pytest.fixture
def _by_hand() -> Iterator[None]:
    """Let nobody but the library collect."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()
    gc.collect()


def _plain() -> tuple[list[torch.Tensor], int]:
    torch.manual_seed(0)
    model, x = mlp(64, 4), torch.randn(256, 64)
    with running() as (budget, _):
        observed = train(model, x)
    return observed, budget.summary().peak_bytes


def _fits_beside_garbage(budget_bytes: int, *, before: bool) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model, x = mlp(64, 4), torch.randn(256, 64)
    if before:
        _make_garbage()
    with running(budget_bytes) as _:
        if not before:
            _make_garbage()
        return train(model, x)


@pytest.mark.usefixtures("_by_hand")
@pytest.mark.parametrize("before", [True, False])
def test_garbage_is_collected_before_a_budget_is_called_impossible(before: bool) -> None:
    """Reference cycles made before the scope or in it: the step runs, with the bits of plain."""
    expected, peak_bytes = _plain()
    assert same_bits(_fits_beside_garbage(peak_bytes + GARBAGE_BYTES // 8, before=before), expected)


@pytest.mark.usefixtures("_by_hand")
def test_without_collecting_garbage_ends_the_step() -> None:
    """The control: with the handling off the same step does not fit."""
    _, peak_bytes = _plain()
    with disabled("garbage"), pytest.raises(BudgetError):
        _fits_beside_garbage(peak_bytes + GARBAGE_BYTES // 8, before=True)


class Littering(nn.Module):
    """Leaves a cycle behind that holds what it hands on, as a module does that keeps a closure over it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Hand on."""
        cycle: list[object] = [x]
        cycle.append(cycle)
        return x


@pytest.mark.usefixtures("_by_hand")
@pytest.mark.parametrize("policy", ["swap-only", "recompute-only"])
def test_what_garbage_holds_as_well_can_leave(policy: str) -> None:
    """Cycles that hold what autograd saves free nothing by themselves: it can leave once they are gone."""

    def run(budget: int | str) -> tuple[list[torch.Tensor], MemoryBudget]:
        torch.manual_seed(0)
        layers = [[nn.Linear(64, 64), nn.Tanh(), Littering()] for _ in range(8)]
        model, x = nn.Sequential(*(layer for each in layers for layer in each)), torch.randn(256, 64)
        with running(budget, policy=policy) as (memory_budget, _):
            return train(model, x, num_steps=1), memory_budget

    expected, plain = run(UNLIMITED)
    gc.collect()
    observed, memory_budget = run(int(0.75 * plain.summary().peak_bytes))
    summary = memory_budget.summary()
    assert same_bits(observed, expected)
    assert summary.swapped_out_bytes + summary.recomputed_bytes > 0


@pytest.mark.usefixtures("_by_hand")
def test_garbage_that_only_the_allocator_knows_is_collected_too() -> None:
    """Made where no mode looks, it is counted at the allocator alone."""
    if not counting_status().is_on:
        pytest.skip("nothing counts at the allocator here")
    expected, peak_bytes = _plain()
    torch.manual_seed(0)
    model, x = mlp(64, 4), torch.randn(256, 64)
    with running(peak_bytes + GARBAGE_BYTES // 8):
        with Quietly():
            _make_garbage()
        assert same_bits(train(model, x), expected)


@pytest.mark.usefixtures("_by_hand")
def test_an_op_out_of_memory_runs_again_after_a_collection(caplog: pytest.LogCaptureFixture) -> None:
    """Nothing can leave, but there is garbage: the op has the room of that. Without any, the error is the user's."""
    with running() as (_, session), torch.no_grad():
        _make_garbage()
        shortage = session.recorder.execute = Shortage("aten.sin")  # pyright: ignore[reportAttributeAccessIssue]
        assert torch.equal(torch.ones(3).sin(), torch.ones(3).double().sin().float())
        assert shortage.num_failures == 1
        assert f"evicting 0 B, collecting {format_bytes(GARBAGE_BYTES)} of garbage" in caplog.text
        session.recorder.execute = Shortage("aten.sin")  # pyright: ignore[reportAttributeAccessIssue]
        with pytest.raises(torch.OutOfMemoryError):
            torch.ones(3).sin()


@pytest.mark.usefixtures("_by_hand")
@pytest.mark.parametrize("records", [False, True])
def test_what_went_before_an_op_ran_again_is_none_of_what_it_takes(records: bool) -> None:
    """Measured from before it went, the op would seem to take nothing inside itself, and pass the budget next time."""
    if not counting_status().is_on:
        pytest.skip("nothing counts at the allocator here")
    learned: list[list[int]] = []
    original = Need.learn_workspace
    for fails in (False, True):
        found: list[int] = []

        def learn(self: Need, size_bytes: int, found: list[int] = found) -> int:
            found.append(size_bytes)
            return original(self, size_bytes)

        x, weight = torch.ones(4, 8, 16, 16), torch.ones(8, 8, 3, 3, requires_grad=records)
        with running() as (_, session), pytest.MonkeyPatch.context() as patch:
            _make_garbage()
            if fails:
                session.recorder.execute = Shortage("aten.convolution.")  # pyright: ignore[reportAttributeAccessIssue]
            patch.setattr(Need, "learn_workspace", learn)
            torch.nn.functional.conv2d(x, weight, padding=1)
        learned.append(found)
        gc.collect()
    assert learned[0][0] > x.nbytes // 2
    assert learned[1] == learned[0]


@pytest.mark.usefixtures("_by_hand")
def test_a_graph_that_is_collected_takes_no_op_under_way_with_it() -> None:
    """All that was saved is garbage, and goes in the middle of an op: how that op is replayed is known all the same."""
    with running() as (_, session):
        graph = torch.ones(64, 64, requires_grad=True).exp()
        cycle: list[object] = [graph]
        cycle.append(cycle)
        del graph, cycle
        x = torch.full((64, 64), 2.0)
        session.recorder.execute = Shortage("aten.mul")  # pyright: ignore[reportAttributeAccessIssue]
        y = x * 2
        session.recorder.execute = execute  # pyright: ignore[reportAttributeAccessIssue]
        del x
        leaf = torch.ones(64, 64, requires_grad=True)
        loss = (leaf * y).sum()
        buffer = buffer_of(session, y)
        del y
        session.room.evict(buffer, Action.RECOMPUTE)
        loss.backward()
        assert leaf.grad is not None
        assert leaf.grad.eq(4).all()


@pytest.mark.usefixtures("_by_hand")
def test_nothing_is_collected_while_the_step_fits() -> None:
    """A collection takes its time, so it comes last."""
    with running(UNLIMITED) as (_, session):
        cycle = Cycle()
        remains = weakref.ref(cycle)
        del cycle
        train(mlp(64, 4), torch.randn(256, 64))
        assert remains() is not None
        assert session.room.collected_bytes == 0


@pytest.mark.usefixtures("_by_hand")
def test_a_backward_in_which_garbage_went_is_not_measured() -> None:
    """It grew from a start that held the garbage: without it the same backward grows by more."""

    class Collects(torch.autograd.Function):
        """Does nothing, but that garbage goes when its gradient comes."""

        @staticmethod
        def forward(_ctx: object, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(_ctx: object, *gradients: torch.Tensor) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
            session.room.collect_garbage()
            return gradients[0]

    calls: list[object] = []
    num_measured: list[int] = []
    with running(UNLIMITED) as (_, session), pytest.MonkeyPatch.context() as patch:
        session.room.budget_bytes = 2**40
        patch.setattr(session.backward.headroom, "measured", lambda *args, **_: calls.append(args))
        for makes_garbage in (False, False, True):  # the first one is traced
            if makes_garbage:
                _make_garbage()
            x = torch.randn(64, 64, requires_grad=True)
            Collects.apply(x.sin()).sum().backward()
            num_measured.append(len(calls))
    assert num_measured == [0, 1, 1]
