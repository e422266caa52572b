"""Same bits and the budget in drawn networks and drawn loops whose steps are planned by themselves, early."""

from __future__ import annotations

import contextlib
import gc
from typing import TYPE_CHECKING, Any

import pytest

from tests.following import planned_soon
from tests.runtime.parts import running_session
from tests.same_bits.drawn_networks import plain_observations, train
from tests.sampling import sample
from torchdelta import BudgetError, Config, MemoryBudget

if TYPE_CHECKING:
    from collections.abc import Iterator

# The networks provoke torch's own warnings.
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("needs_counter")]

NUM_SEEDS = 40
NUM_STEPS = 18
SHARES = (0.9, 0.8, 0.7)
SLOWER = (1e9, 1e9, 1.02, 0.0)  # from which multiple of the time of reacting steps on a plan is given up


def train_within(
    room_bytes: int | None, planner: str | None, seed: int, *, only_plain: bool = False
) -> tuple[list[Any], int, MemoryBudget]:
    """Train a drawn loop.

    Args:
        room_bytes: The budget above what lives already: a graph that nobody runs may stay for ever, in a circle through
            a hook of the drawn network. None: no limit.
        planner: Of the configuration.
        seed: Of the draw.
        only_plain: Whether all steps are alike.

    Returns:
        What can be observed, the peak above what lived before, and the scope.
    """
    budgets: list[MemoryBudget] = []
    gc.collect()
    with MemoryBudget("1TiB"):
        start_bytes = running_session().ledger.usage.total_bytes
    budget_bytes = 2**40 if room_bytes is None else start_bytes + room_bytes

    @contextlib.contextmanager
    def scope() -> Iterator[None]:
        with MemoryBudget(budget_bytes, Config(planner=planner, tier=("memory", "disk")[seed % 2])) as budget:
            budgets.append(budget)
            yield

    with planned_soon(least_bytes=4096, slower=SLOWER[seed % len(SLOWER)]):
        observed = train(seed, scope, num_steps=NUM_STEPS, only_plain=only_plain)
    (budget,) = budgets
    return observed, budget.summary().peak_bytes - start_bytes, budget


def judge(seed: int, *, only_plain: bool = False) -> tuple[str, int]:
    """Return what is wrong with a drawn loop, and how many of its steps were followed; -1 if it cannot be judged."""
    plain = plain_observations(seed, num_steps=NUM_STEPS, only_plain=only_plain)
    if plain is None:
        return "", -1
    _, plain_bytes, _ = train_within(None, None, seed, only_plain=only_plain)
    room_bytes = int(SHARES[seed % len(SHARES)] * plain_bytes)
    try:
        reacting, reactive_bytes, _ = train_within(room_bytes, None, seed, only_plain=only_plain)
    except BudgetError:
        return "", -1
    if reacting != plain:
        return "other bits reactively", 0
    try:
        observed, peak_bytes, budget = train_within(room_bytes, "auto", seed, only_plain=only_plain)
    except BudgetError:
        if reactive_bytes > room_bytes:  # the steps that reacted passed the budget, so it is too small for them, too
            return "", -1
        raise
    # Where an op allocates inside itself for the first time, steps that react pass the budget by some KiB: how many
    # depends on what had left by then.
    most_bytes = int(1.01 * max(room_bytes, reactive_bytes))
    wrong = [
        "other bits" if observed != plain else "",
        f"a peak of {peak_bytes} bytes within {most_bytes}" if peak_bytes > most_bytes else "",
    ]
    follow = budget.summary().follow
    return ", ".join(filter(None, wrong)), follow.num_followed_steps if follow is not None else 0


@pytest.mark.parametrize("seed", sample(range(NUM_SEEDS), 2, 0))
def test_drawn_loops_that_are_planned_by_themselves(seed: int) -> None:
    """Steps that differ, faults, accumulation: bits and budget are held when plans begin in the middle."""
    wrong, num_followed = judge(seed)
    if num_followed < 0:
        pytest.skip("plain fails or does not equal itself, or the budget is too small for reacting")
    assert not wrong


@pytest.mark.parametrize("seed", sample(range(NUM_SEEDS), 1, 0))
def test_alike_steps_of_drawn_networks_are_followed(seed: int) -> None:
    """Where every step is the same one, it is followed: the loops above are not all left to the policy."""
    wrong, num_followed = judge(seed, only_plain=True)
    if num_followed < 0:
        pytest.skip("plain fails or does not equal itself, or the budget is too small for reacting")
    assert not wrong
    assert num_followed or SLOWER[seed % len(SLOWER)] < 2
