"""The base of the trace builder: how it maps tensors to versions, and how it ends or gives up."""

from __future__ import annotations

import functools
import logging
import time
import weakref
from typing import TYPE_CHECKING, Any, Concatenate, Final, ParamSpec, TypeVar

import torch

from torchdelta._torch.storages import storage_address
from torchdelta._torch.tensors import is_trained_leaf_or_view
from torchdelta.modules import ModulePaths
from torchdelta.runtime.follow.step_log import StepLog
from torchdelta.runtime.observe.draft import Draft
from torchdelta.runtime.state.observer import Observer
from torchdelta.trace.model import BEFORE_STEP, Op
from torchdelta.trace.validate import validate

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torchdelta.runtime.device.device import Device
    from torchdelta.runtime.follow.step_log import Signature
    from torchdelta.runtime.observe.draft import PlainVersion
    from torchdelta.runtime.state import buffer as live
    from torchdelta.runtime.state.ledger import Ledger
    from torchdelta.runtime.state.steps import StepTracker
    from torchdelta.trace.model import Phase, Trace

__all__ = ["StepDraft", "guarded"]

MAX_OPS: Final = 1_000_000  # more are not one training step
MAX_OPS_WITHOUT_SAVING: Final = 20_000  # more are not its beginning, but for example an evaluation before it
MAX_OPS_WITHOUT_HANDLES: Final = 100_000  # the same where all saved tensors are too small to leave
_SHORTEST_PAUSE_S: Final = 1e-3  # shorter pauses are counted as recording, which followed steps lack

_Arguments = ParamSpec("_Arguments")
_Self = TypeVar("_Self", bound="StepDraft")


def guarded(
    method: Callable[Concatenate[_Self, _Arguments], None],
) -> Callable[Concatenate[_Self, _Arguments], None]:
    """Drop the trace if a method raises, so that the training continues."""

    @functools.wraps(method)
    def call(self: _Self, *args: _Arguments.args, **kwargs: _Arguments.kwargs) -> None:
        try:
            method(self, *args, **kwargs)
        except Exception as error:  # noqa: BLE001 - see above
            # Pass text, because an exception object would keep its frames and their tensors alive.
            self.give_up(f"{type(error).__name__}: {error}")

    return call


