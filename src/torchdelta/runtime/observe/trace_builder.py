"""Writes the trace of one step (`torchdelta.trace.model`) from what the recorder, ledger and saved tensors report.

[Note: the trace is that of the plain step]
Under a budget, buffers are evicted and brought back in new storages while the step is traced. None of that is in the
trace. It describes the step as it would run without torchdelta, so a tight and an unlimited budget give the same trace.
Therefore the trace consists of *plain storages*: the storage that an op made, together with all storages that later
replace it. A plain storage dies when none of these is alive and no handle of a saved tensor needs it. Storages made by
replays are never reported, because replays run below the recorder. A storage that only the runtime keeps alive (content
without an op is held from its first use on) would be dead in the plain step, so its holders are counted after each op.

[Note: content that no op made]
Pseudo-ops write it. `torchdelta.accumulate`: a gradient that the engine added up, or copied into a `.grad`, between two
nodes; what it reads is guessed from the gradients of the same size that died there. `torchdelta.node`: an autograd node
that runs without the dispatch mode (mode_sensitive.py). `torchdelta.compiled`: a compiled region.
`torchdelta.external`: any other storage of unknown origin.

Kinds are partly known and partly guessed. Parameters, gradients and the buffers of modules are known. What the
optimizer makes and keeps, or writes, is an optimizer state. Anything else that existed before the step is an input if
the forward reads it.

The events are stored in draft.py. The state is that of one step, and keeps no tensor, storage or buffer alive.
"""

from __future__ import annotations

import itertools
import weakref
from typing import TYPE_CHECKING, Any, Final

import torch

from torchdelta._torch.tensors import is_trained_leaf, version_of
from torchdelta.runtime.follow.step_log import signature_of
from torchdelta.runtime.observe.pseudo_ops import PseudoOps
from torchdelta.runtime.observe.step_draft import guarded
from torchdelta.trace.draft import Saved
from torchdelta.trace.model import BEFORE_STEP, Op

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torchdelta.aten.facts import OpFacts
    from torchdelta.runtime.observe.draft import PlainVersion
    from torchdelta.runtime.state import buffer as live
    from torchdelta.runtime.state.buffer import OpEntry
    from torchdelta.runtime.state.need import Timing
    from torchdelta.runtime.state.persistent import Persistent
    from torchdelta.trace.model import BufferKind, Phase

__all__ = ["TraceBuilder"]

_MOST_LOOKED_AT: Final = 32  # storages after an op; see `_count_holders`


