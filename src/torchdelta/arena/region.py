"""The arena on CUDA: one segment of torch's own allocator for the large tensors of a step.

[Note: a region, not addresses]
torch requests segments from a `MemPool`'s allocator, never tensors. An allocator that gets a request for each tensor
(`change_current_allocator`) must be installed before CUDA starts, and replaces the caching allocator's statistics, on
which a budget is based. So offsets cannot be chosen. The footprint can: a private pool with a single segment, as large
as the recorded step needs if each tensor takes the smallest fitting hole and free neighbours are merged, which is what
torch does inside a segment. That is the CnMem-like pool of `pool.online`: on recorded steps it stays within 4.8 % of
the lower bound, where torch's segments by size reserve up to 74 % more than the live bytes
(benchmarks/results/pool.json).

The pool serves the whole device: all threads, because autograd has its own, and all streams. In every pool torch keeps
tensors up to 1 MiB in separate segments, and those of another stream too; they stay there. Tensors from before the end
of the first step (parameters, optimizer states) are not moved.
"""

from __future__ import annotations

import importlib.util
import logging
import os
from typing import TYPE_CHECKING, Any, Final

import torch

from torchdelta._torch.device import before_captures, begin_pool, end_pool, has_graph_trees
from torchdelta.errors import PoolError
from torchdelta.notices import warn_once

if TYPE_CHECKING:
    from collections.abc import Callable

    from torchdelta.trace.model import Trace

__all__ = ["Region"]

_SEGMENT_BYTES: Final = 2 << 20  # torch rounds a segment up to a multiple
_ALLOCATOR_VARIABLES: Final = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
_LEAST_REGION_BYTES: Final = 32 << 20  # below it torch's segments of 20 MiB waste little

_logger = logging.getLogger("torchdelta")


class Region:
    """The region of one session on a CUDA device: made after its first step, freed when it stops. Mutable."""

    def __init__(
        self, device: torch.device, *, trace: Callable[[], Trace | None], room_bytes: Callable[[], int]
    ) -> None:
        self._device = device
        self._trace = trace
        self._room_bytes = room_bytes
        self.pool: Any = None  # of CUDA, while the region serves
        self._undo: Callable[[], None] = lambda: None
        self._is_given_up = importlib.util.find_spec("numba") is None
        if self._is_given_up:
            self._warn_once("no arena (planning needs numba: pip install 'torchdelta[plan]')")

    def start(self) -> None:
        """Do nothing: the size is known after the first step."""

    def on_step_end(self) -> None:
        """Make the region once a step was recorded."""
        if self.pool is not None or self._is_given_up or (trace := self._trace()) is None:
            return
        self._is_given_up = True  # unless it succeeds: try once only
        if has_graph_trees():
            self._warn_once("no arena: compiled code may capture CUDA graphs, which use their own memory pools")
            return
        if any("expandable_segments:True" in os.environ.get(name, "") for name in _ALLOCATOR_VARIABLES):
            self._warn_once("no arena: expandable segments are on, which reduce fragmentation themselves")
            return
        from torchdelta.pool.segment import segment_bytes  # imports numba: only if needed

        try:
            wanted_bytes = segment_bytes(trace)
        except PoolError as error:
            self._warn_once(f"no arena: {error}")
            return
        size_bytes = min(wanted_bytes, self._room_bytes()) // _SEGMENT_BYTES * _SEGMENT_BYTES
        if size_bytes < _LEAST_REGION_BYTES:
            _logger.info("no arena: a step has only %d bytes of large tensors", size_bytes)
            return
        torch.cuda.empty_cache()  # the empty segments of the first step
        pool = begin_pool(self._device)
        try:
            torch.UntypedStorage(size_bytes, device=self._device)  # freed at once; the pool keeps the segment
        except RuntimeError as error:  # out of memory included
            end_pool(self._device, pool)
            self._warn_once(
                f"no arena: a segment of {size_bytes} bytes cannot be allocated ({str(error).splitlines()[0]})"
            )
            return
        except BaseException:
            end_pool(self._device, pool)
            raise
        self.pool = pool
        self._undo = before_captures(self._leave_to_capture)
        self._is_given_up = False
        _logger.info("arena: a segment of %d bytes for the large tensors of a step", size_bytes)

    def stop(self) -> None:
        """Let torch allocate without the region. The segment is freed with the last tensor in it."""
        pool, self.pool = self.pool, None
        if pool is not None:
            self._undo()
            end_pool(self._device, pool)
        self._is_given_up = True

    def _leave_to_capture(self) -> None:
        """A captured graph needs memory of its own; the region serves all streams, and would be asked first."""
        self._warn_once("the arena ends: a CUDA graph is captured")
        self.stop()

    def leave_child(self) -> None:
        """Forget the pool in a forked child, which cannot use the device."""
        self.pool = None
        self._is_given_up = True

    @staticmethod
    def _warn_once(why: str) -> None:
        warn_once(f"{why}; memory is allocated without it")
