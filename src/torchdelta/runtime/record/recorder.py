"""The recorder: a dispatch mode that makes room for every op, runs it, and records it.

In forward it records ops for replay. In backward it only counts bytes (nothing there is replayed), and it is on only
inside nodes: see backward.py. Read `Recorder._run` from top to bottom for what happens to an op.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Final

import torch

from torchdelta._torch.compiled import is_in_compiled_region
from torchdelta._torch.engine import graph_task_id
from torchdelta._torch.modes import DispatchMode, num_modes
from torchdelta._torch.ops import HigherOrderOperator, execute
from torchdelta._torch.storages import storage_behind
from torchdelta.aten.collectives import may_be_under_way
from torchdelta.aten.facts import Kind, OpFacts, facts_of, written_tensors
from torchdelta.runtime.interrupts import enter, leave
from torchdelta.runtime.memory.retry import may_retry, prepare_retry, run_again
from torchdelta.runtime.record.capture import Capturer, is_differentiated, statistics_of
from torchdelta.runtime.record.composites import run_parts, runs_as_parts
from torchdelta.runtime.record.higher_order import run_higher_order
from torchdelta.runtime.record.late import LateParameters
from torchdelta.runtime.record.needs import Predictor
from torchdelta.runtime.record.subclasses import Way
from torchdelta.runtime.record.versions import bump_missing, versions_of
from torchdelta.runtime.state.buffer import Stays
from torchdelta.runtime.state.kinds import addressed, runs_own_ops
from torchdelta.runtime.state.tape import RANDOM_STATE_BYTES, generator_of

if TYPE_CHECKING:
    from torchdelta.runtime.follow.learning import Learning
    from torchdelta.runtime.memory.restore import Restorer
    from torchdelta.runtime.record.other_streams import OtherStreams
    from torchdelta.runtime.record.saved import SavedTensors
    from torchdelta.runtime.record.subclasses import Subclasses
    from torchdelta.runtime.state.buffer import Buffer, OpEntry
    from torchdelta.runtime.state.need import Need

__all__ = ["Recorder", "execute"]

VIEW = Kind.VIEW  # enum attributes are slow to look up, and most ops are views
_Overwritten = list[tuple[torch.Tensor, "Buffer | None"]]
# After so many ops without a saved tensor the tape is cut: it would grow without end in a loop that never trains.
IDLE_OPS: Final = 1024


class Recorder(DispatchMode):
    """Sees the ops of one thread, and on an accelerator those of the engine's threads in backward.

    Args:
        restorer: Brings buffers back; knows the room, the ledger and the device.
        saved: The saved tensors, whose handles follow in-place writes.
        subclasses: Decides what happens to ops on tensor subclasses.
        other_streams: Runs ops on other streams; None where the device has one queue.
    """

    def __init__(
        self,
        restorer: Restorer,
        saved: SavedTensors,
        subclasses: Subclasses,
        other_streams: OtherStreams | None = None,
    ) -> None:
        super().__init__()
        self.restorer = restorer
        self.room = restorer.room
        self.ledger = restorer.ledger
        self.device = restorer.device
        self.counters = restorer.room.counters
        self.timer = self.device.timer
        self.observing = self.ledger.observing
        self.saved = saved
        self.subclasses = subclasses
        self.other_streams = other_streams
        self.needs = Predictor(self.device.device if self.device.sees_other_devices else None)
        self._capturer = Capturer(self.ledger, self.device)
        self._late = LateParameters(self.room)
        self.execute = execute  # a survey replaces it
        self.only_counts = False  # inside transforms, see transforms.py
        self.persistents = restorer.room.persistents
        self.learning: Learning | None = None  # while the outline of a step is learned
        # While plans are followed: a hash of the sizes of what ops made from tensors that require gradients, since the
        # latest backward that freed its graph. What a backward takes depends on sizes that no saved tensor shows.
        self.forward_hash = 0

    supports_higher_order_operators = True  # see higher_order.py

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run one op. The signature is torch's."""
        if self.is_over:
            return func(*args, **(kwargs or {}))
        if self.other_streams is None:
            outer = enter()
            try:
                return self._see(func, types, args, kwargs)
            finally:
                leave(outer)
        if self.device.is_off():
            return func(*args, **(kwargs or {}))
        outer = enter()
        try:
            if graph_task_id() == -1:
                return self.other_streams.run(self._see, func, types, args, kwargs)
            with self.device.locked():
                return self.other_streams.run(self._see, func, types, args, kwargs)
        finally:
            leave(outer)

    def _see(self, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
        """Pass through ops that neither allocate nor write and ops that belong to a subclass; `_run` the others."""
        facts: OpFacts
        try:
            facts = func._torchdelta_facts
        except AttributeError:
            if isinstance(func, HigherOrderOperator):
                out = run_higher_order(self, func, args, kwargs)
                if self.only_counts or (graph_task_id() != -1 and not _records_gradients()):
                    self._know(out)
                else:
                    self._note_made(out, None, str(func))
                return out
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
        if kind is VIEW:
            if facts.is_composite and runs_as_parts(args[0]):
                return run_parts(self, self.learning, func, args, kwargs)
            out = self.execute(func, facts, args, kwargs)
            if self.only_counts or (graph_task_id() != -1 and not _records_gradients()):
                self._know(out)
            return out
        if kind is Kind.NO_OUTPUT:
            return self.execute(func, facts, args, kwargs)
        return self._run(func, facts, args, kwargs)

    def _run(self, func: Any, facts: OpFacts, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
        """Make room for an op, run it, and record what it made and wrote."""
        ledger = self.ledger
        if ledger.unwatched:
            ledger.recheck_unwatched()
        self.counters.num_ops += 1
        ledger.clock += 1
        # Record ops that autograd differentiates, and others while saved tensors exist whose replay may read them.
        # Only count in a backward without create_graph.
        grad_enabled = torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
        counts_only = self.only_counts or (not grad_enabled and graph_task_id() != -1)
        records = (
            not counts_only
            and (grad_enabled or (ledger.num_handles > 0 and not torch.is_inference_mode_enabled()))
            and not is_in_compiled_region()
        )
        if records and ledger.num_handles == 0 and ledger.clock - ledger.cut_at > IDLE_OPS:
            self._cut_idle()
        writes = facts.kind is not Kind.COMPUTE and not facts.keeps_statistics

        # 1. Make room for its outputs and its workspace.
        need = self.needs.need(facts, func, args, kwargs)
        state_bytes = RANDOM_STATE_BYTES if records and facts.is_random else 0
        if need.output_bytes or need.workspace_bytes or state_bytes or not writes:
            self.room.make(need.output_bytes + need.workspace_bytes + state_bytes, facts.name)
        if need.possible_bytes:
            self.room.try_to_make(need.total_bytes + need.possible_bytes)

        # 2. Capture it for the tape, and end the contents that it overwrites.
        if writes:
            targets = written_tensors(facts, args, kwargs) if facts.writes_content else []
        else:
            targets = statistics_of(facts, args) if facts.keeps_statistics and not self.only_counts else []
        num_cuts = ledger.num_cuts  # a garbage collection in this op may free the last saved tensor
        entry = self._capturer.capture(func, facts, args, kwargs, targets) if records else None
        if ledger.late_bytes != self._late.seen_bytes and graph_task_id() == -1:
            self._late.count_all(need.total_bytes + state_bytes, facts.name)
        overwritten = self._end_contents(targets, need, facts) if targets else []

        if entry is not None and facts.is_random:
            generator = generator_of(facts, args, kwargs)
            entry.random_state = (generator, generator.get_state()) if generator is not None else None
            if entry.random_state is not None and ledger.usage.counter is None and ledger.device.type == "cpu":
                ledger.know(entry.random_state[1].untyped_storage())  # nobody else counts it

        # 3. Run it, with time and memory measured.
        before_bytes = ledger.usage.live_bytes
        self.device.mark(need, ledger.usage)
        versions = versions_of(targets) if facts.bumps_inside and not ledger.surveys else []
        mark = self.timer.start(need)
        try:
            out = self.execute(func, facts, args, kwargs)
        except BaseException as error:
            run = partial(self._run_anew, need, func, facts, args, kwargs)
            may = may_retry(error, facts, args, entry, self.room)
            if not (may and prepare_retry(error, facts, self.room, run)):
                self._note_failed(overwritten, facts)
                raise
            out = run_again(error, facts, self.room, run)
        time_s = self.timer.stop(mark, entry)
        self.counters.op_time_s += time_s
        if versions and not self.subclasses.is_inside:
            bump_missing(versions)

        # 4. Note what it wrote and made, and learn its need.
        if counts_only and not writes:
            self._know(out)
            need.learn_growth(ledger.usage.live_bytes - before_bytes)
            for tensor, old in overwritten:
                self._write(tensor, old, None, facts, 0)
        elif writes and not facts.writes_content:
            ledger.exchanged(out, facts.name, counts_only=counts_only)
        elif writes:
            need.learn_growth(
                self._note_written(overwritten, out, func, facts, args, kwargs, entry, counts_only=counts_only)
            )
        else:
            is_one, name = isinstance(out, torch.Tensor), facts.name
            need.output_bytes = ledger.made(out, entry, name, 0) if is_one else self._note_made(out, entry, name)
            for tensor, old in overwritten:
                self._write(tensor, old, None, facts, 0)
        grown_bytes = max(0, ledger.usage.live_bytes - before_bytes)
        size_bytes = grown_bytes if counts_only or writes else need.output_bytes
        workspace_bytes = self.device.measure(need, size_bytes, ledger.usage)
        if entry is not None:
            if ledger.num_cuts != num_cuts:
                ledger.disown(entry)
            entry.output_bytes = 0 if writes else size_bytes
            # Its replay sets the random state back, and holds the state of that moment meanwhile.
            entry.workspace_bytes = workspace_bytes + (RANDOM_STATE_BYTES if entry.random_state is not None else 0)
        if grad_enabled and not counts_only and self.saved.follower.is_on and is_differentiated(args):
            self.forward_hash = hash((self.forward_hash, need.output_bytes))
        if self.learning is not None:
            self.learning.on_op(entry, need.total_bytes, [old for _, old in overwritten if old is not None])
        observer = self.observing.observer
        if observer.wants_every_op:
            observer.on_op(
                facts,
                args,
                kwargs,
                out,
                time_s,
                written=targets,
                entry=entry,
                workspace_bytes=0 if writes else workspace_bytes,
                possible_bytes=need.possible_bytes,
                timing=need.timing,
            )
        return out

    def _run_anew(
        self, need: Need, func: Any, facts: OpFacts, args: tuple[Any, ...], kwargs: dict[str, Any] | None
    ) -> Any:
        self.device.mark(need, self.ledger.usage)  # evictions since the first mark are not part of the op
        return self.execute(func, facts, args, kwargs)

    def _run_subclass(self, func: Any, facts: OpFacts, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
        """Let a subclass run its op, and note writes to plain arguments: it may write them below the mode."""
        targets = written_tensors(facts, args, kwargs) if facts.writes_content else []
        plain = [tensor for tensor in targets if not runs_own_ops(tensor.__class__)]
        before = [(tensor, self.end_content(tensor)) for tensor in plain if self.ledger.find(tensor) is not None]
        try:
            out = self.subclasses.call(self, func, args, kwargs)
        except BaseException:
            self._note_failed(before, facts)
            raise
        for tensor, old in before:
            self._write(tensor, old, None, facts, 0)
        return out

    def _cut_idle(self) -> None:
        self.ledger.cut()
        self.room.forget()

    # -- contents that end

    def _end_contents(self, targets: list[torch.Tensor], need: Need, facts: OpFacts) -> _Overwritten:
        """Invalidate the contents of the storages that an op will write. Return (tensor, old content) for each."""
        num_copies = self.counters.num_copies_before_write
        overwritten: dict[int, tuple[torch.Tensor, Buffer | None]] = {}
        for address, tensor in addressed(targets):
            if address not in overwritten:
                try:
                    overwritten[address] = (tensor, self.end_content(tensor))
                except BaseException:
                    self._note_failed(list(overwritten.values()), facts)
                    raise
        if self.counters.num_copies_before_write > num_copies and need.total_bytes:
            try:
                self.room.make(need.total_bytes, facts.name)  # copies of old contents may have used the room
            except BaseException:
                self._note_failed(list(overwritten.values()), facts)
                raise
        return list(overwritten.values())

    def _note_failed(self, overwritten: _Overwritten, facts: OpFacts) -> None:
        """Give storages new contents: the op that was to overwrite them raised, and may have written a part of them."""
        for tensor, old in overwritten:
            record = self.ledger.find(tensor)
            if record is not None and record.current is None and old is not None:
                self._write(tensor, old, None, facts, 0)

    def end_content(self, tensor: torch.Tensor) -> Buffer | None:
        """End the content of a storage that is about to be written. Return it."""
        record = self.ledger.find(tensor)
        if record is None or record.current is None:
            return None
        return self.restorer.before_write(record, storage_behind(tensor))

    # -- contents that begin

    def _know(self, out: Any) -> None:
        """Count the outputs of an op in backward."""
        if isinstance(out, torch.Tensor):
            self.ledger.know_by_tensor(out)
        elif isinstance(out, tuple | list):
            for item in out:
                if isinstance(item, torch.Tensor):
                    self.ledger.know_by_tensor(item)

    def _note_made(self, out: Any, entry: OpEntry | None, name: str) -> int:
        """Make the buffers of an op's outputs. Return the bytes of their storages."""
        size_bytes = 0
        for index, item in enumerate(out if isinstance(out, tuple | list) else (out,)):
            if isinstance(item, torch.Tensor):
                size_bytes += self.ledger.made(item, entry, name, index)
        return size_bytes

    def _note_written(
        self,
        overwritten: _Overwritten,
        out: Any,
        func: Any,
        facts: OpFacts,
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None,
        entry: OpEntry | None,
        *,
        counts_only: bool,
    ) -> int:
        """Make the new buffers of storages that an op wrote. Return the bytes that it newly allocated."""
        ledger = self.ledger
        new_bytes = 0
        for index, (tensor, old) in enumerate(overwritten):
            record = ledger.find(tensor)
            if record is not None and record.reference is None and old is None:
                continue  # a gradient that only the engine holds so far: it has no buffer
            if record is None and counts_only:
                ledger.know_by_tensor(tensor)
                continue
            size_bytes = record.size_bytes if record is not None else 0
            buffer = self._write(tensor, old, entry, facts, index)
            if record is not None:
                new_bytes += max(0, record.size_bytes - size_bytes)  # an `out` that grew
            if facts.is_collective:
                self._make_collective_stay(buffer, func, args, kwargs)
        noted_bytes = ledger.usage.live_bytes
        if counts_only:
            self._know(out)
        else:
            self._note_made(out, None, facts.name)
        return new_bytes + ledger.usage.live_bytes - noted_bytes

    def _write(
        self, tensor: torch.Tensor, old: Buffer | None, entry: OpEntry | None, facts: OpFacts, index: int
    ) -> Buffer:
        buffer = self.ledger.written(tensor, old, entry, facts.name, index)
        if buffer.stays & Stays.LEAF:
            self.saved.steps.on_graph_over()
        if buffer.num_saved and not facts.is_collective:  # a collective may still be writing its output
            self.saved.on_resaved(buffer)
        return buffer

    def _make_collective_stay(
        self, buffer: Buffer, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None
    ) -> None:
        """Make buffers stay that a collective may still be writing, or whose storage FSDP will free."""
        if func.namespace == "fsdp":
            if buffer.record is not None:
                self.ledger.stay_resizable(buffer.record)
        elif may_be_under_way(func, args, kwargs):
            self.ledger.stay(buffer, Stays.IN_FLIGHT)


def _records_gradients() -> bool:
    return torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
