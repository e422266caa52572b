"""Medians of ratios with a bootstrap interval: the only times that a shared machine lets one state."""

from __future__ import annotations

import random
import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

NUM_RESAMPLES = 2000


@dataclass(frozen=True, kw_only=True)
class Interval:
    """A median and the 2.5 % and 97.5 % quantiles of its bootstrap distribution."""

    median: float
    low: float
    high: float
    num_samples: int

    def __str__(self) -> str:
        return f"{self.median:.3f} [{self.low:.3f}, {self.high:.3f}]"


def median_interval(samples: Sequence[float]) -> Interval:
    """Return the median with its 95 % percentile-bootstrap interval (seeded: the same samples give the same)."""
    if not samples:
        raise ValueError("no samples: an interval needs at least one")
    generator = random.Random(0)
    medians = sorted(statistics.median(generator.choices(samples, k=len(samples))) for _ in range(NUM_RESAMPLES))
    return Interval(
        median=statistics.median(samples),
        low=medians[int(0.025 * NUM_RESAMPLES)],
        high=medians[int(0.975 * NUM_RESAMPLES) - 1],
        num_samples=len(samples),
    )
