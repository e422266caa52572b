"""Same bits and the budget in drawn networks and drawn loops whose steps are planned by themselves, early."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import pytest

from tests.following import planned_soon
from tests.runtime.parts import running_session
from tests.same_bits.drawn_networks import train
from tests.sampling import sample
from torchdelta import BudgetError, Config, MemoryBudget
from torchdelta.errors import NativeError
from torchdelta.native.counting import new_counter

if TYPE_CHECKING:
    from collections.abc import Iterator

# The networks provoke torch's own warnings.
pytestmark = pytest.mark.filterwarnings("ignore")

NUM_SEEDS = 40
NUM_STEPS = 18
SHARES = (0.9, 0.8, 0.7)
SLOWER = (1e9, 1e9, 1.02, 0.0)  # from which multiple of the time of reacting steps on a plan is given up


@pytest.fixture(autouse=True)
def _needs_counter() -> None:
    made = new_counter()
    if isinstance(made, NativeError):
        pytest.skip(f"no counting allocator here: {made}")


def train_within(
    budget_bytes: int | str, planner: str | None, seed: int, *, only_plain: bool = False
) -> tuple[list[Any], int, MemoryBudget]:
    """Return what can be observed, the bytes before the first step, and the budget."""
    budgets: list[tuple[int, MemoryBudget]] = []

    @contextlib.contextmanager
    def scope() -> Iterator[None]:
        with MemoryBudget(budget_bytes, Config(planner=planner, tier=("memory", "disk")[seed % 2])) as budget:
            budgets.append((running_session().ledger.usage.total_bytes, budget))
            yield

    with planned_soon(least_bytes=4096, slower=SLOWER[seed % len(SLOWER)]):
        observed = train(seed, scope, num_steps=NUM_STEPS, only_plain=only_plain)
    return observed, *budgets[0]


def judge(seed: int, *, only_plain: bool = False) -> tuple[str, int]:
    """Return what is wrong with a drawn loop, and how many of its steps were followed; -1 if it cannot be judged."""
    plain = train(seed, num_steps=NUM_STEPS, only_plain=only_plain)
    if train(seed, num_steps=NUM_STEPS, only_plain=only_plain) != plain:
        return "", -1
    _, start_bytes, unlimited = train_within("1TiB", None, seed, only_plain=only_plain)
    share = SHARES[seed % len(SHARES)]
    budget_bytes = start_bytes + int(share * (unlimited.summary().peak_bytes - start_bytes))
    try:
        reacting, _, reactive = train_within(budget_bytes, None, seed, only_plain=only_plain)
    except BudgetError:
        return "", -1
    observed, _, budget = train_within(budget_bytes, "auto", seed, only_plain=only_plain)
    summary = budget.summary()
    # Reacting may pass the budget where an op allocates inside itself for the first time.
    most_bytes = max(budget_bytes, reactive.summary().peak_bytes)
    wrong = [
        "other bits reactively" if reacting != plain else "",
        "other bits" if observed != plain else "",
        f"a peak of {summary.peak_bytes} bytes within {most_bytes}" if summary.peak_bytes > most_bytes else "",
        f"{budget._past[-1].ledger.num_handles} handles left" if budget._past[-1].ledger.num_handles else "",  # noqa: SLF001
    ]
    follow = summary.follow
    return ", ".join(filter(None, wrong)), follow.num_followed_steps if follow is not None else 0


@pytest.mark.parametrize("seed", sample(range(NUM_SEEDS), 2, 9))
def test_drawn_loops_that_are_planned_by_themselves(seed: int) -> None:
    """Steps that differ, faults, accumulation: bits and budget are held when plans begin in the middle."""
    wrong, num_followed = judge(seed)
    if num_followed < 0:
        pytest.skip("plain does not equal itself, or the budget is too small for reacting")
    assert not wrong


@pytest.mark.parametrize("seed", sample(range(NUM_SEEDS), 1, 5))
def test_alike_steps_of_drawn_networks_are_followed(seed: int) -> None:
    """Where every step is the same one, it is followed: the loops above are not all left to the policy."""
    wrong, num_followed = judge(seed, only_plain=True)
    if num_followed < 0:
        pytest.skip("plain does not equal itself, or the budget is too small for reacting")
    assert not wrong
    assert num_followed or SLOWER[seed % len(SLOWER)] < 2
