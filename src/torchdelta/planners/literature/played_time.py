"""The time that a play takes: copies on the link beside compute, in the order in which a program is priced."""

from collections.abc import Iterable

from torchdelta.machine.model import Machine
from torchdelta.planners.literature.played_program import Away
from torchdelta.planners.literature.played_step import PlayedStep
from torchdelta.simulate.copies import HostLink

__all__ = ["PlayedTime"]


class PlayedTime:
    """The clock of a play. Mutable.

    Attributes:
        now_s: When the last op ended.
        copies_out: To be queued after the op before the one at hand; compute waits for them before that.
        copies_in: To be queued before the op at hand, in this order.
        waits: The copies in, old and new, that the op at hand needs.
    """

    def __init__(self, step: PlayedStep, machine: Machine, *, synchronous: bool) -> None:
        self.now_s = 0.0
        self.copies_out: list[Away] = []
        self.copies_in: list[Away] = []
        self.waits: list[Away] = []
        self._step, self._link, self._synchronous = step, HostLink(machine), synchronous
        self._out_s_per_byte = 0.0 if synchronous else machine.out_compute_s_per_byte
        self._in_s_per_byte = 0.0 if synchronous else machine.in_compute_s_per_byte
        self._copy_s = 0.0 if synchronous else machine.copy_compute_s
        self._replay_op_s = machine.replay_compute_s

    def run(self, op: int, replayed: Iterable[int], arriving: Iterable[Away]) -> list[Away]:
        """Let everything that was noted for an op happen, and the op itself.

        Returns:
            Those of `arriving` that have ended by the time the op starts.
        """
        now, sizes = self.now_s, self._step.size_bytes
        for away in sorted(self.copies_out, key=lambda away: (away.last_use_op, away.buffer_id)):
            away.out_end_s = self._link.send(int(sizes[away.buffer_id]), now)[1]
            now = max(now, away.out_end_s) if self._synchronous else now
            now += int(sizes[away.buffer_id]) * self._out_s_per_byte + self._copy_s
        now = max((now, *(away.out_end_s for away in self.copies_out)))
        for away in self.copies_in:
            away.in_end_s = self._link.bring(int(sizes[away.buffer_id]), max(now, away.out_end_s))[1]
            now = max(now, away.in_end_s) if self._synchronous else now
            now += int(sizes[away.buffer_id]) * self._in_s_per_byte + self._copy_s
        now = max((now, *(away.in_end_s for away in self.waits)))
        arrived = [away for away in arriving if away.arrived_op is None and away.in_end_s <= now]
        for away in arrived:
            away.arrived_op = op
        replay_s = 0.0
        for index in replayed:
            replay_s += self._step.trace.ops[index].time_s + self._replay_op_s
        self.now_s = now + (replay_s + self._step.trace.ops[op].time_s)
        self.copies_out, self.copies_in, self.waits = [], [], []
        return arrived
