"""The recorder: a dispatch mode that sees every op, makes room for it, runs it, and notes what it made from what.

In forward it records for replay; in backward it only counts (there is nothing to replay), and it is on only inside
nodes: see backward.py.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch

from torchdelta import _torch
from torchdelta._torch import TorchDispatchMode, graph_task_id, num_modes, storage_address
from torchdelta.aten.collectives import may_be_under_way
from torchdelta.aten.facts import STATISTICS_POSITIONS, TRAINING_POSITION, Kind, OpFacts, facts_of, written_tensors
from torchdelta.runtime import faults
from torchdelta.runtime.buffer import Buffer, StorageRecord
from torchdelta.runtime.interrupts import enter, leave
from torchdelta.runtime.optime import HostClock, OpClock
from torchdelta.runtime.predict import Predictor
from torchdelta.runtime.retry import may_retry
from torchdelta.runtime.subclasses import Way, runs_own_ops
from torchdelta.runtime.tape import Fresh, OpEntry, Scratch, capture, generator_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torchdelta.runtime.predict import Need
    from torchdelta.runtime.session import Session

VIEW = Kind.VIEW  # enum attributes are slow to look up, and most ops are views


class Recorder(TorchDispatchMode):
    """Sees the ops of one thread."""

    # Without these two, Dynamo skips compiled code, stickily (torch_internals: "ten facts" 6), and every op pays a
    # Dynamo check.
    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Tell Dynamo that this mode does not mind compiled code."""
        return True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __init__(self, session: Session) -> None:
        super().__init__()
        self.session = session
        self.ledger = session.ledger
        self.residency = session.residency
        self.counters = session.counters
        self.predictor = Predictor()
        self.clock: OpClock = HostClock()
        self.execute = execute  # a survey puts its own in place
        self.subclasses = session.subclasses

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run one op. The signature is torch's."""
        outer = enter()
        try:
            facts: OpFacts
            try:
                facts = func._torchdelta_facts
            except AttributeError:
                facts = facts_of(func)
            if types or num_modes():
                way = self.subclasses.way_of(func, types)
                if way is Way.DECLINE:
                    return NotImplemented
                if way is Way.RUN:
                    return func(*args, **(kwargs or {}))
                if way is Way.INSIDE:
                    return self._run_subclass(func, facts, args, kwargs)
            kind = facts.kind
            grad_enabled = torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
            counts_only = not grad_enabled and graph_task_id() != -1
            if kind is VIEW:
                out = self.execute(func, facts, args, kwargs)
                if counts_only:
                    self._note_backward_output(out)
                return out
            if kind is Kind.NO_OUTPUT:
                return self.execute(func, facts, args, kwargs)
            self.counters.num_ops += 1
            self.ledger.clock += 1
            records = (
                not counts_only
                and (grad_enabled or (self.session.num_handles > 0 and not torch.is_inference_mode_enabled()))
                and not _torch.is_in_compiled_region()
            )
            if kind is Kind.COMPUTE or facts.keeps_statistics:
                if counts_only:
                    return self._count(func, facts, args, kwargs)
                return self._compute(func, facts, args, kwargs, records=records)
            return self._write(func, facts, args, kwargs, records=records)
        finally:
            leave(outer)

    def _run_subclass(self, func: Any, facts: OpFacts, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
        """Let a subclass run its op, and see which plain arguments that wrote: it may do so where no mode looks."""
        targets = written_tensors(facts, args, kwargs) if facts.kind in (Kind.WRITE, Kind.REPLACE) else []
        plain = [tensor for tensor in targets if not runs_own_ops(tensor.__class__)]
        before = [(tensor, self._overwritten(tensor)) for tensor in plain if self.ledger.find(tensor) is not None]
        out = self.subclasses.call(self, func, args, kwargs)
        for tensor, old in before:
            self._new_content(tensor, old, None, 0, facts)
        return out

    # -- ops that make new storages

    def _count(self, func: Any, facts: OpFacts, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
        need = self.predictor.need(facts, func, args, kwargs)
        self.residency.room(need.output_bytes + need.inside_bytes, facts.name)
        before_bytes = self.ledger.live_bytes
        self._mark(need)
        mark = self.clock.start(need)
        try:
            out = self.execute(func, facts, args, kwargs)
        except RuntimeError as error:
            if not may_retry(error, facts, args, None, self.residency):
                raise
            self._mark(need)  # what has left since is none of the op's
            out = self.execute(func, facts, args, kwargs)
        time_s = self.clock.stop(mark, None)
        self._note_backward_output(out)
        size_bytes = self.ledger.live_bytes - before_bytes
        need.output_bytes = max(need.output_bytes, size_bytes)
        inside_bytes = self._measure_inside(need, size_bytes)
        if self.ledger.trace is not None:
            self.ledger.trace.on_op(facts, args, kwargs, out, time_s, workspace_bytes=inside_bytes, timing=need.timing)
        return out

    def _note_backward_output(self, out: Any) -> None:
        if isinstance(out, torch.Tensor):
            self.ledger.know_by_tensor(out)
        elif isinstance(out, tuple | list):
            for item in out:
                if isinstance(item, torch.Tensor):
                    self.ledger.know_by_tensor(item)

    def _compute(
        self, func: Any, facts: OpFacts, args: tuple[Any, ...], kwargs: dict[str, Any] | None, *, records: bool
    ) -> Any:
        need = self.predictor.need(facts, func, args, kwargs)
        self.residency.room(need.output_bytes + need.inside_bytes, facts.name)
        is_training = facts.keeps_statistics and len(args) > TRAINING_POSITION and bool(args[TRAINING_POSITION])
        hides = is_training and not faults.is_disabled("batch-norm-stats")
        can_replay = records and self.can_replay(facts, args, kwargs)
        entry = self._capture(func, facts, args, kwargs, hides=hides) if can_replay else None
        statistics = [args[i] for i in STATISTICS_POSITIONS if isinstance(args[i], torch.Tensor)] if is_training else []
        before = [(tensor, self._overwritten(tensor)) for tensor in statistics] if hides else []
        self._mark(need)
        if entry is not None and facts.is_random:
            generator = generator_of(facts, args, kwargs)
            entry.random_state = (generator, generator.get_state()) if generator is not None else None
        mark = self.clock.start(need)
        try:
            out = self.execute(func, facts, args, kwargs)
        except RuntimeError as error:
            if not may_retry(error, facts, args, entry, self.residency):
                raise
            self._mark(need)  # what has left since is none of the op's
            out = self.execute(func, facts, args, kwargs)
        time_s = self.clock.stop(mark, entry)
        size_bytes = 0
        if isinstance(out, torch.Tensor):
            size_bytes = self._note_output(out, entry, 0, facts)
        elif isinstance(out, tuple | list):
            for index, item in enumerate(out):
                if isinstance(item, torch.Tensor):
                    size_bytes += self._note_output(item, entry, index, facts)
        need.output_bytes = size_bytes
        inside_bytes = self._measure_inside(need, size_bytes)
        if entry is not None:
            entry.output_bytes = size_bytes
            entry.workspace_bytes = inside_bytes
        for tensor, old in before:
            self._new_content(tensor, old, None, 0, facts)
        if self.ledger.trace is not None:
            self.ledger.trace.on_op(
                facts,
                args,
                kwargs,
                out,
                time_s,
                written=statistics,
                entry=entry,
                workspace_bytes=inside_bytes,
                timing=need.timing,
            )
        return out

    def is_off(self) -> bool:
        """Say whether ops pass through unseen at the moment."""
        return False

    def can_replay(self, facts: OpFacts, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> bool:
        """Say whether an op gives the same bits when it is run again in this step."""
        del args, kwargs  # an accelerator's recorder looks at them
        return facts.is_recomputable

    def _capture(
        self, func: Any, facts: OpFacts, args: tuple[Any, ...], kwargs: dict[str, Any] | None, *, hides: bool
    ) -> OpEntry | None:
        """Return the op for the tape, or None when an argument has no storage (sparse and other opaque layouts)."""
        view_of = self.ledger.view_of
        if self.session.resizes.has_seen_any and self.session.resizes.reads_any((*args, *(kwargs or {}).values())):
            return None
        try:
            captured: list[Any] = []
            for index, a in enumerate(args):
                if hides and index in STATISTICS_POSITIONS and isinstance(a, torch.Tensor):
                    captured.append(Scratch(a))
                elif isinstance(a, torch.Tensor):
                    captured.append(view_of(a))
                elif a.__class__ is list or a.__class__ is tuple:
                    captured.append(capture(a, view_of))
                else:
                    captured.append(a)
            captured_kwargs = {name: capture(a, view_of) for name, a in kwargs.items()} if kwargs else None
        except (NotImplementedError, RuntimeError):
            return None
        return OpEntry(func, facts, captured, captured_kwargs)

    def _note_output(self, out: torch.Tensor, entry: OpEntry | None, index: int, facts: OpFacts) -> int:
        """Give an output its buffer.

        Returns the bytes of its storage, 0 for a storage known before (a view in disguise).
        """
        try:
            storage = out.untyped_storage()
        except (NotImplementedError, RuntimeError):
            return 0
        ledger = self.ledger
        record = ledger.records.get(storage._cdata)
        if record is not None and record.current is not None:
            return 0
        record = ledger.know(storage)
        buffer = Buffer(record.size_bytes)
        buffer.record = record
        buffer.op = entry
        buffer.origin = facts.name
        buffer.output_index = index
        buffer.last_used = ledger.clock
        record.current = buffer
        if entry is not None:
            entry.outputs.append(weakref.ref(buffer))
        return record.size_bytes

    # -- ops that write their arguments

    def _write(
        self, func: Any, facts: OpFacts, args: tuple[Any, ...], kwargs: dict[str, Any] | None, *, records: bool
    ) -> Any:
        targets = written_tensors(facts, args, kwargs)
        need = self.predictor.need(facts, func, args, kwargs)
        if need.output_bytes or need.inside_bytes:
            self.residency.room(need.output_bytes + need.inside_bytes, facts.name)
        entry = self._capture_write(func, facts, args, kwargs, targets) if records else None
        old: dict[int, tuple[torch.Tensor, Buffer | None]] = {}
        num_copies = self.counters.num_copies_before_write
        for tensor in targets:
            try:
                address = storage_address(tensor)
            except RuntimeError:
                continue
            if address not in old:
                old[address] = (tensor, self._overwritten(tensor))
        if self.counters.num_copies_before_write > num_copies and (need.output_bytes or need.inside_bytes):
            # The copy may have taken the room that was made.
            self.residency.room(need.output_bytes + need.inside_bytes, facts.name)
        before_bytes = self.ledger.live_bytes
        self._mark(need)
        if entry is not None and facts.is_random:
            generator = generator_of(facts, args, kwargs)
            entry.random_state = (generator, generator.get_state()) if generator is not None else None
        versions = _versions(targets) if facts.bumps_inside and self.session.survey is None else []
        mark = self.clock.start(need)
        out = self.execute(func, facts, args, kwargs)
        time_s = self.clock.stop(mark, entry)
        if versions and not self.subclasses.is_inside:
            _bump_missing(versions)
        counts_only = not records and graph_task_id() != -1 and not torch.is_grad_enabled()
        new_bytes = 0
        for index, (tensor, buffer) in enumerate(old.values()):
            record = self.ledger.find(tensor)
            if record is not None and record.reference is None and buffer is None:
                continue  # a gradient that is still the engine's own: nothing is recorded of it
            if record is None and counts_only:
                self.ledger.know_by_tensor(tensor)
                continue
            size_bytes = record.size_bytes if record is not None else 0
            self._new_content(tensor, buffer, entry, index, facts)
            if record is not None:
                new_bytes += max(0, record.size_bytes - size_bytes)  # an `out` that grew
            if facts.is_collective:
                self._note_collective(tensor, func, args, kwargs)
        noted_bytes = self.ledger.live_bytes
        for item in out if isinstance(out, tuple | list) else (out,):
            if isinstance(item, torch.Tensor):
                if counts_only:
                    self.ledger.know_by_tensor(item)
                else:
                    self._note_output(item, None, 0, facts)
        need.output_bytes = max(need.output_bytes, new_bytes + self.ledger.live_bytes - noted_bytes)
        inside_bytes = self._measure_inside(need, max(0, self.ledger.live_bytes - before_bytes))
        if entry is not None:
            entry.workspace_bytes = inside_bytes
        if self.ledger.trace is not None:
            self.ledger.trace.on_op(facts, args, kwargs, out, time_s, written=targets, entry=entry, timing=need.timing)
        return out

    def _mark(self, need: Need) -> None:
        """Begin to measure what an op allocates, outputs included."""
        del need  # an accelerator's recorder does not measure every op
        ledger = self.ledger
        if ledger.is_counting and ledger.counter is not None:
            ledger.counter.mark()

    def _measure_inside(self, need: Need, size_bytes: int) -> int:
        """Learn what an op allocated beside its outputs of `size_bytes`, or take it to be what was estimated.

        Returns:
            The bytes to reserve when it runs again.
        """
        ledger = self.ledger
        if ledger.is_counting and ledger.counter is not None:
            return need.learn_inside(max(0, ledger.counter.growth_bytes() - size_bytes))
        if need.inside_bytes:
            ledger.note_workspace(need.inside_bytes)
        return need.inside_bytes

    def _note_collective(
        self, tensor: torch.Tensor, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None
    ) -> None:
        """Keep what a collective may still be writing, and what FSDP will free."""
        record = self.ledger.find(tensor)
        if record is not None and record.current is not None:
            if func.namespace == "fsdp":
                self.session.resizes.mark(record)
            elif may_be_under_way(func, args, kwargs):
                record.current.is_pinned = True

    def _capture_write(
        self,
        func: Any,
        facts: OpFacts,
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None,
        targets: list[torch.Tensor],
    ) -> OpEntry | None:
        """Return an in-place op for the tape if its result can be replayed.

        It can when the old content can be recomputed (the replay works on a copy of that), or when the op overwrites
        all of it.
        """
        if facts.kind is not Kind.WRITE or not targets or not self.can_replay(facts, args, kwargs):
            return None
        try:
            covers = facts.overwrites and len(targets) == 1 and targets[0] is args[0] and _covers_storage(targets[0])
            if not covers:
                for tensor in targets:
                    record = self.ledger.find(tensor)
                    if record is None or record.current is None or record.current.op is None:
                        return None
            entry = self._capture(func, facts, args[1:] if covers else args, kwargs, hides=False)
        except (NotImplementedError, RuntimeError):
            return None
        if entry is not None and covers:
            entry.args.insert(0, Fresh(targets[0], targets[0].untyped_storage().nbytes()))
        return entry

    def _overwritten(self, tensor: torch.Tensor) -> Buffer | None:
        """Prepare for an op that will change a tensor's storage. Returns the buffer whose content ends here."""
        record = self.ledger.find(tensor)
        if record is None or record.current is None:
            return None
        buffer = record.current
        self.residency.settle_copy(buffer)
        self.ledger.let_go(buffer)
        record.current = None
        buffer.record = None
        if buffer.op is None and buffer.copy is None and buffer.num_views:
            self.residency.preserve(buffer, tensor.untyped_storage())
        return buffer

    def before_unseen_writes(self, arguments: Iterable[Any]) -> list[tuple[torch.Tensor, int]]:
        """Prepare for code that may write its arguments where no op is seen. Returns their versions."""
        before: list[tuple[torch.Tensor, int]] = []
        for argument in arguments:
            if (
                not isinstance(argument, torch.Tensor)
                or runs_own_ops(argument.__class__)
                or argument.layout is not torch.strided
                or argument.is_inference()
            ):
                continue
            record = self.ledger.find(argument)
            if record is not None and record.current is not None:
                self.residency.settle_copy(record.current)
                before.append((argument, argument._version))
        return before

    def after_unseen_writes(self, before: list[tuple[torch.Tensor, int]]) -> None:
        """Part the arguments that were written from what was known of their content.

        The old content is recomputed where an op made it; where none did, whoever wants it is told that it is gone.
        """
        for tensor, version in before:
            record = self.ledger.find(tensor)
            if tensor._version != version and record is not None and record.current is not None:
                buffer = record.current
                self.ledger.let_go(buffer)
                record.current = None
                buffer.record = None

    def _new_content(
        self, tensor: torch.Tensor, old: Buffer | None, entry: OpEntry | None, index: int, facts: OpFacts
    ) -> None:
        """Give a written storage its new buffer."""
        storage = tensor.untyped_storage()
        ledger = self.ledger
        record: StorageRecord = ledger.know(storage)
        size_bytes = storage.nbytes() if storage.device in ledger.counted_devices else 0
        if size_bytes != record.size_bytes:
            ledger.resize(record, storage, size_bytes)
        buffer = Buffer(size_bytes)
        buffer.record = record
        buffer.op = entry
        buffer.origin = facts.name
        buffer.output_index = index
        buffer.last_used = ledger.clock
        buffer.is_pinned = record.is_resizable or (tensor.is_leaf and tensor.requires_grad)
        record.current = buffer
        if entry is not None:
            entry.outputs.append(weakref.ref(buffer))
        if old is not None and old.num_saved:
            # Whether this write counts is decided at unpack by the version: until then the handles follow the storage
            # to its new content.
            old.successor = buffer
            buffer.num_saved = old.num_saved
            buffer.save_order = old.save_order
            ledger.hold(buffer, tensor)
            if not facts.is_collective:  # its caller has not waited for it yet
                self.session.saved.on_resaved(buffer)


def execute(func: Any, facts: OpFacts, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
    """Run an op for real."""
    if facts.casts_inside and _torch.is_autocast_outside(args[0].device.type):
        with _torch.autocast_inside(args[0].device.type):
            return func._op(*args, **(kwargs or {}))
    return func._op(*args, **kwargs) if kwargs else func._op(*args)


# [Note: ops on lists of tensors]
# The in-place `_foreach` ops count no version of their own: on CPU the ops that they run for each tensor do, and below
# a dispatch mode these no longer reach the kernel that counts. Without a bump autograd would not notice that a saved
# parameter has been stepped.


def _versions(tensors: list[torch.Tensor]) -> list[tuple[torch.Tensor, int]]:
    return [(tensor, tensor._version) for tensor in tensors if not tensor.is_inference()]


def _bump_missing(versions: list[tuple[torch.Tensor, int]]) -> None:
    """Count a write for tensors whose version an op should have counted, and did not."""
    for tensor in [tensor for tensor, before in versions if tensor._version == before]:
        torch.autograd.graph.increment_version(tensor)


def _covers_storage(tensor: torch.Tensor) -> bool:
    return tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()
