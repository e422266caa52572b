"""Headroom: knows when a backward surely fits, so that watching it inside can be left out.

[Note: never act without need]
Hooks on every node and a dispatch mode inside each are half of the cost of recording. When an earlier backward of the
same size used little of the budget, nothing in this one can need an eviction, so it runs as if torchdelta were not
there: saved tensors still go through the hooks, `.grad`s are counted when it ends, and the peak is taken to be this
start plus the growth that was measured. Every so often one is watched again. Whatever is larger than what was measured,
keeps its graph, or steps an optimizer in backward, is watched.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import torch

# A backward surely fits when its start plus this many times the measured growth stays below the share of the budget.
_GROWTH_MARGIN: Final = 1.5
_SHARE_OF_BUDGET: Final = 0.75
_LARGER_THAN_MEASURED: Final = 1.05
_WATCH_EVERY: Final = 16


class Headroom:
    """What the last watched backward took."""

    def __init__(self) -> None:
        self._is_measured = False
        self._start_bytes = 0
        self._growth_bytes = 0
        self._num_handles = 0
        self._num_skipped = 0
        self._leaves: list[weakref.ref[torch.Tensor]] = []

    def measured(self, *, start_bytes: int, peak_bytes: int, num_handles: int, leaves: list[torch.Tensor]) -> None:
        """Note what a watched backward took."""
        self._is_measured = not any(getattr(leaf, "_post_accumulate_grad_hooks", None) for leaf in leaves)
        self._start_bytes = start_bytes
        self._growth_bytes = peak_bytes - start_bytes
        self._num_handles = num_handles
        self._num_skipped = 0
        self._leaves = [weakref.ref(leaf) for leaf in leaves]

    def is_sure(self, *, live_bytes: int, num_handles: int, budget_bytes: int) -> bool:
        """Say whether a backward that starts now surely fits and needs no watching."""
        if not self._is_measured or self._num_skipped >= _WATCH_EVERY:
            return False
        if (
            live_bytes > self._start_bytes * _LARGER_THAN_MEASURED
            or num_handles > self._num_handles * _LARGER_THAN_MEASURED
        ):
            return False
        if live_bytes + self._growth_bytes * _GROWTH_MARGIN > budget_bytes * _SHARE_OF_BUDGET:
            return False
        self._num_skipped += 1
        return True

    def expected_peak_bytes(self, live_bytes: int) -> int:
        """Return the peak of a backward that starts now."""
        return live_bytes + self._growth_bytes

    def leaves(self) -> list[torch.Tensor]:
        """Return the leaves into which the measured backward accumulated, those that live."""
        return [leaf for reference in self._leaves if (leaf := reference()) is not None]
