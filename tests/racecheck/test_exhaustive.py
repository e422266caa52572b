"""Every schedule of small steps; `python -m tests.racecheck exhaustive` goes up to six tensors."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import pytest

from tests.racecheck.explore import explore, swap_tensors
from tests.racecheck.mutants import applied, find_mutants
from tests.racecheck.session_steps import chain

if TYPE_CHECKING:
    from tests.racecheck.paths import Bench

pytestmark = pytest.mark.racecheck
MOST_RUNS = 20_000


@pytest.mark.parametrize("num_tensors", [1, 2, 3])
def test_every_schedule_of_the_tier(bench: Bench, num_tensors: int) -> None:
    """Tensors that leave and come back through pinned memory: whatever the host finds when it asks."""
    for depth in (1, 2):
        explored = explore(bench, swap_tensors(num_tensors, depth), most_runs=MOST_RUNS)
        assert explored.is_complete
        assert explored.found == []


@pytest.mark.parametrize("decisions", ["s", "r", "ss", "sr", "rs"])
def test_every_schedule_of_a_session(bench: Bench, decisions: str) -> None:
    """A whole step of a session."""
    explored = explore(bench, chain(decisions), most_runs=MOST_RUNS)
    assert explored.is_complete
    assert explored.found == []


def whole_if_long(decisions: str) -> object:
    """Leave what swaps two tensors and more to `make test-whole`: each that is swapped multiplies the schedules."""
    return pytest.param(decisions, marks=pytest.mark.whole if decisions.count("s") > 1 else pytest.mark.rest)


@pytest.mark.parametrize("decisions", [whole_if_long("".join(each)) for each in itertools.product("srk", repeat=3)])
def test_every_schedule_of_every_mix(bench: Bench, decisions: str) -> None:
    """Every mix of decisions for three tensors."""
    explored = explore(bench, chain(decisions), most_runs=MOST_RUNS)
    assert explored.is_complete
    assert explored.found == []


def test_states_that_were_seen_add_nothing(bench: Bench) -> None:
    """Leaving out states that were seen loses no sequence of calls."""
    for program in (swap_tensors(2, 1), swap_tensors(2, 2), chain("s")):
        pruned = explore(bench, program, most_runs=MOST_RUNS)
        whole = explore(bench, program, most_runs=MOST_RUNS, dedupes=False)
        assert whole.is_complete
        assert pruned.num_logs == whole.num_logs
        assert pruned.num_runs <= whole.num_runs


def test_the_parts_of_an_exploration_are_the_whole(bench: Bench) -> None:
    """The parts by the first two answers, which can run one at a time, have every schedule between them."""
    whole = explore(bench, swap_tensors(2, 1), most_runs=MOST_RUNS, dedupes=False)
    parts = [
        explore(bench, swap_tensors(2, 1), most_runs=MOST_RUNS, dedupes=False, first_answers=answers)
        for answers in itertools.product((0, 1), repeat=2)
    ]
    assert all(part.is_complete and part.num_runs < whole.num_runs for part in parts)
    assert sum(part.num_runs for part in parts) == whole.num_runs


def test_a_removed_wait_is_found_by_exploring(bench: Bench) -> None:
    """Negative control: without the wait of the compute stream, a schedule of one tensor fails."""
    (mutant,) = (each for each in find_mutants() if each.name == "tiers.pinned:PinnedTier.hold_compute#0")
    with applied(mutant):
        assert explore(bench, swap_tensors(1, 1), most_runs=MOST_RUNS).found
