"""Event logs: what an allocator or an interpreter wrote down, one JSON object a line.

    {"op": "alloc", "id": 7, "size_bytes": 4096, "time_s": 0.0125}

`op` is "alloc", "free", "read" or "write"; `id` names a block (an int or a text) from its allocation to its release and
may then name another one; `size_bytes` is the block's size, needed for an allocation and for the first event of a block
that was there before the log began; `time_s` is a clock of any origin that never goes back. Other fields are ignored.
The file may be gzip-compressed.

[Note: an iteration as a trace]
The iteration in the middle of those found (iteration.py) becomes the step, so that what crosses its ends is seen on
both sides. It begins at the allocation before which the least memory is in use (the paper takes the next one; the
least is our choice: it is where one step ends and another begins). Every event but a release is an op, and takes the
time until the next event. A write reads the old content as well, since it may change a part of it, but for a block's
first. A log knows of no phases: all up to the moment of the highest load is taken for the forward, the rest for the
backward, and what is born before and read after it for saved (AutoSwap's own view; the rule is ours). Nothing is
recomputable. `torchdelta.` names say what the ops are: pseudo-ops.

[Note: layers that look like steps]
In a log of one or two steps the longest repetition are the layers of a step. It is refused: an iteration reaches
`MIN_PEAK_SHARE` of the log's highest load, or else covers `MIN_COVERAGE` of its events and ends with the load it began
with, but for `MAX_GROWTH` of what it adds in between. (In a log with evaluations in between a stretch of steps may be
short, but it reaches the peak; layers of a forward leave behind what they save.) The rule and its numbers are ours.
"""

import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Final, Literal

import msgspec

from torchdelta.errors import TraceFileError
from torchdelta.trace.frame import one_line
from torchdelta.trace.imports.iteration import MIN_REPEATS, Iteration, find_iteration, signatures
from torchdelta.trace.imports.plain_or_gzip import opened
from torchdelta.trace.model import BEFORE_STEP, Buffer, Header, Op, Phase, SavedTensor, Trace
from torchdelta.trace.validate import validate
from torchdelta.units import format_bytes

__all__ = ["Event", "read_event_log", "read_events", "trace_of_events", "whole_buffer"]

_MAX_LINE_BYTES: Final = 2**20
_MAX_BLOCK_BYTES: Final = 2**63 - 1
_SHOWN_BITS: Final = 64

# See [Note: layers that look like steps].
MIN_PEAK_SHARE: Final = 0.95
MIN_COVERAGE: Final = 0.5
MAX_GROWTH: Final = 0.25


