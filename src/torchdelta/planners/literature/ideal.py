"""What a choice does on paper: the load if tensors were away over their whole gaps, and the time that a link has left.

The planners of the literature decide on such quantities and not on a simulation. Both are kept as arrays over the ops.
"""

import numpy as np
from numpy.typing import NDArray

from torchdelta.machine.model import Machine
from torchdelta.simulate.gaps import Gap
from torchdelta.trace.model import Trace, load_curve

__all__ = ["IdealLoad", "LinkSlack", "in_s", "out_s", "start_times_s"]


def out_s(machine: Machine, size_bytes: int) -> float:
    """Return the seconds of a copy from the device to the host."""
    return machine.link_latency_s + size_bytes / machine.host_out_bytes_per_s


def in_s(machine: Machine, size_bytes: int) -> float:
    """Return the seconds of a copy from the host to the device."""
    return machine.link_latency_s + size_bytes / machine.host_in_bytes_per_s


def start_times_s(trace: Trace) -> NDArray[np.float64]:
    """Return when each op of the plain step starts, and after the last one the end of the step."""
    return np.concatenate(([0.0], np.cumsum([op.time_s for op in trace.ops])))


class IdealLoad:
    """The load with some buffers away from right after their last use to right before their next. Mutable."""

    def __init__(self, trace: Trace) -> None:
        self.load_bytes = np.array(load_curve(trace, with_workspace=True), dtype=np.int64)

    def leave(self, gap: Gap) -> None:
        """Take a buffer away over a gap."""
        self._add(gap, -gap.size_bytes)

    def stay(self, gap: Gap) -> None:
        """Undo `leave`."""
        self._add(gap, gap.size_bytes)

    def can_stay(self, gap: Gap, limit_bytes: int) -> bool:
        """Return whether a buffer that is away would fit all the time."""
        return all(
            part.size == 0 or int(part.max()) + gap.size_bytes <= limit_bytes
            for part in (self.load_bytes[span] for span in self._spans(gap))
        )

    @property
    def peak_op(self) -> int:
        """The first op at which the load is highest."""
        return int(np.argmax(self.load_bytes))

    @property
    def peak_bytes(self) -> int:
        """The highest load."""
        return int(self.load_bytes.max())

    def _add(self, gap: Gap, size_bytes: int) -> None:
        for span in self._spans(gap):
            self.load_bytes[span] += size_bytes

    def _spans(self, gap: Gap) -> tuple[slice, ...]:
        num_ops = len(self.load_bytes)
        first = slice(gap.last_use_op + 1, min(gap.next_use_op, num_ops))
        return (first,) if gap.next_use_op <= num_ops else (first, slice(0, gap.next_use_op - num_ops))


class LinkSlack:
    """How much of the link's time is left before and after a moment, given what was put on it. Mutable.

    Before the moment each copy out is released by its last use and has to end at the moment; after it each copy in
    starts at the moment and is due at its next use. For such one-sided deadlines a single machine is feasible exactly
    if, from every release on (up to every use), the copies take no more time than there is; the least that is left
    over those points is the slack of one more copy.

    Only gaps that span the moment may be asked about: for another moment take `at(moment)`.
    """

    def __init__(self, trace: Trace, machine: Machine, moment: int) -> None:
        self._trace = trace
        self._machine = machine
        self._moment = moment
        self._booked: list[Gap] = []
        self._others: dict[int, LinkSlack] = {moment: self}
        start_s = start_times_s(trace)
        self._out_s = start_s[moment] - start_s[: moment + 1]  # time from the start of each op up to the moment
        self._in_s = start_s[moment:] - start_s[moment]  # time from the moment up to the start of each op

    def at(self, moment: int) -> "LinkSlack":
        """Return the time left around another moment, given the swaps put on the link so far that span it."""
        if moment not in self._others:
            other = LinkSlack(self._trace, self._machine, moment)
            other._booked, other._others = self._booked, self._others
            for gap in self._booked:
                if other.spans(gap):
                    other.take(gap)
            self._others[moment] = other
        return self._others[moment]

    def spans(self, gap: Gap) -> bool:
        """Return whether a gap is open at the moment."""
        return gap.last_use_op < self._moment < gap.next_use_op

    def stall_s(self, gap: Gap) -> float:
        """Return how long a swap over this gap, which spans the moment, would make compute wait."""
        out, back = self._parts(gap)
        out_stall_s = max(0.0, out_s(self._machine, gap.size_bytes) - float(out.min(initial=np.inf)))
        in_stall_s = max(0.0, in_s(self._machine, gap.size_bytes) - float(back.min(initial=np.inf)))
        return out_stall_s + in_stall_s

    def book(self, gap: Gap) -> None:
        """Put the two copies of a swap on the link; what does not fit is stall, and takes no one else's time."""
        self._booked.append(gap)
        for other in self._others.values():
            if other.spans(gap):
                other.take(gap)

    def take(self, gap: Gap) -> None:
        """Take the time of a swap's two copies from this moment's slack alone."""
        out, back = self._parts(gap)
        out -= min(out_s(self._machine, gap.size_bytes), max(0.0, float(out.min(initial=np.inf))))
        back -= min(in_s(self._machine, gap.size_bytes), max(0.0, float(back.min(initial=np.inf))))

    def _parts(self, gap: Gap) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        assert self.spans(gap)
        return self._out_s[: gap.last_use_op + 2], self._in_s[gap.next_use_op - self._moment :]
