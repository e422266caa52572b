"""`python -m torchdelta.pool.helper`: places the allocations of steps for another process, until its input ends.

Solvers are compiled by numba, which takes a hundred megabytes: a process that wants to save memory has them elsewhere.

A request is a line `NUM_LIVES NUM_MOMENTS ALIGNMENT_BYTES` and, as int64, the sizes, the starts and the ends of the
lives; an end above the number of moments wraps around. The answer is a line `ok FOOTPRINT_BYTES LOWER_BOUND_BYTES` and
the offsets, or a line `error MESSAGE`.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, BinaryIO

import numpy as np

from torchdelta.errors import PoolError
from torchdelta.pool.lives import rotate_step
from torchdelta.pool.model import make_instance
from torchdelta.pool.solvers import solve
from torchdelta.pool.validate import find_fault

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from torchdelta.pool.model import Placement

_SOLVER = "fast"  # the same answer to the same request, whatever the time


def serve(requests: BinaryIO, answers: BinaryIO) -> None:
    """Answer requests until there are no more."""
    _place(np.array([64, 128]), np.array([0, 1]), np.array([2, 3]), 2, 64)  # loads what is compiled
    while line := requests.readline():
        num_lives, num_moments, alignment_bytes = map(int, line.split())
        sizes, starts, ends = np.frombuffer(requests.read(24 * num_lives), np.int64).reshape(3, num_lives)
        try:
            placement = _place(sizes, starts, ends, num_moments, alignment_bytes)
        except PoolError as error:
            answers.write(f"error {error}\n".encode())
        else:
            answers.write(f"ok {placement.footprint_bytes} {placement.lower_bound_bytes}\n".encode())
            answers.write(placement.offsets_bytes.astype(np.int64).tobytes())
        answers.flush()


def _place(
    sizes: NDArray[np.int64],
    starts: NDArray[np.int64],
    ends: NDArray[np.int64],
    num_moments: int,
    alignment_bytes: int,
) -> Placement:
    begins, stops = rotate_step(list(zip(starts.tolist(), ends.tolist(), strict=True)), sizes.tolist(), num_moments)
    instance = make_instance(
        ids=[str(life) for life in range(len(sizes))],
        starts=begins,
        ends=stops,
        sizes_bytes=sizes,
        alignment_bytes=alignment_bytes,
    )
    placement = solve(instance, _SOLVER)
    fault = find_fault(instance, placement.offsets_bytes)
    if fault is not None:
        raise PoolError(fault)
    return placement


if __name__ == "__main__":
    serve(sys.stdin.buffer, sys.stdout.buffer)
