"""The lives of a trace's storages, as they repeat from step to step.

[Note: across the end of a step]
A storage that is alive when the step begins and when it ends (a parameter, an optimizer state) takes its place all the
time. One that was left over from the step before and dies in this one is, in the steady state, the same place as one
that is born in this step and outlives it: the last loss, a gradient that is freed after the next forward. Zhang et al.
plan a window of iterations with edges that wrap around; here the two are joined into one life that runs over the end of
the step, and the step is turned so that it begins where the fewest bytes of such lives cross. What still crosses there
takes its place all the time, which costs nothing unless it is alive at the peak too. Nothing is doubled.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

import numpy as np

from torchdelta.pool.model import Instance, make_instance
from torchdelta.trace.model import BEFORE_STEP, storage_versions

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from torchdelta.trace.model import Trace


def lives_of_trace(trace: Trace, *, alignment_bytes: int = 1, capacity_bytes: int | None = None) -> Instance:
    """Return the lives of a trace's storages, by the id of the storage that is born in the step.

    Raises:
        PoolError: As `make_instance`.
    """
    num_ops = len(trace.ops)
    lives: list[tuple[str, tuple[int, int], int]] = []  # id, span (it wraps around above num_ops), size
    left_over: dict[int, list[tuple[int, int]]] = defaultdict(list)  # (first moment after, storage) by size
    outliving: list[tuple[int, int, int]] = []
    for storage_id, versions in sorted(storage_versions(trace).items()):
        is_before = versions[0].birth_op == BEFORE_STEP
        start, end = max(versions[0].birth_op, 0), versions[-1].death_op
        size = max(version.size_bytes for version in versions)
        if is_before and end < num_ops:
            left_over[size].append((end, storage_id))
        elif not is_before and end == num_ops:
            outliving.append((start, storage_id, size))
        else:
            lives.append((str(storage_id), (start, end), size))
    partners = pair_over_end(outliving, left_over)
    for birth, storage_id, size in sorted(outliving, reverse=True):
        start, end = birth, num_ops
        if storage_id in partners:
            last, partner = partners[storage_id]
            if last <= start:
                end += last
            else:  # two places that take turns
                lives.append((str(partner), (0, num_ops), size))
                start = 0
        lives.append((str(storage_id), (start, end), size))
    paired = set(partners.values())
    for size, ends_and_ids in sorted(left_over.items()):
        rest = (each for each in sorted(ends_and_ids) if each not in paired)
        lives += [(str(storage_id), (0, end), size) for end, storage_id in rest]
    sizes = [size for _, _, size in lives]
    starts, ends = rotate_step([span for _, span, _ in lives], sizes, num_ops)
    return make_instance(
        ids=[id_ for id_, _, _ in lives],
        starts=starts,
        ends=ends,
        sizes_bytes=sizes,
        alignment_bytes=alignment_bytes,
        capacity_bytes=capacity_bytes,
    )


def pair_over_end(
    outliving: Iterable[tuple[int, int, int]], left_over: Mapping[int, Iterable[tuple[int, int]]]
) -> dict[int, tuple[int, int]]:
    """Return, by the id of a life that outlives the step, the (end, id) of the left-over life whose place it takes.

    The latest born goes on as the one that dies first: the shortest lives that the two sides allow. If the old one is
    still there when the new one is born, the two have two places, which take turns from step to step.

    Args:
        outliving: (start, id, size in bytes) of each life that begins in the step and outlives it.
        left_over: (end, id) of each life that is left over from the step before, by size in bytes.
    """
    waiting = {size: sorted(each, reverse=True) for size, each in left_over.items()}
    return {id_: waiting[size].pop() for _, id_, size in sorted(outliving, reverse=True) if waiting.get(size)}


def rotate_step(spans: list[tuple[int, int]], sizes: list[int], num_ops: int) -> tuple[list[int], list[int]]:
    """Begin the step where the fewest bytes of lives that do not last cross, and stretch those lives over all of it.

    A span's end above the number of ops wraps around. Returns the starts and the ends. See [Note: across the end of a
    step].
    """
    crossing = np.zeros(num_ops + 1, np.int64)  # at each moment, what is alive both before and at it
    for (start, end), size in zip(spans, sizes, strict=True):
        if end - start >= num_ops or end == start:
            continue
        if end <= num_ops:
            crossing[start + 1 : end] += size
        else:
            crossing[start + 1 :] += size
            crossing[: end - num_ops] += size
    turn = int(np.argmin(crossing[:num_ops])) if num_ops else 0
    starts: list[int] = []
    ends: list[int] = []
    for start, end in spans:
        if end - start >= num_ops:
            starts.append(0)
            ends.append(num_ops)
            continue
        begin, length = (start - turn) % num_ops, end - start
        if begin + length > num_ops:
            begin, length = 0, num_ops
        starts.append(begin)
        ends.append(begin + length)
    return starts, ends
