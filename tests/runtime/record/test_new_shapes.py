"""Steps and ops of new shapes between steps that use the native tape: they do not keep these from using it."""

from __future__ import annotations

import pytest
import torch

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
from torchdelta._torch.modes import CAN_ENTER_MODES_IN_OPS
from torchdelta.runtime.current import current_session

pytestmark = [
    pytest.mark.skipif(not CAN_ENTER_MODES_IN_OPS, reason="needs torch 2.13"),
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
