"""Solvers by name, and the one way to call them."""

from __future__ import annotations

import functools
import math
import time
from typing import TYPE_CHECKING, Final, Protocol

import numpy as np

from torchdelta.errors import PoolError
from torchdelta.names import unknown_name
from torchdelta.pool import corner, greedy, portfolio
from torchdelta.pool.ejection import place_by_ejection
from torchdelta.pool.model import Instance, Placement, footprint_bytes
from torchdelta.pool.online import place_like_cnmem
from torchdelta.pool.sections import Sections, cut
from torchdelta.pool.smartpool import place_like_smartpool

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

DEFAULT: Final = "torchdelta"
_TIME_LIMIT_S: Final = 4.5
_LARGE_TIME_LIMIT_S: Final = 14.0
_LARGE: Final = 20_000  # lives
_MOST_STEPS: Final = 2_000_000_000  # of a baseline: some seconds


class _Solver(Protocol):
    """Places lives whose sizes have no common divisor. Returns footprint, offsets and a lower bound."""

    def __call__(
        self, sections: Sections, sizes: NDArray[np.int64], *, enough: int, seed: int, end_s: float
    ) -> tuple[int, NDArray[np.int64], int]: ...


def _single(place: Callable[[Sections, NDArray[np.int64]], tuple[int, NDArray[np.int64]]]) -> _Solver:
    """Return the solver of a rule that has one answer: the time limit does not apply to it."""

    def solve(
        sections: Sections, sizes: NDArray[np.int64], *, enough: int, seed: int, end_s: float
    ) -> tuple[int, NDArray[np.int64], int]:
        del enough, seed, end_s
        return *place(sections, sizes), int(sections.load.max())

    return solve


SOLVERS: Final[dict[str, _Solver]] = {
    DEFAULT: portfolio.solve,
    "fast": functools.partial(portfolio.solve, max_rounds=0),
    "smartpool": _single(place_like_smartpool),
    "smartpool-first-fit": _single(functools.partial(place_like_smartpool, best_fit=False)),
    "cnmem": _single(lambda sections, sizes: place_like_cnmem(sections.first, sections.last, sizes)),
}
"""`torchdelta` is ours, `fast` its first glance; the others are described in their modules."""

BASELINES: Final = ("smartpool", "cnmem")
"""What stands beside ours in every table, with torch's caching allocator (`online.reserve_like_torch`)."""


def quick_baselines(instance: Instance) -> tuple[str, ...]:
    """Return the baselines that take some seconds at most: SmartPool's time is quadratic where many lives overlap."""
    is_placed = instance.is_placed
    if is_placed.sum() ** 2 // 2 > _MOST_STEPS:  # the most that it can be
        sections = cut(instance.starts[is_placed], instance.ends[is_placed], instance.sizes_bytes[is_placed])
        if greedy.num_steps(sections) > _MOST_STEPS:
            return tuple(name for name in BASELINES if name != "smartpool")
    return BASELINES


def compile_solvers() -> None:
    """Compile what solving needs, or load it from the cache, so that no later call is billed for it."""
    starts, ends, sizes = (np.array(values, np.int64) for values in ([0, 1, 2], [2, 3, 4], [1, 2, 3]))
    sections = cut(starts, ends, sizes)
    for solver in SOLVERS.values():
        solver(sections, sizes, enough=0, seed=0, end_s=0.0)
    corner.search(corner.make_problem(sections, sizes), int(sections.load.max()), np.arange(3), max_nodes=10)
    place_by_ejection(
        sections, sizes, np.zeros(3, np.int64), capacity=5, max_pushes=10, seed=0
    )  # easy ones never come to these two


def check_options(solver: str, *, seed: int = 0, time_limit_s: float | None = None) -> None:
    """Raise PoolError if no solver has this name, or the seed or the time limit is negative."""
    if solver not in SOLVERS:
        raise PoolError(unknown_name("solver", solver, SOLVERS))
    if seed < 0:
        raise PoolError(f"a seed of {seed} makes no sense: use 0 or more")
    if time_limit_s is not None and not time_limit_s >= 0:
        raise PoolError(f"a time limit of {time_limit_s} s makes no sense: use 0 s or more")


def solve(
    instance: Instance,
    solver: str = DEFAULT,
    *,
    seed: int = 0,
    time_limit_s: float | None = None,
) -> Placement:
    """Place lives.

    Args:
        instance: What to place. With a capacity, the first placement within it is good enough.
        solver: A name from `SOLVERS`.
        seed: The same seed gives the same placement, unless the time runs out.
        time_limit_s: Stop looking for a better one after so many seconds; None: 4.5, and 14 for more than 20,000 lives.
            The baselines have one answer each, and take as long as that takes.

    Raises:
        PoolError: No solver has this name, or the seed or the time limit is negative.
    """
    check_options(solver, seed=seed, time_limit_s=time_limit_s)
    chosen = SOLVERS[solver]
    if time_limit_s is None:
        time_limit_s = _LARGE_TIME_LIMIT_S if len(instance) > _LARGE else _TIME_LIMIT_S
    start_s = time.perf_counter()
    is_placed = instance.is_placed
    offsets = np.zeros(len(instance), np.int64)
    padded = instance.padded_bytes[is_placed]
    bound = 0
    if len(padded):
        divisor = math.gcd(*padded.tolist())
        sizes = padded // divisor
        sections = cut(instance.starts[is_placed], instance.ends[is_placed], sizes)
        enough = instance.capacity_bytes // divisor if instance.capacity_bytes is not None else 0
        _, placed, bound = chosen(sections, sizes, enough=enough, seed=seed, end_s=start_s + time_limit_s)
        offsets[is_placed] = placed * divisor
        bound *= divisor
    footprint = footprint_bytes(instance, offsets)
    return Placement(
        offsets_bytes=offsets,
        footprint_bytes=footprint,
        lower_bound_bytes=bound,
        proved_optimal=footprint <= bound,
        solver=solver,
        time_s=time.perf_counter() - start_s,
    )
