"""Run a step in each kind of budget that a user can ask for, and compare it with plain torch bit for bit.

Four kinds: a budget that never presses, one a little above the least at which the step finishes, and two that force
one decision on every saved tensor. The comparison is the judge's of same_bits/.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.same_bits.judge import (
    DECISIONS,
    Outcome,
    Scope,
    Step,
    differences,
    inside_budget,
    leaks,
    plain_outcome,
    run,
    seed_everything,
)
from torchdelta import BudgetError, MemoryBudget

if TYPE_CHECKING:
    from collections.abc import Callable

# More than these steps can use, and less than what the forced decisions are given, which is no limit at all.
AMPLE = "64GiB"
MARGIN = 1.05
MAX_SEARCHES = 24


def ample() -> Scope:
    """Make a scope factory whose budget never presses."""
    return lambda: MemoryBudget(AMPLE)


def tight(step: Step) -> Scope:
    """Make a scope factory whose budget is a little above the least that the errors of smaller ones name."""
    budget_bytes = 1
    for _ in range(MAX_SEARCHES):
        seed_everything()
        limit_bytes = budget_bytes
        try:
            step(lambda limit_bytes=limit_bytes: MemoryBudget(limit_bytes))
        except BudgetError as error:
            # A bound from below grows by a few bytes a time: go ahead of it a little.
            budget_bytes = int(max(budget_bytes, error.least_budget_bytes) * 1.03) + 1
        except Exception:  # noqa: BLE001 - the judge compares it with plain's, in the budget found so far
            break
        else:
            break
    final_bytes = int(budget_bytes * MARGIN)
    return lambda: MemoryBudget(final_bytes)


SCOPES: dict[str, Callable[[Step], Scope]] = {
    "ample": lambda _step: ample(),
    "tight": tight,
    "recompute": lambda _step: inside_budget(DECISIONS["recompute"]),
    "swap": lambda _step: inside_budget(DECISIONS["swap"]),
}


def verdicts(step: Step, *names: str, raises: type[BaseException] | None = None) -> dict[str, list[str]]:
    """Return how a step differs from the plain one in each kind of budget; empty where it nowhere does."""
    plain = plain_outcome(step)
    if raises is None:
        assert plain.raised is None, f"the plain step raised {plain.message}"
    else:
        assert plain.raised is not None, "the plain step raised nothing"
        assert issubclass(plain.raised, raises), f"the plain step raised {plain.message}"
    found = {name: _verdict(step, SCOPES[name](step), plain) for name in names or SCOPES}
    return {name: differing[:8] for name, differing in found.items() if differing}


def _verdict(step: Step, scope: Scope, plain: Outcome) -> list[str]:
    actual = run(step, scope)
    found = differences(plain, actual)
    if leaks(plain, actual):
        # A cache that fills once is no leak: what grew in the first run must not grow again in a second one.
        found = [difference for difference in found if not difference.endswith("leaked")]
        found += leaks(actual, run(step, scope))
    return found


def assert_same(step: Step, *names: str) -> None:
    """Assert that a step leaves plain torch's bits in each kind of budget (all four, or those that are named)."""
    found = verdicts(step, *names)
    assert not found, f"not the plain run's bits: {found}"


def assert_same_failure(step: Step, error: type[BaseException], *names: str) -> None:
    """Assert that a step raises in each kind of budget what it raises plainly, and leaks nothing."""
    found = verdicts(step, *names, raises=error)
    assert not found, f"not the plain run's error: {found}"
