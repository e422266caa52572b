"""What has to be placed, and where it was placed.

A *life* takes `size_bytes` at the moments `start <= t < end`. Two lives overlap if some moment is in both; lives that
overlap must not share an address. The *load* at a moment is the sum of the sizes alive there; its maximum is a lower
bound of every footprint, and `footprint / load - 1` is the fragmentation.
"""

from __future__ import annotations

import reprlib
from dataclasses import dataclass
from decimal import Decimal
from typing import TYPE_CHECKING

import numpy as np

from torchdelta.errors import PoolError
from torchdelta.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

MAX_BYTES = 1 << 62
"""Sizes must not add up to more: offsets are 64-bit integers."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Instance:
    """Lives to place. `make_instance` checks what is stated here.

    Attributes:
        ids: A name for each life, all different.
        starts: First moment of each life, an int64 array.
        ends: First moment after each life; equal to the start for one that needs no memory at any moment.
        sizes_bytes: Bytes of each life, not below 0.
        alignment_bytes: Every offset is to be a multiple of this.
        capacity_bytes: The most that the footprint may be; None for no limit.
    """

    ids: tuple[str, ...]
    starts: NDArray[np.int64]
    ends: NDArray[np.int64]
    sizes_bytes: NDArray[np.int64]
    alignment_bytes: int = 1
    capacity_bytes: int | None = None

    def __len__(self) -> int:
        """Return the number of lives."""
        return len(self.ids)

    @property
    def padded_bytes(self) -> NDArray[np.int64]:
        """The sizes rounded up to the alignment: what each life takes in fact."""
        alignment = self.alignment_bytes
        return -(-self.sizes_bytes // alignment) * alignment

    @property
    def is_placed(self) -> NDArray[np.bool_]:
        """Which lives take any memory at any moment; the others get offset 0."""
        return (self.sizes_bytes > 0) & (self.ends > self.starts)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Placement:
    """An offset for each life, and what is known about it.

    Attributes:
        offsets_bytes: First address of each life, in the order of the instance.
        footprint_bytes: First address above all lives.
        lower_bound_bytes: No placement has a smaller footprint.
        proved_optimal: Whether none has a smaller one than this: the bound is reached, or the search was exhausted.
        solver: Registered name of who made it.
        time_s: Seconds that it took.
    """

    offsets_bytes: NDArray[np.int64]
    footprint_bytes: int
    lower_bound_bytes: int
    proved_optimal: bool
    solver: str
    time_s: float = 0.0

    @property
    def fragmentation(self) -> float:
        """How much larger the footprint is than the bound, as a share of the bound."""
        return self.footprint_bytes / self.lower_bound_bytes - 1 if self.lower_bound_bytes else 0.0


def quoted(text: object) -> str:
    """Return an id, or what stands in its place in a file, for a message: a long one is cut in its middle."""
    short = reprlib.Repr()
    short.maxstring = 60
    return short.repr(text)


def check_alignment(alignment_bytes: int) -> None:
    """Raise PoolError for an alignment that is none."""
    if alignment_bytes < 1:
        raise PoolError(f"an alignment of {alignment_bytes} bytes makes no sense: use 1 byte or more")


def make_instance(
    *,
    ids: Sequence[str],
    starts: Sequence[int] | NDArray[np.int64],
    ends: Sequence[int] | NDArray[np.int64],
    sizes_bytes: Sequence[int] | NDArray[np.int64],
    alignment_bytes: int = 1,
    capacity_bytes: int | None = None,
) -> Instance:
    """Check lives and put them together.

    Raises:
        PoolError: An id occurs twice, a life ends before it starts, a size is negative or the sizes add up to 2**62
            bytes or more, the alignment is below 1, or a life alone is larger than the capacity.
    """
    check_alignment(alignment_bytes)
    try:
        start, end, size = (np.asarray(values, dtype=np.int64) for values in (starts, ends, sizes_bytes))
    except OverflowError as error:
        raise PoolError(f"a moment or a size is larger than 64 bits hold: {error}") from error
    if not len(ids) == len(start) == len(end) == len(size):
        raise PoolError(
            f"{len(ids)} ids, {len(start)} starts, {len(end)} ends and {len(size)} sizes: every life needs one of each"
        )
    if len(set(ids)) < len(ids):
        seen: set[str] = set()
        twice = next(each for each in ids if each in seen or seen.add(each))  # pyright: ignore[reportUnknownArgumentType]
        raise PoolError(f"the id {quoted(twice)} occurs twice: every life needs one of its own")
    for position in np.flatnonzero(end < start)[:1]:
        raise PoolError(f"{quoted(ids[position])} ends at {end[position]} before it starts at {start[position]}")
    for position in np.flatnonzero(size < 0)[:1]:
        raise PoolError(f"{quoted(ids[position])} has a size of {size[position]} bytes: it must be 0 or more")
    if alignment_bytes * len(ids) >= MAX_BYTES:
        raise PoolError(
            f"an alignment of {Decimal(alignment_bytes).normalize():.3g} bytes is too large: {len(ids)} lives would "
            "pass 2**62 bytes"
        )
    if float(size.sum(dtype=np.float64)) + alignment_bytes * len(ids) >= MAX_BYTES:
        raise PoolError(f"the sizes add up to {size.sum(dtype=np.float64):.3g} bytes: at most 2**62 can be placed")
    instance = Instance(
        ids=tuple(ids),
        starts=start,
        ends=end,
        sizes_bytes=size,
        alignment_bytes=alignment_bytes,
        capacity_bytes=capacity_bytes,
    )
    if capacity_bytes is not None:
        for position in np.flatnonzero(instance.is_placed & (instance.padded_bytes > capacity_bytes))[:1]:
            raise PoolError(
                f"{quoted(ids[position])} needs {format_bytes(int(instance.padded_bytes[position]))}, more than the "
                f"capacity of {format_bytes(capacity_bytes)}"
            )
    return instance


def footprint_bytes(instance: Instance, offsets_bytes: NDArray[np.int64]) -> int:
    """Return the first address above all lives that take memory."""
    tops = (offsets_bytes + instance.padded_bytes)[instance.is_placed]
    return int(tops.max()) if len(tops) else 0
