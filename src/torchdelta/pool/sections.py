"""Sections: time cut where it matters, so that solvers work on small integers.

[Note: maximal sections]
Between two neighbouring starts or ends nothing changes: such a span is a section. A section whose lives are all alive
in a neighbour as well adds nothing, for two lives overlap if, and only if, they share a section, and then they share a
maximal one. So only the maximal ones are kept: those before an end that follows a start. Each life covers a range of
them, and there are never more than lives.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Sections:
    """The maximal sections of some lives.

    Attributes:
        first: First section of each life.
        last: One more than its last section.
        num_sections: How many there are.
        load: Sum of the sizes of the lives in each.
    """

    first: NDArray[np.int64]
    last: NDArray[np.int64]
    num_sections: int
    load: NDArray[np.int64]


def cut(starts: NDArray[np.int64], ends: NDArray[np.int64], sizes: NDArray[np.int64]) -> Sections:
    """Cut the time of lives that all end after they start."""
    moments = np.unique(np.concatenate([starts, ends]))
    first, last = np.searchsorted(moments, starts), np.searchsorted(moments, ends)
    num_moments = len(moments)
    has_start = np.bincount(first, minlength=num_moments) > 0
    has_end = np.bincount(last, minlength=num_moments) > 0
    # The span from moment k to k + 1 is maximal if a life ends at k + 1 and one started after the end before.
    starts_so_far = np.cumsum(has_start)
    closing = np.flatnonzero(has_end) - 1
    before = np.concatenate([[0], starts_so_far[closing[:-1]]]) if len(closing) else np.zeros(0, np.int64)
    kept = closing[starts_so_far[closing] > before]
    first, last = np.searchsorted(kept, first), np.searchsorted(kept, last)
    change = np.zeros(len(kept) + 1, np.int64)
    np.add.at(change, first, sizes)
    np.subtract.at(change, last, sizes)
    return Sections(first=first, last=last, num_sections=len(kept), load=np.cumsum(change[:-1]))
