"""How long copies take: the link to the host, which both directions share, and the disk, which has one queue.

[Note: both ways]
While both directions of the host link are busy each goes at a share `f` of its rate (`Machine.both_ways_factor`). A
copy's end is settled when it is queued, so the one that comes later pays for both: while the other direction is busy
with what was queued before, without a pause, it goes at `2 f - 1` of its rate. Together they carry what two at `f` do;
at `f` = 0.5 and less they take turns.
"""

from typing import Any, Protocol

from torchdelta.machine.model import Machine

__all__ = ["Disk", "HostLink", "Queue", "end_of_copy", "share_beside_another"]


def share_beside_another(machine: Machine) -> float:
    """Return at which share of its rate a copy goes beside an older one the other way. See [Note: both ways]."""
    return max(2 * machine.both_ways_factor - 1, 0.0)


def end_of_copy(start: Any, work_s: Any, busy_from: Any, busy_until: Any, share: Any) -> Any:
    """Return when a copy that takes `work_s` alone ends; the other direction is busy in between. [Note: both ways]."""
    alone_s = min(max(busy_from - start, 0.0), work_s)
    both_s = max(busy_until - max(start, busy_from), 0.0)
    left_s = work_s - alone_s
    if left_s <= both_s * share:
        return start + alone_s + (left_s / share if left_s else 0.0)
    return start + alone_s + both_s + (left_s - both_s * share)


class Queue(Protocol):
    """Where copies to and from one tier wait for one another. Mutable."""

    def carry(self, until_s: float) -> None:
        """Begin the step with copies out of the step before that take until then."""
        ...

    def send(self, size_bytes: int, ready_s: float) -> tuple[float, float]:
        """Queue a copy out that may start at a time; return when it starts and ends."""
        ...

    def bring(self, size_bytes: int, ready_s: float) -> tuple[float, float]:
        """Queue a copy in that may start at a time; return when it starts and ends."""
        ...


class HostLink:
    """The link to the host: a queue each way. Mutable."""

    def __init__(self, machine: Machine) -> None:
        self._machine, self._share = machine, share_beside_another(machine)
        # Until when, and since when, each direction is busy without a pause.
        self._out_free = self._out_from = self._in_free = self._in_from = 0.0

    def carry(self, until_s: float) -> None:
        """Begin the step with copies out of the step before that take until then."""
        self._out_free = max(self._out_free, until_s)

    def send(self, size_bytes: int, ready_s: float) -> tuple[float, float]:
        """Queue a copy out that may start at a time; return when it starts and ends."""
        start_s = max(self._out_free, ready_s)
        end_s = start_s + self._machine.link_latency_s + size_bytes / self._machine.host_out_bytes_per_s
        if self._share < 1.0:
            end_s = end_of_copy(start_s, end_s - start_s, self._in_from, self._in_free, self._share)
            self._out_from = self._out_from if start_s == self._out_free else start_s
        self._out_free = end_s
        return start_s, end_s

    def bring(self, size_bytes: int, ready_s: float) -> tuple[float, float]:
        """Queue a copy in that may start at a time; return when it starts and ends."""
        start_s = max(self._in_free, ready_s)
        end_s = start_s + self._machine.link_latency_s + size_bytes / self._machine.host_in_bytes_per_s
        if self._share < 1.0:
            end_s = end_of_copy(start_s, end_s - start_s, self._out_from, self._out_free, self._share)
            self._in_from = self._in_from if start_s == self._in_free else start_s
        self._in_free = end_s
        return start_s, end_s


class Disk:
    """The disk: one queue for both ways. Mutable."""

    def __init__(self, machine: Machine) -> None:
        self._latency_s = machine.disk_latency_s
        # A machine without a disk: the plan is not valid there, and its time means nothing.
        self._write_bytes_per_s = machine.disk_write_bytes_per_s or 1.0
        self._read_bytes_per_s = machine.disk_read_bytes_per_s or 1.0
        self._free = 0.0

    def carry(self, until_s: float) -> None:
        """Begin the step with copies out of the step before that take until then."""
        self._free = max(self._free, until_s)

    def send(self, size_bytes: int, ready_s: float) -> tuple[float, float]:
        """Queue a write that may start at a time; return when it starts and ends."""
        return self._add(size_bytes / self._write_bytes_per_s, ready_s)

    def bring(self, size_bytes: int, ready_s: float) -> tuple[float, float]:
        """Queue a read that may start at a time; return when it starts and ends."""
        return self._add(size_bytes / self._read_bytes_per_s, ready_s)

    def _add(self, work_s: float, ready_s: float) -> tuple[float, float]:
        start_s = max(self._free, ready_s)
        self._free = start_s + self._latency_s + work_s
        return start_s, self._free
