"""Torch's CUDA memory snapshots: `torch.cuda.memory._record_memory_history()` and `_dump_snapshot(path)`.

A snapshot is a pickle of `{"segments": [...], "device_traces": [[entry, ...], ...]}`: what the caching allocator holds
at its end, and for each device what it did before, oldest first. Of the entries `alloc` and `free_completed` say which
blocks lived when (`free_requested` comes earlier where another stream still uses the block; the block counts until it
is given back). Blocks that the segments hold at the end, and that no entry allocated, were there before.

It says nothing about reads and writes. The step that comes out has the right lives and load, which is what placement
and "why is the memory full" need; a plan that swaps needs to know uses: trace the step, or write an event log.
"""

import os
from collections.abc import Iterator
from typing import Any, Final

from torchdelta.errors import TraceFileError
from torchdelta.trace.imports.events import Event, trace_of_events
from torchdelta.trace.imports.plain_or_gzip import read_whole
from torchdelta.trace.imports.unpickle import load_plain
from torchdelta.trace.model import Trace

__all__ = ["read_snapshot"]

MAX_FILE_BYTES: Final = 2**32
"""A larger file is refused: the recorder's own ring buffer holds far less."""

_FREED: Final = frozenset({"free_completed", "free"})
_LIVING: Final = frozenset({"active_allocated", "active_pending_free", "active_awaiting_free"})


def read_snapshot(path: str | os.PathLike[str], *, device: int | None = None, whole: bool = False) -> Trace:
    """Return the step that a memory snapshot shows.

    Args:
        path: The pickle, gzip-compressed or not.
        device: Index of the device; None takes the one with most events.
        whole: Take all of it as one step, and do not look for an iteration.

    Raises:
        TraceFileError: The file cannot be read, is no snapshot or no harmless one, has no events of the device, or
            there is no iteration in it.
    """
    data = read_whole(path, "snapshot", max_bytes=MAX_FILE_BYTES)
    try:
        snapshot = load_plain(data)
    except TraceFileError as error:
        raise TraceFileError(f"{path}: {error}") from error
    traces = snapshot.get("device_traces") if isinstance(snapshot, dict) else None
    if not isinstance(traces, list) or not all(isinstance(one, list) for one in traces):
        raise TraceFileError(f"{path}: not a memory snapshot: a dict with device_traces is wanted")
    if device is None:
        device = max(range(len(traces)), key=lambda index: len(traces[index]), default=0)
    if not 0 <= device < len(traces) or not traces[device]:
        others = [index for index, one in enumerate(traces) if one]
        raise TraceFileError(
            f"{path}: no events of device {device}: there are some of {others or 'none'}; call "
            f"torch.cuda.memory._record_memory_history() before the steps"
        )
    try:
        before = list(_there_before(snapshot, traces[device], device))
        recorded = list(_events(traces[device], {event.id for event in before}))
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        text = " ".join(str(error).split())[:200]
        raise TraceFileError(f"{path}: a damaged memory snapshot: {type(error).__name__}: {text}") from error
    return trace_of_events([*before, *recorded], source=str(path), whole=whole, num_before=len(before))


def _events(entries: list[Any], before: set[int | str]) -> Iterator[Event]:
    """Yield allocations and releases, with a time that never goes back; `before` are the blocks from before them."""
    alive = set(before)
    time_s = 0.0
    for entry in entries:
        time_s = max(time_s, float(entry.get("time_us", 0)) * 1e-6)
        address, action = _simple(entry.get("addr")), _simple(entry["action"])
        size_bytes = int(entry.get("size", 0))
        if action == "alloc":
            if address in alive:  # its release was not recorded
                yield Event(op="free", id=address, time_s=time_s)
            alive.add(address)
            yield Event(op="alloc", id=address, size_bytes=size_bytes, time_s=time_s)
        elif action in _FREED:
            if address not in alive:
                raise ValueError(f"block {address!r} is freed, but it was not allocated")
            alive.remove(address)
            yield Event(op="free", id=address, size_bytes=size_bytes, time_s=time_s)


def _there_before(snapshot: Any, entries: list[Any], device: int) -> Iterator[Event]:
    """Yield an allocation for each block that the entries free, or the segments hold, without one.

    They are at time 0, before all entries: no step contains them.
    """
    born: set[int] = set()
    before: dict[int, int] = {}
    for entry in entries:
        address, action = _simple(entry.get("addr")), _simple(entry["action"])
        if action == "alloc":
            born.add(address)
        elif action in _FREED and address not in born and address not in before:
            before[address] = int(entry.get("size", 0))
    for segment in snapshot.get("segments") or ():
        if segment.get("device", device) != device:
            continue
        address = segment["address"]
        for block in segment["blocks"]:
            address = _simple(block.get("address", address))
            if _simple(block["state"]) in _LIVING and address not in born and address not in before:
                before[address] = int(block["size"])
            address += block["size"]
    for address, size_bytes in before.items():
        if size_bytes:
            yield Event(op="alloc", id=address, size_bytes=size_bytes)


def _simple(value: Any) -> Any:
    """Return a number or a text; to hash a tuple of a hostile file may take forever."""
    if not isinstance(value, int | float | str | None):
        raise TypeError(f"a {type(value).__name__} where a number or a text is wanted")
    return value
