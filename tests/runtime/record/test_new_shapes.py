"""Steps and ops of new shapes between steps that use the native tape: they do not keep these from using it."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING
from unittest import mock

import msgspec
import pytest
import torch

from tests.following import drawn_plan, follow_anyway, planned_here
from tests.runtime.parts import running_session
from tests.runtime.record.partly import CHANGES_AT, NUM_LAYERS, ROWS, WIDTH
from tests.runtime.record.taped import (
    NUM_STEPS,
    Loop,
    budget_of_usual_steps,
    one_thread_and_the_tape,  # noqa: F401 - a fixture
    outcome,
    same_bits,
    usual,
)
from tests.same_bits.judge import seed_everything
from torchdelta import BudgetError, Config, MemoryBudget
from torchdelta.runtime.current import current_session

if TYPE_CHECKING:
    from torchdelta.machine.model import Machine
    from torchdelta.plan.model import Plan
    from torchdelta.trace.model import Trace

pytestmark = [
    pytest.mark.usefixtures("one_thread_and_the_tape"),
]
_NUM_STEPS = 60
_LENGTHS = 4


def _train_on(loop: Loop, num_rows: int) -> None:
    """Train one step on so many rows."""
    x = torch.randn(num_rows, WIDTH)
    for layer in range(NUM_LAYERS):
        x = loop.stack.block(layer, x + loop.read[:num_rows])
    loss = x.square().mean()
    loss.backward()
    loop.update(loss)


def test_an_op_of_a_new_shape_before_each_step() -> None:
    """What a backward takes is measured in its own steps: ops elsewhere do not call for measuring it again."""

    def body(loop: Loop, index: int) -> None:
        if index >= CHANGES_AT:
            with torch.no_grad():
                loop.read.copy_(loop.read + torch.randn(index + 1, WIDTH).mean())
        usual(loop)

    counts = same_bits(body)
    assert counts[-1] - counts[CHANGES_AT - 1] == NUM_STEPS - CHANGES_AT


class _Averages(torch.nn.Module):
    """Averages embeddings: what the length makes larger is not among the saved tensors that a plan numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(64, 8192)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(512, 512) for _ in range(6))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the loss."""
        x = self.embedding(tokens).mean(1).view(-1, 512).repeat(4, 1)
        for layer in self.layers:
            x = x + torch.nn.functional.gelu(layer(x))
        return x.square().mean()


def _recompute_most(trace: Trace, _machine: Machine, _budget_bytes: int) -> Plan:
    plan = drawn_plan(trace, 2)
    leaving = sorted(plan.absences, key=lambda absence: absence.last_use_op)[2:]
    return msgspec.structs.replace(
        plan, absences=tuple(msgspec.structs.replace(absence, action="recompute") for absence in leaving)
    )


@pytest.mark.parametrize("reads_gradients_first", [False, True])
@pytest.mark.parametrize("has_gate", [False, True])
def test_no_backward_is_taken_for_that_of_a_smaller_forward(has_gate: bool, reads_gradients_first: bool) -> None:
    """Steps that save the same tensors may differ in what they make: such a step passes no budget unseen."""
    seed_everything()
    model, budget_bytes = _Averages(), 31_500_000
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    peaks: list[int] = []

    def train(length: int) -> None:
        loss = model(torch.randint(0, 64, (16, length)))
        if reads_gradients_first:
            torch.autograd.grad(loss, [model.layers[-1].weight], retain_graph=True)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        peaks.append(running_session().steps.last_peak_bytes)

    with (
        planned_here(_recompute_most),
        mock.patch("torchdelta.runtime.follow.predictions._MAX_CORRECTIONS", 0),
        MemoryBudget(budget_bytes, Config(planner="torchdelta", tier="memory")),
    ):
        session = running_session()
        follow_anyway(session)
        session.partial._can_have_gate &= has_gate  # noqa: SLF001 - as before torch 2.13
        for _ in range(10):
            train(2)
        assert not session.follower.ended.was_watched
        with contextlib.suppress(BudgetError):
            for _ in range(3):
                train(31)
    assert max(peaks) <= budget_bytes


def _resumed_and_programs() -> tuple[int, int]:
    session = running_session()
    return session.partial.num_resumed, session.programs.num_programs


def test_steps_of_a_new_length_are_traced_while_others_use_the_tape() -> None:
    """Until their lengths have programs of their own, recording in part goes on."""
    found: list[tuple[int, int]] = []

    def body(loop: Loop, index: int) -> None:
        if index < CHANGES_AT or index % 2:
            usual(loop)
        else:
            _train_on(loop, ROWS - 32 * (1 + index // 2 % _LENGTHS))
        if current_session() is not None:
            found.append(_resumed_and_programs())

    plain, _ = outcome(body, None, _NUM_STEPS)
    seen, counts = outcome(body, budget_of_usual_steps(), _NUM_STEPS)
    assert [index for index in range(len(plain)) if plain[index] != seen[index]] == []
    assert found[-1][0] == found[CHANGES_AT - 1][0]
    assert found[-1][1] >= found[CHANGES_AT - 1][1] + _LENGTHS
    assert counts[-1] - counts[CHANGES_AT - 1] > (_NUM_STEPS - CHANGES_AT) // 2


def test_a_step_that_is_traced_from_its_first_save_on_is_that_step() -> None:
    """A trace that begins in the middle of a step has all of its saved tensors."""
    lengths: list[int] = []

    def body(loop: Loop, index: int) -> None:
        is_new = index >= CHANGES_AT
        _train_on(loop, ROWS - 32 * is_new)
        session = current_session()
        if session is not None and is_new:
            lengths.append(session.follower.num_followed_steps)

    num_steps = CHANGES_AT + 8
    plain, _ = outcome(body, None, num_steps)
    seen, _ = outcome(body, budget_of_usual_steps(), num_steps)
    assert plain == seen
    assert lengths[-1] - lengths[3] == len(lengths) - 4  # the second time it is traced, and then it is followed
