"""Regions compiled by `torch.compile`: each is one opaque op with a measured working set.

A compiled region's kernels write buffers that no dispatch mode sees, so the recorder is off inside, what comes out is
kept or swapped and never recomputed, and room is made for the region as a whole before it runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import torch

from torchdelta._torch import graph_task_id, without_mode
from torchdelta._torch_device import has_graph_trees
from torchdelta.runtime.device import PeakMeter
from torchdelta.runtime.interrupts import call_outside, shielded

if TYPE_CHECKING:
    from collections.abc import Callable

    from torchdelta.runtime.session import Session

_MAX_REGIONS: Final = 1024  # shapes times regions; the oldest is forgotten
# The first compiles. After these an accelerator's peak, which is one for the process, is not reset any more.
_NUM_MEASURED_CALLS: Final = 3


class CompiledRegions:
    """Calls compiled regions with the recorder off, and learns how much memory each takes."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self._working_set_bytes: dict[Any, int] = {}
        self._num_calls: dict[Any, int] = {}

    @shielded
    def call(self, original: Callable[..., Any], *given: Any, **kwargs: Any) -> Any:
        """Stand in for the call of a compiled region.

        That is `call_func_at_runtime_with_args(function, args, ...)` or `OptimizedModule.__call__(module, first, ...)`.
        """
        session = self.session
        function: Any = given[0]
        inputs = given[1] if len(given) > 1 and isinstance(given[1], list | tuple) else (*given[1:], *kwargs.values())
        tensors = [a for a in inputs if isinstance(a, torch.Tensor)]
        key = (id(function), tuple(a.shape for a in tensors))
        session.residency.room(self._working_set_bytes.get(key, 0), "a compiled region")
        session.ledger.clock += 1
        trace = session.ledger.trace
        if trace is not None:
            trace.on_opaque_start(tensors)
        num_calls = self._num_calls[key] = self._num_calls.get(key, 0) + 1
        resets = num_calls <= _NUM_MEASURED_CALLS
        with without_mode(session.recorder), PeakMeter(session.ledger, resets=resets) as meter:
            before = session.recorder.before_unseen_writes(tensors)
            out = call_outside(original, *given, **kwargs)
            session.recorder.after_unseen_writes(before)
        before_bytes = session.ledger.live_bytes
        self._know(out)
        outputs_bytes = session.ledger.live_bytes - before_bytes
        # The first call may have compiled, which takes memory that no later call does: its outputs are all that is
        # learned from it.
        measured_bytes = meter.extra_bytes if key in self._working_set_bytes else 0
        if len(self._working_set_bytes) >= _MAX_REGIONS:
            oldest = next(iter(self._working_set_bytes))
            del self._working_set_bytes[oldest], self._num_calls[oldest]
        self._working_set_bytes[key] = max(self._working_set_bytes.get(key, 0), outputs_bytes, measured_bytes)
        if trace is not None:
            trace.on_opaque_end("torchdelta.compiled", out, node=session.node_name, working_set_bytes=meter.extra_bytes)
        session.residency.room(0, "a compiled region")
        return out

    def _know(self, out: Any) -> None:
        if isinstance(out, torch.Tensor):
            if out.__class__ is not torch.Tensor or out.layout is not torch.strided:
                return
            if graph_task_id() != -1 and not torch.is_grad_enabled():
                self.session.ledger.know_by_tensor(out)
            else:
                self.session.ledger.know(out.untyped_storage())
                if has_graph_trees():  # the memory is a graph's own: it would not be free, and is written again
                    self.session.ledger.buffer_of(out).is_pinned = True
        elif isinstance(out, list | tuple):
            for item in out:
                self._know(item)
        elif isinstance(out, Mapping):  # the outputs of transformers
            for item in out.values():
                self._know(item)
