"""What users have today: allocators that place a request when it comes and know nothing of the future.

Both are simulated on the lives of one iteration from a cold start, without a limit of memory and without giving any
back. Lives that begin at one moment are requested in the order of the instance, after those that end there have been
freed.

`cnmem`: one arena that grows, best fit, full coalescing, no rounding beyond the alignment: the ideal of NVIDIA's CnMem.
`torch-caching`: the rules of torch's CUDA caching allocator as of 2.13 (c10/cuda/CUDACachingAllocator.cpp): requests
rounded up to 512 bytes; up to 1 MiB from segments of 2 MiB, below 10 MiB from segments of 20 MiB, larger ones from
segments of their own rounded up to 2 MiB; best fit among the free blocks of the pool; a block is split if at least 512
bytes (small pool) or more than 1 MiB (large pool) remain; free neighbours in a segment are joined. Its footprint is
what it reserves.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_left, insort
from typing import TYPE_CHECKING, Final

import numpy as np
from numba import njit

if TYPE_CHECKING:
    from numpy.typing import NDArray

_ROUND_BYTES: Final = 512
_SMALL_BYTES: Final = 1 << 20
_SMALL_SEGMENT_BYTES: Final = 2 << 20
_LARGE_SEGMENT_BYTES: Final = 20 << 20
_OWN_SEGMENT_BYTES: Final = 10 << 20
_SEGMENT_ROUND_BYTES: Final = 2 << 20
_SLICE: Final = 1_000  # events between two looks at the clock


class _Arena:
    """Free blocks of one or more segments, by size and by address. Mutable."""

    def __init__(self) -> None:
        self.by_size: list[tuple[int, int]] = []  # (size, address)
        self.size_at: dict[int, int] = {}  # of free blocks, by first address
        self.start_of: dict[int, int] = {}  # and by the address behind them

    def add(self, address: int, size: int) -> None:
        """Free a block, joining it with free neighbours."""
        behind = self.size_at.get(address + size)
        if behind is not None:
            self.remove(address + size, behind)
            size += behind
        start = self.start_of.get(address)
        if start is not None:
            before = self.size_at[start]
            self.remove(start, before)
            address, size = start, size + before
        insort(self.by_size, (size, address))
        self.size_at[address] = size
        self.start_of[address + size] = address

    def remove(self, address: int, size: int) -> None:
        """Take a free block."""
        del self.by_size[bisect_left(self.by_size, (size, address))]
        del self.size_at[address]
        del self.start_of[address + size]

    def find(self, size: int) -> tuple[int, int] | None:
        """Return the smallest free block that is large enough, the lowest of equals, as (address, size)."""
        position = bisect_left(self.by_size, (size, -1))
        if position == len(self.by_size):
            return None
        found, address = self.by_size[position]
        return address, found


def _events(starts: NDArray[np.int64], ends: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the events in order of time: `life` where it ends, and then, `num_lives + life` where one starts."""
    num = len(starts)
    kinds = np.concatenate([np.zeros(num, np.int64), np.ones(num, np.int64)])
    lives = np.concatenate([np.arange(num), np.arange(num)])
    return np.lexsort((lives, kinds, np.concatenate([ends, starts])))


def place_like_cnmem(
    starts: NDArray[np.int64], ends: NDArray[np.int64], sizes: NDArray[np.int64], *, end_s: float = math.inf
) -> tuple[int, NDArray[np.int64]]:
    """Return footprint and offsets of the ideal online pool, for lives that end after they start.

    O(n) times the number of free blocks, which is small. What has no place at the time `end_s` of `time.perf_counter`
    is put on top, one above the other.
    """
    num = len(sizes)
    events = _events(starts, ends)
    offsets = np.zeros(num, np.int64)
    free = np.empty((2, num + 1), np.int64)
    figures = np.zeros(3, np.int64)
    for begin in range(0, len(events), _SLICE):
        if begin and time.perf_counter() >= end_s:
            rest = events[begin:][events[begin:] >= num] - num
            offsets[rest] = figures[2] + np.cumsum(sizes[rest]) - sizes[rest]
            figures[2] += sizes[rest].sum()
            break
        _serve(events[begin : begin + _SLICE], sizes, offsets, free[0], free[1], figures)
    return int(figures[2]), offsets


