"""Blocks that tell when somebody else wrote into them, and steps of them for an arena to learn."""

from __future__ import annotations

import array
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torchdelta.native.arena import Arena

KIB = 1024
LEAST_BYTES = 4 * KIB


def block(num_kib: int, value: int = 1) -> torch.Tensor:
    """Allocate a block that is full of one value."""
    return torch.full((num_kib * KIB,), value % 251, dtype=torch.uint8)


def is_full_of(tensor: torch.Tensor, value: int) -> bool:
    """Return whether a block is as `block` made it, without allocating anything with torch."""
    return bool((tensor.numpy() == value % 251).all())


def lowest_fit(sizes: Sequence[int], ends: Sequence[int]) -> list[int]:
    """Place lives one after the other at the lowest address that is free all their time; -1 for those that outlive."""
    length = len(sizes)
    moments = [{m % length for m in range(start, max(end, start + 1))} for start, end in enumerate(ends)]
    offsets: list[int] = []
    for index, size in enumerate(sizes):
        if ends[index] < 0:
            offsets.append(-1)
            continue
        others = [
            (offset, offset + sizes[other])
            for other, offset in enumerate(offsets)
            if offset >= 0 and moments[other] & moments[index]
        ]
        candidates = [0, *(-(-top // 64) * 64 for _, top in others)]
        offsets.append(min(c for c in candidates if all(c + size <= low or c >= high for low, high in others)))
    return offsets


def cut(arena: Arena, place: Callable[[Sequence[int], Sequence[int]], list[int]] = lowest_fit) -> int:
    """End a step and plan what is ready. Returns the number of plans made."""
    arena.cut()
    num_made = 0
    while (recording := arena.recording()) is not None:
        sizes, ends = (array.array("q", values) for values in recording)
        arena.plan(array.array("q", place(sizes, ends)).tobytes())
        num_made += 1
    return num_made


def settle(arena: Arena, step: Callable[[], object], num_steps: int = 3) -> None:
    """Run a step until it has a plan and follows it."""
    for _ in range(num_steps):
        step()
        cut(arena)
