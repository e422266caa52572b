"""SmartPool (Zhang et al. 2019, arXiv 1903.06631; apache/singa pull request 412, src/core/memory/memory.cc).

Blocks by size, largest first, then by start; each into the smallest hole (best fit) or the lowest one (first fit)
between what is already placed and alive at some moment with it, else on top. As published, best fit never looks below
the first busy range once there are two or more of them; that hole is looked at here, as first fit does there too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from torchdelta.pool.greedy import place_in_order

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from torchdelta.pool.sections import Sections


def place_like_smartpool(
    sections: Sections, sizes: NDArray[np.int64], *, best_fit: bool = True
) -> tuple[int, NDArray[np.int64]]:
    """Return footprint and offsets."""
    order = np.lexsort((sections.first, -sizes))
    return place_in_order(sections, sizes, order, best_fit=best_fit, limit=int(sizes.sum()))