@njit(cache=True)
def _serve(
    events: NDArray[np.int64],
    sizes: NDArray[np.int64],
    offsets: NDArray[np.int64],
    lows: NDArray[np.int64],
    highs: NDArray[np.int64],
    figures: NDArray[np.int64],
) -> None:
    """Serve events after others: `figures` are the number of free blocks, the top and the footprint."""
    num = sizes.size
    num_free, top, footprint = figures
    for event in events:
        life = event % num
        size = sizes[life]
        if event < num:
            low, high = offsets[life], offsets[life] + size
            at = np.searchsorted(lows[:num_free], low)
            joins_below = at > 0 and highs[at - 1] == low
            joins_above = at < num_free and lows[at] == high
            if joins_below and joins_above:
                highs[at - 1] = highs[at]
                num_free -= 1
                for position in range(at, num_free):
                    lows[position], highs[position] = lows[position + 1], highs[position + 1]
            elif joins_below:
                highs[at - 1] = high
            elif joins_above:
                lows[at] = low
            else:
                for position in range(num_free, at, -1):
                    lows[position], highs[position] = lows[position - 1], highs[position - 1]
                lows[at], highs[at] = low, high
                num_free += 1
            if num_free and highs[num_free - 1] == top:  # free space at the very top is none
                num_free -= 1
                top = lows[num_free]
            continue
        chosen, smallest = -1, np.int64(1) << 62
        for position in range(num_free):
            hole = highs[position] - lows[position]
            if size <= hole < smallest:
                chosen, smallest = position, hole
        if chosen < 0:
            offsets[life] = top
            top += size
            footprint = max(footprint, top)
            continue
        offsets[life] = lows[chosen]
        lows[chosen] += size
        if lows[chosen] == highs[chosen]:
            num_free -= 1
            for position in range(chosen, num_free):
                lows[position], highs[position] = lows[position + 1], highs[position + 1]
    figures[0], figures[1], figures[2] = num_free, top, footprint


def reserve_like_torch(starts: NDArray[np.int64], ends: NDArray[np.int64], sizes_bytes: NDArray[np.int64]) -> int:
    """Return the bytes that torch's caching allocator would reserve. O(n log n)."""
    rounded = (-(-sizes_bytes // _ROUND_BYTES) * _ROUND_BYTES).tolist()
    blocks: dict[int, tuple[int, int]] = {}  # address and size that a life was given
    pools = {True: _Arena(), False: _Arena()}
    reserved = next_address = 0
    for event in _events(starts, ends).tolist():
        is_request, life = divmod(event, len(rounded))
        size = rounded[life]
        if ends[life] <= starts[life] or not size:
            continue
        is_small = size <= _SMALL_BYTES
        pool = pools[is_small]
        if not is_request:
            pool.add(*blocks.pop(life))
            continue
        block = pool.find(size)
        if block is None:
            segment = _segment_bytes(size)
            address, found = next_address, segment
            next_address += segment + 1  # a gap, so that blocks of two segments are never joined
            reserved += segment
        else:
            address, found = block
            pool.remove(address, found)
        rest = found - size
        if rest >= _ROUND_BYTES if is_small else rest > _SMALL_BYTES:
            pool.add(address + size, rest)
            found = size
        blocks[life] = (address, found)
    return reserved


def _segment_bytes(size: int) -> int:
    if size <= _SMALL_BYTES:
        return _SMALL_SEGMENT_BYTES
    if size < _OWN_SEGMENT_BYTES:
        return _LARGE_SEGMENT_BYTES
    return -(-size // _SEGMENT_ROUND_BYTES) * _SEGMENT_ROUND_BYTES
