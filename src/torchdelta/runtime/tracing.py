"""Writes the trace of one step (`torchdelta.trace.model`) from what recorder, ledger and saved-tensor hooks tell.

[Note: the trace is that of the plain step]
Under a budget, buffers leave and come back in new storages while the step is traced. None of that is in the trace: it
describes the step as it would run without torchdelta, so that the traces of a tight and of an unlimited budget are the
same. Hence a *plain storage* is followed: the storage that an op made, together with all the storages that later stand
in for it. It lives until no storage stands for it any more and no handle of a saved tensor wants it; the storages of
replays are never heard of, as replays run below the recorder. A storage that only the runtime still holds (content
without an op is held from its first use on) is dead in plain: its holders are counted after each op.

[Note: content that no op made]
Pseudo-ops write it. `torchdelta.accumulate`: a gradient that the engine added up, or copied into a `.grad`, between two
nodes; what it reads is guessed from the gradients of the same size that died there. `torchdelta.node`: an autograd node
that runs without the dispatch mode (mode_sensitive.py). `torchdelta.compiled`: a compiled region.
`torchdelta.external`: anything else that turns up.

Kinds are found out as well as possible: parameters, gradients and the buffers of modules are asked for; what the
optimizer makes and keeps, or finds and writes, is its state; what else was there before the step is an input if the
forward reads it.

What is told is put down in drafting.py. State here is of one step, and holds no tensor, storage or buffer alive.
"""

from __future__ import annotations

import functools
import logging
import time
import weakref
from typing import TYPE_CHECKING, Any, Concatenate, Final, ParamSpec

import torch
from msgspec import structs

from torchdelta._torch import storage_address, storage_num_holders
from torchdelta.modules import ModulePaths
from torchdelta.runtime.drafting import Draft
from torchdelta.trace.draft import Saved
from torchdelta.trace.model import BEFORE_STEP, Op
from torchdelta.trace.validate import validate

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torchdelta.aten.facts import OpFacts
    from torchdelta.runtime import buffer as live
    from torchdelta.runtime.drafting import PlainStorage, PlainVersion
    from torchdelta.runtime.optime import Timing
    from torchdelta.runtime.session import Session
    from torchdelta.runtime.tape import OpEntry
    from torchdelta.trace.model import BufferKind, Phase, Trace

# A "step" of more ops is none: an evaluation over a data set before the first backward, say.
MAX_OPS: Final = 1_000_000

_Arguments = ParamSpec("_Arguments")


def _guarded(
    method: Callable[Concatenate[TraceBuilder, _Arguments], None],
) -> Callable[Concatenate[TraceBuilder, _Arguments], None]:
    """Give up the trace, and not the training, when something here is wrong."""

    @functools.wraps(method)
    def guarded(self: TraceBuilder, *args: _Arguments.args, **kwargs: _Arguments.kwargs) -> None:
        try:
            method(self, *args, **kwargs)
        except Exception as error:  # noqa: BLE001 - see above
            # In words: an exception object would hold the frames, and these the tensors.
            self.give_up(f"{type(error).__name__}: {error}")

    return guarded


