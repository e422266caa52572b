"""Same bits on every differentiable operator that torch ships samples for."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import pytest

from tests.following import judge_all_followed
from tests.same_bits.judge import DECISIONS, Step, judge, plain_outcome
from tests.same_bits.op_database import (
    NOT_REPRODUCIBLE,
    NUM_CHUNKS,
    differentiable_operators,
    operator_calls,
    operator_step,
)
from tests.sampling import sample

if TYPE_CHECKING:
    from collections.abc import Iterable

# The samples provoke torch's own warnings on purpose.
pytestmark = pytest.mark.filterwarnings("ignore")


# Samples of one operator that are followed: each takes four steps.
MAX_FOLLOWED = 2


@pytest.fixture(scope="module", autouse=True)
def _imported() -> None:
    """Import the database before the collector is told to leave imports out."""
    differentiable_operators()


def offending(named_steps: Iterable[tuple[str, Step]]) -> tuple[dict[str, list[str]], int]:
    """Judge steps in every kind of decisions; where plain raises, ours has to raise the same.

    Returns:
        The differences by "name decisions", and the number of steps that plain finished.
    """
    found: dict[str, list[str]] = {}
    num_finished = 0
    for name, step in named_steps:
        if name in NOT_REPRODUCIBLE:
            continue
        plain = plain_outcome(step)
        num_finished += plain.raised is None
        for kind, decisions in DECISIONS.items():
            differences = judge(step, decisions, plain)
            if differences:
                found[f"{name} {kind}"] = differences[:2]
    return found, num_finished


def test_the_database_is_the_whole_one() -> None:
    """The promise speaks of every differentiable operator; a filter that drops many must not pass unseen."""
    assert len(differentiable_operators()) >= 500


@pytest.mark.parametrize("chunk", sample(range(NUM_CHUNKS), 1, 0))
def test_every_operator_leaves_the_same_bits(chunk: int) -> None:
    """Outputs, gradients and generators of up to four samples of each operator equal the plain run's."""
    named_steps = (
        (name, operator_step(operator, arguments))
        for op in differentiable_operators()[chunk::NUM_CHUNKS]
        for name, operator, arguments in operator_calls(op)
    )
    found, num_finished = offending(named_steps)
    assert found == {}
    assert num_finished >= 80


@pytest.mark.parametrize("chunk", sample(range(NUM_CHUNKS), 0, 1))
def test_every_operator_leaves_the_same_bits_when_a_plan_is_followed(chunk: int) -> None:
    """The same of the first sample of each operator, in steps in which saved tensors leave and return by a program."""
    named_steps = (
        (name, operator_step(operator, arguments))
        for op in differentiable_operators()[chunk::NUM_CHUNKS]
        for name, operator, arguments in itertools.islice(operator_calls(op), MAX_FOLLOWED)
        if name not in NOT_REPRODUCIBLE
    )
    found, num_finished = judge_all_followed(named_steps)
    assert found == {}
    assert num_finished >= 40
