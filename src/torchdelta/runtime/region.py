"""One segment of torch's own allocator for the large tensors of a step: what an arena can be on CUDA. Unproved there.

[Note: a region, not addresses]
torch asks a `MemPool`'s allocator for segments, never for tensors, and an allocator that is asked for each tensor
(`change_current_allocator`) has to come before CUDA starts and takes the caching allocator's statistics away, in which
a budget is counted. So no offset can be chosen. What can be had is the footprint: a private pool with a single segment,
as large as the recorded step needs when the smallest fitting hole is taken and free neighbours are joined, which is
what torch does inside of a segment. That is the CnMem-like pool of `pool.online`: on recorded steps it stays within
4.8 % of the lower bound, where torch's segments by size reserve up to 74 % more than lives
(benchmarks/results/pool.json).

The pool belongs to a stream, not to a thread: autograd's threads run on the stream of the forward. Tensors up to 1 MiB
have segments of their own kind in every pool of torch, and stay there; what exists before the first step ends
(parameters, optimizer states) stays where it is.
"""

from __future__ import annotations

import importlib.util
import logging
import os
from typing import TYPE_CHECKING, Any, Final

import torch

from torchdelta._torch_device import begin_pool, end_pool, has_graph_trees
from torchdelta.errors import PoolError
from torchdelta.runtime.notices import say_once

if TYPE_CHECKING:
    from collections.abc import Callable

    from torchdelta.trace.model import Trace

__all__ = ["Region"]

_SEGMENT_BYTES: Final = 2 << 20  # torch rounds a segment up to a multiple
_ALLOCATOR_VARIABLES: Final = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
_LEAST_REGION_BYTES: Final = 32 << 20  # below it torch's segments of 20 MiB waste next to nothing

_logger = logging.getLogger("torchdelta")


class Region:
    """The region of one session: made when its first step has ended, given back when it stops. Mutable.

    Args:
        device: A CUDA device.
        trace: Returns the trace of the first step, when it is there.
        room_bytes: Returns what the budget leaves now.
    """

    def __init__(
        self, device: torch.device, *, trace: Callable[[], Trace | None], room_bytes: Callable[[], int]
    ) -> None:
        self._device = device
        self._trace = trace
        self._room_bytes = room_bytes
        self._pool: Any = None
        self._is_given_up = importlib.util.find_spec("numba") is None
        if self._is_given_up:
            self._say_once("no arena (numba is not installed to plan with: pip install 'torchdelta[plan]')")

    def start(self) -> None:
        """Do nothing: how much it takes is known when a step has ended."""

    def on_step_end(self) -> None:
        """Make the region, as soon as a step was recorded."""
        if self._pool is not None or self._is_given_up or (trace := self._trace()) is None:
            return
        self._is_given_up = True  # unless it succeeds: once is enough
        if has_graph_trees():
            self._say_once("no arena: compiled code may capture CUDA graphs, which have pools of their own")
            return
        if any("expandable_segments:True" in os.environ.get(name, "") for name in _ALLOCATOR_VARIABLES):
            self._say_once("no arena: expandable segments, which are switched on, do the same and more")
            return
        from torchdelta.pool.segment import segment_bytes  # numba: only where it is wanted

        try:
            wanted_bytes = segment_bytes(trace)
        except PoolError as error:
            self._say_once(f"no arena: {error}")
            return
        size_bytes = min(wanted_bytes, self._room_bytes()) // _SEGMENT_BYTES * _SEGMENT_BYTES
        if size_bytes < _LEAST_REGION_BYTES:
            _logger.info("no arena: %d bytes of large tensors are none too many for torch's own segments", size_bytes)
            return
        torch.cuda.empty_cache()  # the segments of the first step, which nothing lives in
        pool = begin_pool(self._device)
        try:
            torch.UntypedStorage(size_bytes, device=self._device)  # freed at once: the segment stays
        except RuntimeError as error:  # out of memory is one
            end_pool(self._device, pool)
            self._say_once(f"no arena: a segment of {size_bytes} bytes cannot be had ({str(error).splitlines()[0]})")
            return
        except BaseException:
            end_pool(self._device, pool)
            raise
        self._pool = pool
        self._is_given_up = False
        _logger.info("arena: a segment of %d bytes for the large tensors of a step (unproved on CUDA)", size_bytes)

    def stop(self) -> None:
        """Let torch allocate as ever. The segment goes with the last tensor in it."""
        pool, self._pool = self._pool, None
        if pool is not None:
            end_pool(self._device, pool)
        self._is_given_up = True

    def leave_child(self) -> None:
        """Forget the pool in a forked child, for which the device does not exist."""
        self._pool = None
        self._is_given_up = True

    @staticmethod
    def _say_once(why: str) -> None:
        say_once(f"{why}; memory is allocated as ever")