class TraceBuilder:
    """Listens to a session from its start to the end of the first step."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.ledger = session.ledger
        self._paths = ModulePaths(self._on_root)
        self._draft = Draft(session.ledger.device.type)
        # Born in forward without an op that recomputes them, so perhaps held by the runtime alone.
        self._held: dict[int, weakref.ref[live.Buffer]] = {}
        self._opaque_reads: dict[int, None] | None = None  # what the running opaque op reads; None: none is running
        self._opaque_start_s = 0.0
        self._opaque_workspace_bytes = 0
        self._is_over = False

    # -- its own life

    def give_up(self, why: str) -> None:
        """Stop tracing without a trace, and say why once."""
        self.ledger.trace = None
        if not self._is_over:
            self._is_over = True
            logging.getLogger("torchdelta").warning("the trace of the first step was dropped: %s", why)

    def finish(self) -> Trace | None:
        """Stop tracing. Returns the trace, None when there is no valid one."""
        if self._is_over:
            return None
        try:
            self._draft.correct_times(self.session.recorder.clock)
            trace = self._draft.trace()
            validate(trace)
        except Exception as error:  # noqa: BLE001 - the training goes on without a trace
            self.give_up(f"{type(error).__name__}: {error}")
            return None
        self._is_over = True
        self.ledger.trace = None
        return trace

    # -- storages that exist

    @_guarded
    def on_found(self, record: live.StorageRecord, tensor: torch.Tensor, kind: BufferKind | None = None) -> None:
        """Note a storage that exists before the step, seen through one of its tensors."""
        version = self._draft.by_record.get(record.id)
        if version is None:
            version = self._born(record, BEFORE_STEP, None)
        if kind is None and (tensor.__class__ is torch.nn.Parameter or (tensor.is_leaf and tensor.requires_grad)):
            kind = "parameter"
        if kind is not None:
            version.storage.kind = kind
            version.storage.noted_version = _version_counter(tensor)

    def _on_root(self, module: torch.nn.Module) -> None:
        for buffer in module.buffers():
            version = self._known(buffer)
            if version is not None and version.storage.kind is None:
                version.storage.kind = "constant"

    @_guarded
    def on_storage_death(self, record: live.StorageRecord, _buffer: live.Buffer | None) -> None:
        """Note that a living storage died: by the hand of the program or of the residency."""
        self._draft.gone(record)

    @_guarded
    def on_return(self, buffer: live.Buffer, record: live.StorageRecord) -> None:
        """Note that a storage stands in for the one that a buffer had."""
        version = self._draft.by_buffer.get(buffer.id)
        if version is not None:
            self._draft.returned(version, record)

    # -- saved tensors

    @_guarded
    def on_save(self, buffer: live.Buffer, view: live.View) -> None:
        """Note a saved tensor whose buffer may leave."""
        version = self._draft.by_buffer.get(buffer.id)
        if version is None:
            record = buffer.record
            if record is None:
                return
            version = self._draft.by_buffer[buffer.id] = self._draft.by_record.get(record.id) or self._appear(record)
        version.storage.saved.add(buffer.id)
        self._draft.saved.append(
            Saved(len(self._draft.ops), version, tuple(view.shape), tuple(view.stride), int(view.offset), view.dtype)
        )

    @_guarded
    def on_pin(self, tensor: torch.Tensor) -> None:
        """Note a saved tensor that stays."""
        if tensor.device != self.ledger.device:
            return
        version = self._version_of(tensor)
        if version is None:
            return
        if tensor.is_leaf and tensor.requires_grad:
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

    @_guarded
    def on_unsave(self, buffer: live.Buffer) -> None:
        """Note that no handle wants a buffer any more."""
        version = self._draft.by_buffer.get(buffer.id)
        if version is None:
            return
        storage = version.storage
        storage.saved.discard(buffer.id)
        if not storage.saved and (not storage.records or (buffer.op is None and _is_ours_alone(buffer))):
            self._draft.die(storage)

    @_guarded
    def on_unpack(self, tensor: torch.Tensor) -> None:
        """Note what an opaque node reads."""
        if self._opaque_reads is not None:
            version = self._known(tensor)
            if version is not None:
                self._opaque_reads[version.id] = None

    # -- ops

    @_guarded
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
        timing: Timing | None = None,
    ) -> None:
        """Note an op that has just run; `written` are the arguments that it wrote, `entry` what can recompute it."""
        phase = self.session.steps.phase
        grad_enabled = torch.is_grad_enabled()
        reads = self._reads(facts, args, kwargs)
        if phase == "forward":
            for id_ in reads:
                self._draft.versions[id_].storage.is_read = True
        index = len(self._draft.ops)
        watches = entry is None and grad_enabled and phase == "forward"
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
            return  # nothing on this device: a profiler's mark, say
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
                recomputable=facts.is_recomputable,
                node=self.session.node_name if phase == "backward" else "",
                workspace_bytes=workspace_bytes,
            )
        )
        self._draft.time_later(index, timing)
        self._draft.end_of_op = index + 1
        self._draft.recent.clear()
        if self._held:
            self._count_holders(index)

    def _reads(self, facts: OpFacts, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> dict[int, None]:
        reads: dict[int, None] = {}
        for position, argument in enumerate(args):
            if isinstance(argument, torch.Tensor):
                version = self._version_of(argument)
                # What is overwritten as a whole is not read.
                if version is not None and not (facts.overwrites and position == 0 and _covers(argument, version)):
                    reads[version.id] = None
            elif argument.__class__ is list or argument.__class__ is tuple:
                self._read_all(argument, reads)
        if kwargs:
            for name, argument in kwargs.items():
                if isinstance(argument, torch.Tensor):
                    version = self._version_of(argument)
                    if version is not None and not (name in facts.written_keywords and _covers(argument, version)):
                        reads[version.id] = None
                elif argument.__class__ is list or argument.__class__ is tuple:
                    self._read_all(argument, reads)
        return reads

    def _read_all(self, arguments: Iterable[Any], reads: dict[int, None]) -> None:
        for argument in arguments:
            if isinstance(argument, torch.Tensor):
                version = self._version_of(argument)
                if version is not None:
                    reads[version.id] = None

    def _write(self, tensor: torch.Tensor, index: int, phase: Phase, writes: list[int], *, watches: bool) -> None:
        record = self._record(tensor)
        if record is None:
            return
        old = self._draft.by_record.get(record.id)
        if old is None:  # `set_` has given it a storage that nobody knew
            writes.append(self._born(record, index, phase).id)
            return
        if old.birth_op == index:
            return  # two views of one storage
        version = self._draft.overwritten(old, record, index)
        writes.append(version.id)
        version.storage.noted_version += 1
        if self.session.steps.is_in_optimizer:
            version.storage.is_optimizers = True
        if watches and version.storage.birth_phase is not None and record.current is not None:
            self._held[version.id] = weakref.ref(record.current)

    def _count_holders(self, index: int) -> None:
        """Let storages die that only the runtime keeps.

        What the last op read is still held by its caller: whatever is held by nobody else died before that op.
        """
        for id_, reference in list(self._held.items()):
            version = self._draft.versions[id_]
            storage = version.storage
            buffer = reference()
            if buffer is None or not storage.is_alive or storage.current is not version or storage.kind is not None:
                del self._held[id_]
            elif not storage.saved and _is_ours_alone(buffer):
                del self._held[id_]
                self._draft.die(storage, index)

    # -- what no op made

    @_guarded
    def on_backward_start(self, gradients: Any) -> None:
        """Count the ops that have just made the gradients of the loss to the backward, where they belong."""
        versions = [self._known(gradient) for gradient in gradients or () if isinstance(gradient, torch.Tensor)]
        ids = {version.id for version in versions if version is not None}
        for index in range(len(self._draft.ops) - 1, max(-1, len(self._draft.ops) - 1 - len(ids)), -1):
            op = self._draft.ops[index]
            if not op.writes or not ids.issuperset(op.writes):
                return
            self._draft.ops[index] = structs.replace(op, phase="backward", module="")
            for id_ in op.writes:
                self._draft.versions[id_].storage.birth_phase = "backward"

    @_guarded
    def on_gradients(self, gradients: Iterable[torch.Tensor | None]) -> None:
        """Note the gradients that flow into a node which is about to run: the engine may have added them up."""
        flowing: set[PlainStorage] = set()
        for gradient in gradients:
            record = self._record(gradient) if gradient is not None else None
            if gradient is None or record is None:
                continue
            version = self._draft.by_record.get(record.id)
            if version is None:
                version = self._accumulate(record, None)
            elif _is_added_to(version.storage, gradient):
                version = self._accumulate(record, version)
                version.storage.noted_version = _version_counter(gradient)
            flowing.add(version.storage)
        self._draft.flowing = flowing
        self._draft.start_of_node = len(self._draft.ops)

    @_guarded
    def on_leaf_gradient(self, leaf: torch.Tensor, gradient: torch.Tensor) -> None:
        """Note the `.grad` of a leaf that has just been accumulated into."""
        owner = self._known(leaf)
        if owner is not None:
            owner.storage.kind = "parameter"
        record = self._record(gradient)
        if record is None:
            return
        version = self._draft.by_record.get(record.id)
        if version is None:
            version = self._accumulate(record, None)
        elif _is_added_to(version.storage, gradient):
            version = self._accumulate(record, version)
        version.storage.kind = "gradient"
        version.storage.noted_version = _version_counter(gradient)

    def _accumulate(self, record: live.StorageRecord, old: PlainVersion | None) -> PlainVersion:
        index = len(self._draft.ops)
        reads = [] if old is None else [old.id]
        reads += self._draft.sources_of_sum(record.size_bytes, 2 - len(reads))
        version = self._born(record, index, "backward") if old is None else self._draft.overwritten(old, record, index)
        name = "torchdelta.accumulate" if reads else "torchdelta.external"
        self._add(Op(index=index, name=name, phase="backward", reads=tuple(reads), writes=(version.id,)))
        return version

    def _appear(self, record: live.StorageRecord) -> PlainVersion:
        """Give a storage of unknown origin its pseudo-op."""
        index, phase = len(self._draft.ops), self.session.steps.phase
        version = self._born(record, index, phase)
        version.storage.is_external = True
        if phase == "forward" and record.current is not None:
            self._held[version.id] = weakref.ref(record.current)
        self._add(Op(index=index, name="torchdelta.external", phase=phase, writes=(version.id,)))
        return version

    @_guarded
    def on_opaque_start(self, arguments: Iterable[Any] = (), workspace_bytes: int = 0) -> None:
        """Note that an op begins inside of which nothing is seen."""
        self._opaque_reads = {}
        self._read_all(arguments, self._opaque_reads)
        self._opaque_workspace_bytes = workspace_bytes
        self._opaque_start_s = time.perf_counter()

    @_guarded
    def on_opaque_end(self, name: str, outputs: Any, *, node: str = "", working_set_bytes: int = 0) -> None:
        """Note that it is over. The ledger knows its outputs."""
        time_s = time.perf_counter() - self._opaque_start_s
        reads, self._opaque_reads = self._opaque_reads, None
        if reads is None:
            return
        index, phase = len(self._draft.ops), self.session.steps.phase
        writes: list[int] = []
        outputs_bytes = 0
        stack = [outputs]
        while stack:
            item = stack.pop()
            if isinstance(item, tuple | list):
                stack.extend(reversed(item))
            elif isinstance(item, torch.Tensor):
                record = self._record(item)
                if record is not None and record.id not in self._draft.by_record:
                    writes.append(self._born(record, index, phase).id)
                    outputs_bytes += record.size_bytes
        self._add(
            Op(
                index=index,
                name=name,
                phase=phase,
                module=self._paths.current() if phase == "forward" else "",
                reads=tuple(
                    id_
                    for id_ in reads
                    if self._draft.versions[id_].storage.current.id == id_
                    and self._draft.versions[id_].storage.is_alive
                ),
                writes=tuple(writes),
                time_s=time_s,
                workspace_bytes=max(self._opaque_workspace_bytes, working_set_bytes - outputs_bytes),
                node=node,
            )
        )
        self._draft.end_of_op = index + 1

    # -- drafts

    def _record(self, tensor: torch.Tensor) -> live.StorageRecord | None:
        try:
            return self.ledger.records.get(storage_address(tensor))
        except RuntimeError:  # sparse and other opaque tensors have no storage
            return None

    def _known(self, tensor: torch.Tensor) -> PlainVersion | None:
        record = self._record(tensor)
        return self._draft.by_record.get(record.id) if record is not None else None

    def _version_of(self, tensor: torch.Tensor) -> PlainVersion | None:
        """Return what a tensor's storage holds, also one of unknown origin; None where the ledger knows none."""
        record = self._record(tensor)
        if record is None:
            return None
        version = self._draft.by_record.get(record.id)
        if version is not None:
            return version
        if _is_parameter(tensor):
            version = self._born(record, BEFORE_STEP, None)  # the scan could not see it
            version.storage.kind = "parameter"
            return version
        return self._appear(record)

    def _born(self, record: live.StorageRecord, birth_op: int, phase: Phase | None) -> PlainVersion:
        by_optimizer = phase is not None and self.session.steps.is_in_optimizer
        return self._draft.born(record, birth_op, phase, by_optimizer=by_optimizer)

    def _add(self, op: Op) -> None:
        self._draft.ops.append(op)
        if len(self._draft.ops) > MAX_OPS:
            self.give_up(f"no training step ended within {MAX_OPS} ops")


def _covers(tensor: torch.Tensor, version: PlainVersion) -> bool:
    return tensor.numel() * tensor.element_size() >= version.size_bytes


def _is_ours_alone(buffer: live.Buffer) -> bool:
    """Say whether only the runtime keeps a buffer's storage: through its alias and the storage's own Python object."""
    strong = buffer.strong
    return strong is not None and storage_num_holders(storage_address(strong)) <= 2


def _is_parameter(tensor: torch.Tensor) -> bool:
    """Say whether a tensor is a leaf that wants a gradient, or a view of one."""
    base = tensor._base
    owner = tensor if base is None else base
    return owner.is_leaf and owner.requires_grad


def _is_added_to(storage: PlainStorage, gradient: torch.Tensor) -> bool:
    """Say whether the engine has added to a gradient in place since it was last looked at."""
    is_gradient = storage.kind == "gradient" or storage.birth_phase == "backward"
    return is_gradient and _version_counter(gradient) > storage.noted_version


def _version_counter(tensor: torch.Tensor) -> int:
    """Return how often autograd has seen the content change: the engine's own additions count too."""
    return tensor._version
