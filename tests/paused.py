"""Steps that are not recorded from their beginning, and recorded again from a drawn moment on."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any
from unittest import mock

from tests.runtime.parts import pausing_until, running_session
from tests.same_bits.judge import UNLIMITED, differences, leaks, plain_outcome, run
from torchdelta import Config, MemoryBudget

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable

    from tests.same_bits.judge import Outcome, Step

# After so many bytes more recording resumes; None: never.
LIMITS_BYTES = (None, 0, 300, 3_000, 30_000, 300_000)


@contextlib.contextmanager
def paused_at_once(limit_bytes: int | None, budget: int | str = UNLIMITED) -> Generator[MemoryBudget]:
    """Open a budget whose first step is not recorded; when recording resumes, all that can leave leaves."""
    with (
        mock.patch("torchdelta.runtime.session.LEAST_EVICTION_BYTES", 1),
        pausing_until(limit_bytes) as pause_now,
        MemoryBudget(budget, Config(tier="memory")) as memory_budget,
    ):
        pause_now(running_session())
        yield memory_budget


@contextlib.contextmanager
def pausing_often(budget: int | str, **options: Any) -> Generator[MemoryBudget]:
    """Open a budget that pauses recording after every step that fitted, however often it had to resume."""
    with (
        mock.patch("torchdelta.runtime.record.pause._FEWEST_ALIKE", 1),
        mock.patch("torchdelta.runtime.record.pause._MORE_ALIKE", 1),
        MemoryBudget(budget, Config(tier="memory", **options)) as memory_budget,
    ):
        yield memory_budget


def judge_paused(step: Step, plain: Outcome, limit_bytes: int | None) -> list[str]:
    """Name everything in which an unrecorded step differs from the plain one. A cache that fills once is no leak."""
    actual = run(step, lambda: paused_at_once(limit_bytes))
    if leaks(plain, actual):
        again = run(step, lambda: paused_at_once(limit_bytes))
        return [d for d in differences(plain, actual) if not d.endswith("leaked")] + leaks(actual, again)
    return differences(plain, actual)


def judge_all_paused(named_steps: Iterable[tuple[str, Step]]) -> tuple[dict[str, list[str]], int]:
    """Judge steps that are not recorded at first.

    Returns:
        The first differences by name, and the number of steps that plain finished.
    """
    found: dict[str, list[str]] = {}
    num_finished = 0
    for index, (name, step) in enumerate(named_steps):
        plain = plain_outcome(step)
        num_finished += plain.raised is None
        for limit_bytes in {LIMITS_BYTES[index % len(LIMITS_BYTES)], LIMITS_BYTES[(index // 2) % len(LIMITS_BYTES)]}:
            differing = judge_paused(step, plain, limit_bytes)
            if differing:
                found[f"{name} {limit_bytes}"] = differing[:2]
    return found, num_finished
