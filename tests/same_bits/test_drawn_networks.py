"""Same bits in drawn networks and drawn loops, while drawn programs are followed."""

from __future__ import annotations

import pytest

from tests.following import following_drawn
from tests.same_bits.drawn_networks import plain_observations, train
from tests.sampling import sample

# The networks provoke torch's own warnings.
pytestmark = pytest.mark.filterwarnings("ignore")

NUM_SEEDS = 40


@pytest.mark.parametrize("seed", sample(range(NUM_SEEDS), 3, 2))
def test_drawn_loops_leave_the_same_bits_when_a_plan_is_followed(seed: int) -> None:
    """Branches, views, in-place ops, and steps that differ: losses, gradients, statistics and generators are equal."""
    plain = plain_observations(seed)
    if plain is None:
        pytest.skip("plain fails or does not equal itself")
    assert train(seed, lambda: following_drawn(seed)) == plain