class Event(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One event of a log. See the module's text.

    Attributes:
        op: What happened.
        id: The block.
        size_bytes: Its size; 0 if the log does not repeat it.
        time_s: When.
    """

    op: Literal["alloc", "free", "read", "write"]
    id: int | str
    size_bytes: int = 0
    time_s: float = 0.0


@dataclass(slots=True)
class _Block:
    """A block while the step is built: its versions are the buffers."""

    storage_id: int
    size_bytes: int
    version: int
    is_written: bool


def read_event_log(path: str | os.PathLike[str], *, whole: bool = False) -> Trace:
    """Return the step of an event log: see [Note: an iteration as a trace].

    Args:
        path: The file.
        whole: Take the whole log as one step, and do not look for an iteration.

    Raises:
        TraceFileError: The file cannot be read, a line of it is no event or makes no sense after those before it, or
            there is no iteration in it.
    """
    return trace_of_events(read_events(path), source=str(path), whole=whole)


def read_events(path: str | os.PathLike[str]) -> list[Event]:
    """Read and check all events of a log.

    Raises:
        TraceFileError: With the line and what is wrong with it.
    """
    decode = msgspec.json.Decoder(Event).decode
    events: list[Event] = []
    sizes_bytes: dict[int | str, int] = {}
    freed: set[int | str] = set()
    number = 0
    with opened(path, "event log") as stream:
        while line := stream.readline(_MAX_LINE_BYTES + 1):
            number += 1
            if len(line) > _MAX_LINE_BYTES:
                raise TraceFileError(f"{path}: line {number}: longer than {_MAX_LINE_BYTES} bytes")
            if not line.strip():
                continue
            try:
                event = decode(line)
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                raise TraceFileError(f"{path}: line {number}: no event: {' '.join(str(error).split())}") from error
            wrong = _fault(event, events[-1] if events else None, sizes_bytes, freed)
            if wrong is not None:
                raise TraceFileError(f"{path}: line {number}: {wrong}")
            events.append(event)
    return events


def _fault(event: Event, before: Event | None, sizes_bytes: dict[int | str, int], freed: set[int | str]) -> str | None:
    """Return what is wrong with an event after those before it, and note it."""
    known = sizes_bytes.get(event.id)
    if event.size_bytes < 0:
        return f"negative size_bytes {event.size_bytes}"
    if not math.isfinite(event.time_s):
        return f"time_s {event.time_s} is no number of seconds"
    if before is not None and event.time_s < before.time_s:
        return f"time_s {event.time_s} is before {before.time_s}, the time of the event before"
    if event.op == "alloc":
        if known is not None:
            return f"block {event.id!r} is allocated, but it was not freed since its last allocation"
        if not event.size_bytes:
            return f"block {event.id!r} is allocated without size_bytes"
        sizes_bytes[event.id] = event.size_bytes
        freed.discard(event.id)
        return None
    if event.id in freed:
        return f"{event.op} of block {event.id!r}, which is freed"
    if known is None and not event.size_bytes:
        return f"{event.op} of block {event.id!r}, which was never allocated: its first event needs size_bytes"
    if known is not None and event.size_bytes not in {0, known}:
        return f"block {event.id!r} has {known} bytes and not {event.size_bytes}"
    if event.op == "free":
        sizes_bytes.pop(event.id, None)
        freed.add(event.id)
    else:
        sizes_bytes[event.id] = known or event.size_bytes
    return None


def trace_of_events(
    events: Sequence[Event], *, source: str, device: str = "cuda", whole: bool = False, num_before: int = 0
) -> Trace:
    """Return the step of a sequence of events that was checked, as `read_event_log` does.

    Args:
        events: All of them.
        source: Where they are from, for messages and the trace's comment.
        device: Type of the device whose memory it is.
        whole: Take all of it as one step.
        num_before: The first events that only say what was there before the log.

    Raises:
        TraceFileError: There is no iteration in it (also where what repeats are the layers of a step), or no op, or a
            size is negative or beyond what can be added up.
    """
    if not any(event.op != "free" for event in events):
        raise TraceFileError(f"{source}: the log has no allocation, read or write: there is no step in it")
    largest_bytes = max(event.size_bytes for event in events)
    if largest_bytes > _MAX_BLOCK_BYTES:
        raise TraceFileError(f"{source}: a block of {_number_text(largest_bytes)} bytes is larger than any memory")
    first, end, found = num_before, len(events), None
    if not whole:
        found = find_iteration(signatures([(event.op, event.id, event.size_bytes) for event in events]))
        if found is None:
            raise TraceFileError(
                f"{source}: no iteration in {len(events)} events: nothing repeats {MIN_REPEATS} times in a "
                f"row; log more steps, or take the whole log as one step"
            )
        loads = _loads(events)
        first = _first_event(events, found, loads)
        end = first + found.length
        wrong = _no_step(found, loads[first : end + 1], max(loads[num_before:]), len(events) - num_before)
        if all(event.op == "free" for event in events[first:end]):
            wrong = f"no iteration found: what repeats, {found.length} events, is releases alone"
        if wrong is not None:
            raise TraceFileError(f"{source}: {wrong}; log more steps, or take the whole log as one")
    end_s = events[end].time_s if end < len(events) else events[-1].time_s
    comment = "whole log"
    if found is not None:
        comment = f"iteration of {end - first} events, found {found.num_events // found.length} times"
    step = _Builder(events, first, end, end_s).trace(comment=f"{one_line(source)}: {comment}", device=device)
    try:
        validate(step)
    except TraceFileError as error:
        raise TraceFileError(f"{source}: {error}") from error
    return step


def _number_text(number: int) -> str:
    """Return a number as a text, of those that are endless the length."""
    return str(number) if number.bit_length() <= _SHOWN_BITS else f"2**{number.bit_length() - 1} or more"


def _no_step(found: Iteration, loads: Sequence[int], log_peak_bytes: int, num_events: int) -> str | None:
    """Return why a repetition is no step of a log, None if it is one: see [Note: layers that look like steps].

    `loads` are the bytes in use before each event of its iteration, and after the last one.
    """
    peak_bytes = max(loads)
    if peak_bytes >= MIN_PEAK_SHARE * log_peak_bytes:
        return None
    coverage, growth_bytes = found.num_events / num_events, loads[-1] - loads[0]
    is_level = abs(growth_bytes) <= MAX_GROWTH * (peak_bytes - min(loads))
    if coverage >= MIN_COVERAGE and is_level:
        return None
    growth = "" if is_level else f", each time with {format_bytes(abs(growth_bytes))} {_than_before(growth_bytes)}"
    return (
        f"no iteration found: what repeats, {found.length} events {found.num_events // found.length} times, is "
        f"{coverage:.0%} of the log and reaches {format_bytes(peak_bytes)} of its peak of "
        f"{format_bytes(log_peak_bytes)}{growth}"
    )


def _than_before(growth_bytes: int) -> str:
    return "more than before" if growth_bytes > 0 else "less than before"


def _loads(events: Sequence[Event]) -> list[int]:
    """Return the bytes in use before each event and after the last one, blocks from before the log included."""
    changes = [0]
    sizes_bytes: dict[int | str, int] = {}
    for event in events:
        change = 0
        if event.op == "free":
            if event.id not in sizes_bytes:
                changes[0] += event.size_bytes
            change = -sizes_bytes.pop(event.id, event.size_bytes)
        elif event.id not in sizes_bytes:
            sizes_bytes[event.id] = event.size_bytes
            if event.op == "alloc":
                change = event.size_bytes
            else:
                changes[0] += event.size_bytes
        changes.append(change)
    return list(accumulate(changes))


def _first_event(events: Sequence[Event], found: Iteration, loads: Sequence[int]) -> int:
    """Return where the step begins: an allocation with the least memory before it, in the middle of the stretch."""
    num_repeats = found.num_events // found.length
    # With three repeats or more there is a whole one after the middle one, wherever in it the step begins.
    middle = found.start + found.length * ((num_repeats - 1) // 2)
    places = range(middle, middle + found.length)
    allocations = [place for place in places if events[place].op == "alloc"] or list(places)
    return min(allocations, key=lambda place: (loads[place], place))


class _Builder:
    """Turns the events of one step into records."""

    def __init__(self, events: Sequence[Event], first: int, end: int, end_s: float) -> None:
        self._events = events[first:end]
        self._end_s = end_s
        self._blocks: dict[int | str, _Block] = {}
        self._births: list[tuple[int, int, int]] = []  # storage, bytes, birth op, by buffer
        self._deaths: dict[int, int] = {}
        self._last_reads: dict[int, int] = {}
        self._ops: list[Op] = []
        self._num_storages = 0
        for id_, size_bytes in _alive_before(events[:first], self._events).items():
            self._blocks[id_] = self._new_block(size_bytes, BEFORE_STEP, is_written=True)

    def trace(self, *, comment: str, device: str) -> Trace:
        times_s = [event.time_s for event in self._events[1:]] + [self._end_s]
        for event, next_s in zip(self._events, times_s, strict=True):
            self._add(event, next_s - event.time_s)
        num_ops = len(self._ops)
        peak_op = self._peak_op()
        saved_ids = {
            id_ for id_, last in self._last_reads.items() if BEFORE_STEP < self._births[id_][2] <= peak_op < last
        }
        phases: list[Phase] = ["forward" if index <= peak_op else "backward" for index in range(num_ops)]
        return Trace(
            header=Header(
                torch_version="",
                device=device,
                created_by="torchdelta event log",
                phases=tuple(dict.fromkeys(phases)),
                comment=comment,
            ),
            buffers=tuple(
                Buffer(
                    id=id_,
                    storage_id=storage_id,
                    size_bytes=size_bytes,
                    kind="constant"
                    if birth_op == BEFORE_STEP
                    else "activation"
                    if birth_op <= peak_op
                    else "temporary",
                    birth_op=birth_op,
                    death_op=self._deaths.get(id_, num_ops),
                    saved=id_ in saved_ids,
                )
                for id_, (storage_id, size_bytes, birth_op) in enumerate(self._births)
            ),
            ops=tuple(msgspec.structs.replace(op, phase=phase) for op, phase in zip(self._ops, phases, strict=True)),
            saved_tensors=tuple(
                whole_buffer(id_, self._births[id_][1], self._births[id_][2]) for id_ in sorted(saved_ids)
            ),
        )

    def _new_block(self, size_bytes: int, birth_op: int, *, is_written: bool) -> _Block:
        block = _Block(self._num_storages, size_bytes, len(self._births), is_written)
        self._num_storages += 1
        self._births.append((block.storage_id, size_bytes, birth_op))
        return block

    def _add(self, event: Event, time_s: float) -> None:
        index = len(self._ops)
        reads: tuple[int, ...] = ()
        writes: tuple[int, ...] = ()
        if event.op == "alloc":
            block = self._blocks[event.id] = self._new_block(event.size_bytes, index, is_written=False)
            writes = (block.version,)
        elif event.op == "free":
            block = self._blocks.pop(event.id)
            self._deaths[block.version] = index
            if self._ops:  # the time until the next event belongs to the op before
                last = self._ops[-1]
                self._ops[-1] = msgspec.structs.replace(last, time_s=last.time_s + time_s)
            return
        else:
            block = self._blocks[event.id]
            if event.op == "read" or block.is_written:
                reads = (block.version,)
                self._last_reads[block.version] = index
            if event.op == "write":
                self._deaths[block.version] = index
                block.version, block.is_written = len(self._births), True
                self._births.append((block.storage_id, block.size_bytes, index))
                writes = (block.version,)
        name = f"torchdelta.{event.op}"
        self._ops.append(Op(index=index, name=name, phase="forward", reads=reads, writes=writes, time_s=time_s))

    def _peak_op(self) -> int:
        changes = [0] * (len(self._ops) + 1)
        for id_, (_, size_bytes, birth_op) in enumerate(self._births):
            changes[max(birth_op, 0)] += size_bytes
            changes[self._deaths.get(id_, len(self._ops))] -= size_bytes
        load = highest = peak_op = 0
        for index, change in enumerate(changes[:-1]):
            load += change
            if load > highest:
                highest, peak_op = load, index
        return peak_op


def whole_buffer(buffer_id: int, size_bytes: int, birth_op: int) -> SavedTensor:
    """Return a buffer as a saved tensor, of which nobody has said what it looks at."""
    return SavedTensor(op=birth_op + 1, buffer_id=buffer_id, shape=(size_bytes,), stride=(1,), offset=0, dtype="uint8")


def _alive_before(before: Iterable[Event], inside: Iterable[Event]) -> dict[int | str, int]:
    """Return the blocks that exist when the step begins, with their bytes, in the order in which they turned up."""
    alive: dict[int | str, int] = {}
    for event in before:
        if event.op == "free":
            alive.pop(event.id, None)
        elif event.id not in alive:
            alive[event.id] = event.size_bytes
    # And those that were there before the log, and that are touched for the first time inside.
    born: set[int | str] = set()
    for event in inside:
        if event.op == "alloc":
            born.add(event.id)
        elif event.id not in born and event.id not in alive:
            alive[event.id] = event.size_bytes
            born.add(event.id)
    return alive