class TraceBuilder(PseudoOps):
    """Writes the trace of a step: its storages, saved tensors and ops.

    Attributes:
        is_for_plans: Whether what an op may take beyond its estimated workspace counts as workspace. Not in the first
            step's trace: the plain peak that is computed from it would be too high.
    """

    is_for_plans = False

    # -- storages that exist

    @guarded
    def on_found(self, record: live.StorageRecord, tensor: torch.Tensor, kind: BufferKind | None = None) -> None:
        """Add a storage that exists before the step, seen through one of its tensors."""
        version = self._draft.by_record.get(record.id)
        if version is None:
            version = self._born(record, BEFORE_STEP, None)
        if kind is None and (tensor.__class__ is torch.nn.Parameter or is_trained_leaf(tensor)):
            kind = "parameter"
        if kind is not None:
            version.storage.kind = kind
            version.storage.noted_version = version_of(tensor)

    @guarded
    def on_storage_death(self, record: live.StorageRecord) -> None:
        """Remove a living storage that died: the program freed it, or the runtime evicted it."""
        self._draft.gone(record)

    @guarded
    def on_return(self, buffer: live.Buffer, record: live.StorageRecord) -> None:
        """Add the storage into which a buffer was brought back."""
        version = self._draft.by_buffer.get(buffer.id)
        if version is not None:
            self._draft.returned(version, record)

    # -- saved tensors

    @guarded
    def on_save(self, buffer: live.Buffer, view: live.View) -> None:
        """Add a saved tensor whose buffer may leave."""
        self._saves.append((-1, len(self._draft.ops), signature_of(buffer, view), buffer.size_bytes))
        if self._steps.phase == "backward":
            self._saves_in_backward = True
        version = self._draft.by_buffer.get(buffer.id)
        if version is None:
            record = buffer.record
            if record is None:
                return
            version = self._draft.by_buffer[buffer.id] = self._draft.by_record.get(record.id) or self._appear(record)
        version.storage.saved.add(buffer.id)
        self._saves[-1] = (len(self._draft.saved), *self._saves[-1][1:])
        self._draft.saved.append(
            Saved(len(self._draft.ops), version, tuple(view.shape), tuple(view.stride), int(view.offset), view.dtype)
        )

    @guarded
    def on_stay(self, tensor: torch.Tensor) -> None:
        """Add a saved tensor that stays."""
        if tensor.device != self.ledger.device:
            return
        version = self._version_of(tensor)
        if version is None:
            return
        if is_trained_leaf(tensor):
            version.storage.kind = "parameter"
        self._draft.saved.append(
            Saved(
                len(self._draft.ops),
                version,
                tuple(tensor.shape),
                tensor.stride(),
                int(tensor.storage_offset()),
                tensor.dtype,
            )
        )

    @guarded
    def on_unsave(self, buffer: live.Buffer) -> None:
        """End the life of a storage if neither a handle nor the program needs it any more."""
        version = self._draft.by_buffer.get(buffer.id)
        if version is None:
            return
        storage = version.storage
        storage.saved.discard(buffer.id)
        if not storage.saved and (not storage.records or (buffer.op is None and buffer.is_held_by_us_alone())):
            self._draft.die(storage)

    @guarded
    def on_unpack(self, tensor: torch.Tensor, save: int = -1) -> None:
        """Add a saved tensor to what the running opaque code reads."""
        if save >= 0:
            self._unpacks.append((save, len(self._draft.ops)))
        if self._opaque_reads is not None:
            version = self._known(tensor)
            if version is not None:
                self._opaque_reads[version.id] = None

    @guarded
    def on_persistent(self, known: Persistent) -> None:
        """Note which storage holds a persistent tensor, also if the step does not use it."""
        version = self._draft.by_record.get(known.record.id)
        if version is not None:
            self._keys[version.storage.id] = known.key
            if known.is_state and version.storage.kind is None:
                version.storage.kind = "optimizer_state"

    @guarded
    def on_use(self, record: live.StorageRecord, key: int) -> None:
        """Note the use of a persistent tensor. Repeated uses in a row, in one phase, count once."""
        version = self._draft.by_record.get(record.id)
        if version is None:
            return
        self._keys[version.storage.id] = key
        phase = self._steps.phase
        if not self._uses or self._uses[-1][:2] != (key, phase):
            self._uses.append((key, phase, len(self._draft.ops)))

    # -- ops

    @guarded
    def on_op(
        self,
        facts: OpFacts,
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None,
        out: Any,
        time_s: float,
        *,
        written: Iterable[torch.Tensor] = (),
        entry: OpEntry | None = None,
        workspace_bytes: int = 0,
        possible_bytes: int = 0,
        timing: Timing | None = None,
    ) -> None:
        """Add an op that has just run. `written` are the arguments that it wrote, `entry` is what can replay it."""
        phase = self._steps.phase
        grad_enabled = torch.is_grad_enabled()
        reads = self._reads(facts, args, kwargs)
        if phase == "forward":
            for id_ in reads:
                self._draft.versions[id_].storage.is_read = True
        index = len(self._draft.ops)
        watches = entry is None and phase == "forward"
        writes: list[int] = []
        for tensor in written:
            self._write(tensor, index, phase, writes, watches=watches)
        for item in out if isinstance(out, tuple | list) else (out,):
            if isinstance(item, torch.Tensor):
                record = self._record(item)
                if record is not None and record.id not in self._draft.by_record:
                    version = self._born(record, index, phase)
                    writes.append(version.id)
                    if watches and record.current is not None:
                        self._held[version.id] = weakref.ref(record.current)
        if not reads and not writes:
            return  # nothing on this device, for example a profiler's mark
        self._add(
            Op(
                index=index,
                name=facts.name,
                phase=phase,
                module=self._paths.current() if phase == "forward" or (phase == "backward" and grad_enabled) else "",
                reads=tuple(reads),
                writes=tuple(writes),
                time_s=time_s,
                random=facts.is_random,
                recomputable=self._device.may_replay(facts, args, kwargs),
                node=self._steps.node_name if phase == "backward" else "",
                workspace_bytes=workspace_bytes + possible_bytes if self.is_for_plans else workspace_bytes,
            )
        )
        self._draft.time_later(index, timing)
        self._draft.end_of_op = index + 1
        self._draft.recent.clear()
        if self._held:
            self._count_holders(index)
        self._begin_anew_if_idle()

    def _reads(self, facts: OpFacts, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> dict[int, None]:
        reads: dict[int, None] = {}
        for position, argument in enumerate(args):
            self._read(argument, reads, is_written=facts.overwrites and position == 0)
        for name, argument in (kwargs or {}).items():
            self._read(argument, reads, is_written=name in facts.written_keywords)
        return reads

    def _read(self, argument: Any, reads: dict[int, None], *, is_written: bool) -> None:
        if isinstance(argument, torch.Tensor):
            version = self._version_of(argument)
            # An argument that is overwritten completely is not read.
            if version is not None and not (is_written and _covers(argument, version)):
                reads[version.id] = None
        elif argument.__class__ is list or argument.__class__ is tuple:
            self._read_all(argument, reads)

    def _write(self, tensor: torch.Tensor, index: int, phase: Phase, writes: list[int], *, watches: bool) -> None:
        record = self._record(tensor)
        if record is None:
            return
        old = self._draft.by_record.get(record.id)
        if old is None:  # `set_` has given the tensor an unknown storage
            writes.append(self._born(record, index, phase).id)
            return
        if old.birth_op == index:
            return  # the op wrote two views of this storage
        version = self._draft.overwritten(old, record, index)
        writes.append(version.id)
        version.storage.noted_version += 1
        if self._steps.is_in_optimizer:
            version.storage.is_optimizers = True
        if watches and version.storage.birth_phase is not None and record.current is not None:
            self._held[version.id] = weakref.ref(record.current)

    def _count_holders(self, index: int) -> None:
        """End the lives of storages that only the runtime keeps alive.

        The caller of the last op still holds what that op read. So a storage that only the runtime holds now was dead
        before that op. Of many storages, a part is looked at after each op, in turns: their lives end some ops late.
        """
        for id_, reference in list(itertools.islice(self._held.items(), _MOST_LOOKED_AT)):
            version = self._draft.versions[id_]
            storage = version.storage
            buffer = reference()
            if buffer is None or not storage.is_alive or storage.current is not version or storage.kind is not None:
                del self._held[id_]
            elif not storage.saved and buffer.is_held_by_us_alone():
                del self._held[id_]
                self._draft.die(storage, index)
            elif len(self._held) > _MOST_LOOKED_AT:
                self._held[id_] = self._held.pop(id_)  # behind the others


def _covers(tensor: torch.Tensor, version: PlainVersion) -> bool:
    return tensor.numel() * tensor.element_size() >= version.size_bytes