class StepDraft(Observer):
    """Records what is known of storages, from the start of a step to its end."""

    wants_every_op = True

    def __init__(self, ledger: Ledger, steps: StepTracker, device: Device) -> None:
        self.ledger = ledger
        self._steps = steps
        self._device = device
        self._paths = ModulePaths(self._on_root)
        self._draft = Draft(ledger.device.type)
        # By version: buffers of the forward without an op, which the runtime may be the only one to keep alive.
        self._held: dict[int, weakref.ref[live.Buffer]] = {}
        self._opaque_reads: dict[int, None] | None = None  # what the running opaque code reads; None: none is running
        self._opaque_start_s = 0.0
        self._opaque_workspace_bytes = 0
        # Index in the draft's `saved`, ops before it, what it is, bytes of its storage.
        self._saves: list[tuple[int, int, Signature, int]] = []
        self._unpacks: list[tuple[int, int]] = []
        self._uses: list[tuple[int, Phase, int]] = []  # of persistent tensors: key, phase, ops before it
        self._keys: dict[int, int] = {}  # of persistent tensors, by the id of their storage
        self._num_abandoned = 0  # of the tensors in the draft's `saved`: these had no backward
        self._num_backwards = 0
        self._saves_in_backward = False
        self._ended_s = 0.0  # when the latest op with a time ended
        self._lost_s = 0.0  # what the budget had cost by then
        self._outside_s = 0.0  # pauses before, between and after such ops
        self._is_over = False

    def start_clock(self, pause_s: float) -> None:
        """Count the pause before the trace, and all pauses from now on.

        Args:
            pause_s: From the start of the step until this trace began.
        """
        self._count_pause(pause_s)
        self._ended_s, self._lost_s = time.perf_counter(), self._steps.counters.lost_s

    # -- end

    def give_up(self, why: str) -> None:
        """Stop tracing without a trace. The reason is logged once."""
        self._retire()
        if not self._is_over:
            self._is_over = True
            logging.getLogger("torchdelta").warning("the trace of a step was dropped: %s", why)

    def _retire(self) -> None:
        if self.ledger.observing.observer is self:
            self.ledger.observing.observer = Observer()

    def finish(self) -> Trace | None:
        """Stop tracing. Return the trace, or None if there is no valid one."""
        if self._is_over:
            return None
        try:
            self._add_pause(0.0)
            self._draft.correct_times(self._device.timer)
            trace = self._draft.trace()
            validate(trace)
        except Exception as error:  # noqa: BLE001 - the training continues without a trace
            self.give_up(f"{type(error).__name__}: {error}")
            return None
        self._is_over = True
        self._retire()
        return trace

    def on_abandoned(self) -> None:
        """Note that what was saved so far had no backward, as in an evaluation with gradients."""
        self._num_abandoned = len(self._draft.saved)

    def forget_saves(self) -> None:
        """Leave the saves so far out of the log: no backward will unpack them."""
        self._saves.clear()
        self._unpacks.clear()

    def log(self) -> StepLog:
        """Return the saves of the step. Call this after `finish`."""
        saved = self._draft.saved
        return StepLog(
            signatures=tuple(signature for _, _, signature, _ in self._saves),
            sizes_bytes=tuple(size_bytes for _, _, _, size_bytes in self._saves),
            pack_ops=tuple(op for _, op, _, _ in self._saves),
            buffer_ids=tuple(saved[index].version.id if index >= 0 else -1 for index, _, _, _ in self._saves),
            unpacks=tuple(self._unpacks),
            uses=tuple(self._uses),
            persistents={
                version.id: self._keys[version.storage.id]
                for version in self._draft.versions
                if version.storage.id in self._keys
            },
            num_ops=len(self._draft.ops),
            num_backwards=self._num_backwards,
            saves_in_backward=self._saves_in_backward,
            outside_s=self._outside_s,
            had_optimizer=self._steps.has_stepped,
        )

    def module_of(self, record: live.StorageRecord) -> str:
        """Return the path of the module whose op made a storage, or an empty string if it is not known."""
        version = self._draft.by_record.get(record.id)
        if version is None or not 0 <= version.birth_op < len(self._draft.ops):
            return ""
        return self._draft.ops[version.birth_op].module

    def _begin_anew_if_idle(self) -> None:
        """Forget the ops so far if they are too many without a tensor saved for a backward.

        What they made is then from before.
        """
        earlier = self._draft
        if len(earlier.ops) <= MAX_OPS_WITHOUT_SAVING or self._steps.phase != "forward":
            return
        # Whether the graph of tensors that are too small to leave is still there is not known.
        may_be_needed = self.ledger.num_handles > 0 or len(earlier.ops) <= MAX_OPS_WITHOUT_HANDLES
        if len(earlier.saved) > self._num_abandoned and may_be_needed:
            return
        self._draft = Draft(self.ledger.device.type)
        self._num_abandoned = 0
        self._held.clear()
        self._saves.clear()
        self._unpacks.clear()
        self._uses.clear()
        self._keys.clear()
        self._outside_s = 0.0
        for record in list(self.ledger.records.values()):  # a garbage collection may remove some
            old = earlier.by_record.get(record.id)
            if old is not None:
                storage = self._born(record, BEFORE_STEP, None).storage
                storage.kind, storage.noted_version = old.storage.kind, old.storage.noted_version

    # -- drafts

    def _on_root(self, module: torch.nn.Module) -> None:
        for buffer in module.buffers():
            version = self._known(buffer)
            if version is not None and version.storage.kind is None:
                version.storage.kind = "constant"

    def _record(self, tensor: torch.Tensor) -> live.StorageRecord | None:
        try:
            return self.ledger.records.get(storage_address(tensor))
        except RuntimeError:  # sparse and other opaque tensors have no storage
            return None

    def _known(self, tensor: torch.Tensor) -> PlainVersion | None:
        record = self._record(tensor)
        return self._draft.by_record.get(record.id) if record is not None else None

    def _version_of(self, tensor: torch.Tensor) -> PlainVersion | None:
        """Return what a tensor's storage holds, even if its origin is unknown. None if the ledger has no record."""
        record = self._record(tensor)
        if record is None:
            return None
        version = self._draft.by_record.get(record.id)
        if version is not None:
            return version
        if is_trained_leaf_or_view(tensor):
            version = self._born(record, BEFORE_STEP, None)  # the scan did not find it
            version.storage.kind = "parameter"
            return version
        return self._appear(record)

    def _born(self, record: live.StorageRecord, birth_op: int, phase: Phase | None) -> PlainVersion:
        by_optimizer = phase is not None and self._steps.is_in_optimizer
        return self._draft.born(record, birth_op, phase, by_optimizer=by_optimizer)

    def _add(self, op: Op) -> None:
        self._draft.ops.append(op)
        if op.time_s:
            self._add_pause(op.time_s)
        if len(self._draft.ops) > MAX_OPS:
            self.give_up(f"no training step ended within {MAX_OPS} ops")

    def _add_pause(self, time_s: float) -> None:
        """Count the time between the latest op and one that has just ended after so many seconds."""
        now_s, lost_s = time.perf_counter(), self._steps.counters.lost_s
        self._count_pause(now_s - self._ended_s - time_s - (lost_s - self._lost_s))
        self._ended_s, self._lost_s = now_s, lost_s

    def _count_pause(self, pause_s: float) -> None:
        if pause_s > _SHORTEST_PAUSE_S:
            self._outside_s += pause_s

    def _read_all(self, arguments: Iterable[Any], reads: dict[int, None]) -> None:
        for argument in arguments:
            if isinstance(argument, torch.Tensor):
                version = self._version_of(argument)
                if version is not None:
                    reads[version.id] = None

    def _appear(self, record: live.StorageRecord) -> PlainVersion:
        """Add the pseudo-op of a storage of unknown origin."""
        index, phase = len(self._draft.ops), self._steps.phase
        version = self._born(record, index, phase)
        version.storage.is_external = True
        if phase == "forward" and record.current is not None:
            self._held[version.id] = weakref.ref(record.current)
        self._add(Op(index=index, name="torchdelta.external", phase=phase, writes=(version.id,)))
        return version
