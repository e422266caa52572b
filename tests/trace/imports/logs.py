"""Event logs of known steps: a trace is played several times, as an allocator would log it that reuses addresses."""

import heapq
from collections.abc import Iterable

from torchdelta.trace.imports.events import Event
from torchdelta.trace.model import BEFORE_STEP, Trace


def played(trace: Trace, num_steps: int, *, noise: dict[int, Event] | None = None) -> list[Event]:
    """The events of some steps; blocks that outlive the step stay, and are freed where the next one's takes over.

    `noise` puts an event of its own before the step of that number.
    """
    events: list[Event] = []
    alive: dict[int, int] = {}  # storage -> address
    free: list[int] = list(range(10_000))
    times_s = iter(range(10**9))

    def note(op: str, address: int, size_bytes: int = 0) -> None:
        events.append(Event(op=op, id=address, size_bytes=size_bytes, time_s=next(times_s) * 1e-3))  # type: ignore[arg-type]

    def release(storages: Iterable[int]) -> None:
        for storage in storages:
            address = alive.pop(storage)
            note("free", address)
            heapq.heappush(free, address)

    by_death: dict[int, list[int]] = {}
    versions: dict[int, int] = {}
    for buffer in trace.buffers:
        versions[buffer.storage_id] = max(versions.get(buffer.storage_id, 0), buffer.death_op)
    for storage, death_op in versions.items():
        by_death.setdefault(death_op, []).append(storage)
    lasting = {b.storage_id for b in trace.buffers if b.birth_op == BEFORE_STEP}
    for storage in sorted(lasting):
        alive[storage] = heapq.heappop(free)
        note("alloc", alive[storage], next(b.size_bytes for b in trace.buffers if b.storage_id == storage))
    for step in range(num_steps):
        if noise and step in noise:
            events.append(noise[step])
        for op in trace.ops:
            release(s for s in by_death.get(op.index, []) if s in alive and s not in lasting)
            for id_ in op.reads:
                note("read", alive[trace.buffers[id_].storage_id])
            for id_ in op.writes:
                buffer = trace.buffers[id_]
                if buffer.storage_id not in alive:
                    alive[buffer.storage_id] = heapq.heappop(free)
                    note("alloc", alive[buffer.storage_id], buffer.size_bytes)
                note("write", alive[buffer.storage_id])
        release([storage for storage in alive if storage not in lasting])
    return events
