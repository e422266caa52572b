"""Checks anybody's placement: no two lives that overlap share an address, and every offset is aligned.

Independent of the solvers and of their sections: one sweep over the moments, with the addresses in use kept in order.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import TYPE_CHECKING

from torchdelta.errors import PoolError
from torchdelta.pool.model import quoted

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from torchdelta.pool.model import Instance


def find_fault(instance: Instance, offsets_bytes: NDArray[np.int64]) -> str | None:
    """Return the first thing wrong with a placement in one line, None if nothing is.

    O(n log n) comparisons; the list of addresses in use is as long as lives are alive together.
    """
    if len(offsets_bytes) != len(instance):
        return f"{len(offsets_bytes)} offsets for {len(instance)} lives"
    ids, alignment, capacity = instance.ids, instance.alignment_bytes, instance.capacity_bytes
    offsets, sizes = offsets_bytes.tolist(), instance.sizes_bytes.tolist()
    padded = instance.padded_bytes.tolist()
    starts, ends = instance.starts.tolist(), instance.ends.tolist()
    events: list[tuple[int, int, int]] = []
    for life, offset in enumerate(offsets):
        if offset < 0:
            return f"{quoted(ids[life])} is placed at {offset} bytes: addresses begin at 0"
        if offset % alignment:
            return f"{quoted(ids[life])} is placed at {offset} bytes, no multiple of the alignment of {alignment} bytes"
        if sizes[life] and ends[life] > starts[life]:
            if capacity is not None and offset + padded[life] > capacity:
                return (
                    f"{quoted(ids[life])} ends at {offset + padded[life]} bytes, above the capacity of {capacity} bytes"
                )
            events.append((starts[life], 1, life))
            events.append((ends[life], 0, life))  # ends before starts of the same moment
    events.sort()
    in_use: list[tuple[int, int]] = []
    for moment, is_start, life in events:
        entry = (offsets[life], life)
        if not is_start:
            del in_use[bisect_left(in_use, entry)]
            continue
        position = bisect_left(in_use, entry)
        for neighbour in in_use[max(0, position - 1) : position + 1]:
            below, above = sorted((neighbour, entry))
            if below[0] + sizes[below[1]] > above[0]:
                return (
                    f"{quoted(ids[life])} at {offsets[life]} bytes and "
                    f"{quoted(ids[neighbour[1]])} at {neighbour[0]} bytes "
                    f"share addresses at moment {moment}"
                )
        insort(in_use, entry)
    return None


def check(instance: Instance, offsets_bytes: NDArray[np.int64]) -> None:
    """Raise unless a placement is right.

    Raises:
        PoolError: What `find_fault` found.
    """
    fault = find_fault(instance, offsets_bytes)
    if fault is not None:
        raise PoolError(f"the placement is wrong: {fault}")
