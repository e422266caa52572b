"""Same bits in steps that are not recorded at first: operators, modules, and drawn loops that pause often."""

from __future__ import annotations

import pytest

from tests.paused import judge_all_paused, pausing_often
from tests.same_bits.drawn_networks import plain_observations, train
from tests.same_bits.op_database import (
    NOT_REPRODUCIBLE,
    NUM_CHUNKS,
    differentiable_operators,
    operator_calls,
    operator_step,
)
from tests.sampling import sample
from torchdelta.native.counting import counting_status

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # the samples provoke torch's own warnings
    pytest.mark.skipif(not counting_status().is_on, reason="needs the native parts"),
]

NUM_SEEDS = 40


@pytest.fixture(scope="module", autouse=True)
def _imported() -> None:
    """Import the database before the collector is told to leave imports out."""
    differentiable_operators()


@pytest.mark.parametrize("chunk", sample(range(NUM_CHUNKS), 1, 2))
def test_every_operator_leaves_the_same_bits_unrecorded(chunk: int) -> None:
    """Where plain raises, ours raises the same; saved tensors leave once recording resumes."""
    found, num_finished = judge_all_paused(
        (name, operator_step(operator, arguments))
        for op in differentiable_operators()[chunk::NUM_CHUNKS]
        for name, operator, arguments in operator_calls(op)
        if name not in NOT_REPRODUCIBLE
    )
    assert found == {}
    assert num_finished >= 80


@pytest.mark.parametrize("seed", sample(range(NUM_SEEDS), 4, 12))
def test_drawn_loops_leave_the_same_bits_with_many_pauses(seed: int) -> None:
    """Branches, views, in-place ops, kept graphs, and steps that differ."""
    plain = plain_observations(seed)
    if plain is None:
        pytest.skip("plain fails or does not equal itself")
    assert train(seed, lambda: pausing_often("1TiB")) == plain
