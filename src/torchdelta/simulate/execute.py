"""What a plan costs, exactly as it is written: no moment is moved, and no copy is dropped.

`docs/plan-format.md` states the rules for everybody else; a second implementation of them, written from that page
alone, is among the tests. A planner that only decides who leaves gets its moments from `simulate.schedule`.

[Note: one op]
Compute waits until the copies out have ended whose memory is to be free here; copies in are queued; compute waits for
those that are needed here; the replay runs, then the op; then the copies out are queued that follow on it. A copy
starts when it is queued, its queue is free and, on the way in, its copy out has ended. There are three queues: to the
host, from the host, and one for the disk.

[Note: a step that repeats itself]
What is on its way when the step ends goes on in the following step, which is the same: the step begins with each such
copy as it is written, for `carried_s` more seconds. A step that leaves more than it began with begins again with what
it left, a few times; then compute waits at its end for all of them. So the time is that of a step that can be repeated.
"""

from collections.abc import Iterable, Sequence

import msgspec

from torchdelta.errors import PlanError
from torchdelta.machine.model import Machine
from torchdelta.plan.model import Absence, Plan
from torchdelta.plan.walk import Walk, tier_load
from torchdelta.simulate.copies import Disk, HostLink, Queue
from torchdelta.simulate.model import Lane, Score, SimulatedPeak, Simulation, Span, Stall
from torchdelta.trace.model import Trace, peak

__all__ = ["check_header", "execute"]

_ROUNDS = 4
"""So many rounds look for a step that leaves no more than it found; then compute waits at its end."""

_ROUNDING = 1e-9
"""Of the step's time: what one round adds to what the round before has left, so that rounding cannot add a round."""


def execute(trace: Trace, machine: Machine, plan: Plan) -> Simulation:
    """Return what a plan costs on a machine, waits included.

    Args:
        trace: A step whose ops carry their times on the machine (`machine.roofline.price`).
        machine: Whose links are used.
        plan: A plan of that step. Whether it is valid `plan.validate` tells; its budget may be passed.

    Raises:
        PlanError: The plan belongs to another trace.
    """
    check_header(trace, plan)
    memory = _device_memory(trace, plan)
    clock = _settled(trace, machine, plan)
    budget_bytes, num_ops = plan.header.budget_bytes, len(trace.ops)
    host, disk = tier_load(trace, plan.absences, "host"), tier_load(trace, plan.absences, "disk")
    host_bytes, disk_bytes = max(host), max(disk)
    has_disk = machine.disk_write_bytes_per_s > 0
    host_excess = _above(host_bytes, machine.host_memory_bytes)
    disk_excess = _above(disk_bytes, machine.disk_bytes if has_disk else 0)
    excess = sum(max(0, bytes_ - budget_bytes) for bytes_ in memory.load_bytes)
    swapped_bytes, written_bytes, dropped_bytes = _moved(trace, plan.absences)
    return Simulation(
        score=Score(
            time_s=clock.time_s,
            peak_bytes=memory.peak.size_bytes,
            peak_op=memory.peak.op,
            excess_bytes=max(0, memory.peak.size_bytes - budget_bytes),
            excess_sum_bytes=excess + (host_excess + disk_excess) * num_ops,
            stall_s=clock.stall_s,
            recompute_s=clock.recompute_s,
            host_excess_bytes=host_excess,
            disk_excess_bytes=disk_excess,
        ),
        plan=plan,
        time_s=clock.time_s,
        plain_time_s=_sum(op.time_s for op in trace.ops),
        stall_s=clock.stall_s,
        recompute_s=clock.recompute_s,
        peak=memory.peak,
        plain_peak_bytes=peak(trace, with_workspace=True).size_bytes,
        budget_bytes=budget_bytes,
        swapped_out_bytes=swapped_bytes,
        swapped_in_bytes=swapped_bytes,
        disk_written_bytes=written_bytes,
        disk_read_bytes=written_bytes,
        host_peak_bytes=host_bytes,
        disk_peak_bytes=disk_bytes,
        recomputed_bytes=dropped_bytes,
        stalls=tuple(clock.stalls),
        timeline=tuple(sorted(clock.spans, key=lambda span: (span.start_s, span.end_s, span.lane, span.id))),
        load_bytes=memory.load_bytes,
    )


def check_header(trace: Trace, plan: Plan) -> None:
    """Check that a plan belongs to a trace.

    Raises:
        PlanError: It has another number of ops or buffers, or the trace has no ops.
    """
    header = plan.header
    if not trace.ops:
        raise PlanError("the trace has no ops: there is nothing to plan")
    if (header.num_ops, header.num_buffers) != (len(trace.ops), len(trace.buffers)):
        raise PlanError(
            f"the plan belongs to another trace: it has {header.num_ops} ops and {header.num_buffers} buffers, this "
            f"one {len(trace.ops)} and {len(trace.buffers)}"
        )


class _DeviceMemory(msgspec.Struct, frozen=True, kw_only=True):
    """What is on the device: the most bytes at each op, replays before it included, and the highest moment."""

    load_bytes: tuple[int, ...]
    peak: SimulatedPeak


def _device_memory(trace: Trace, plan: Plan) -> _DeviceMemory:
    moments = list(Walk(trace, plan).moments())
    load_bytes = [0] * len(trace.ops)
    for moment in moments:
        load_bytes[moment.at_op] = max(load_bytes[moment.at_op], moment.held_bytes)
    place = max(range(len(moments)), key=lambda place: moments[place].held_bytes)  # the first of equals
    highest, there = moments[place], set[int]()
    for moment in moments[: place + 1]:
        there.difference_update(moment.freed)
        there.update(moment.taken)
        for old, new in moment.replaced:
            there.discard(old)
            there.add(new)
    return _DeviceMemory(
        load_bytes=tuple(load_bytes),
        peak=SimulatedPeak(
            size_bytes=highest.held_bytes,
            op=highest.at_op,
            replayed_op=highest.op if highest.is_replay else None,
            tensors=tuple(sorted(there, key=lambda id_: (-trace.buffers[id_].size_bytes, id_))),
        ),
    )


def _settled(trace: Trace, machine: Machine, plan: Plan) -> "_Clock":
    """Run the step until it leaves no more on its way than it began with. See [Note: a step that repeats itself]."""
    carried_s = [absence.carried_s for absence in plan.absences]
    for _ in range(_ROUNDS if any(carried_s) else 0):
        clock = _Clock(trace, machine, plan, carried_s)
        clock.run()
        if all(left_s <= before_s for left_s, before_s in zip(clock.left_s, carried_s, strict=True)):
            return clock
        carried_s = [left_s + _ROUNDING * clock.time_s if left_s else 0.0 for left_s in clock.left_s]
    clock = _Clock(trace, machine, plan, [0.0] * len(plan.absences))
    clock.run()
    return clock


class _Clock:
    """One round of a step. Mutable; `run` fills it.

    Attributes:
        time_s: Seconds of the step.
        stall_s: Seconds of it in which compute waits for copies.
        recompute_s: Seconds of it in which replays run.
        stalls: Every wait, in order.
        spans: Every piece of work.
        left_s: By absence, the seconds that a copy out which compute does not wait for takes beyond the end.
    """

    def __init__(self, trace: Trace, machine: Machine, plan: Plan, carried_s: Sequence[float]) -> None:
        self.time_s = self.stall_s = self.recompute_s = 0.0
        self.stalls: list[Stall] = []
        self.spans: list[Span] = []
        self.left_s = [0.0] * len(plan.absences)
        self._trace, self._machine, self._plan, self._carried_s = trace, machine, plan, carried_s
        extra_s = machine.replay_compute_s
        self._replay_s = {
            replay.at_op: _sum(trace.ops[op].time_s + extra_s for op in replay.ops) for replay in plan.replays
        }
        self._host, self._disk = HostLink(machine), Disk(machine)
        num_ops = len(trace.ops)
        self._releases: list[list[int]] = [[] for _ in range(num_ops)]
        self._outs: list[list[int]] = [[] for _ in range(num_ops)]
        self._ins: list[list[int]] = [[] for _ in range(num_ops)]
        self._needs: list[list[int]] = [[] for _ in range(num_ops)]
        # By absence: when its copy out of this step ends, when that of the step before does, when its copy in does.
        self._out_end = [0.0] * len(plan.absences)
        self._carried_end = list(carried_s)
        self._in_end = [0.0] * len(plan.absences)
        for index, absence in self._swaps():
            if absence.leave_op < absence.return_op:  # else its memory is never free
                self._releases[absence.leave_op % num_ops].append(index)
            self._outs[absence.queued_op].append(index)
            self._ins[absence.return_op % num_ops].append(index)
            if absence.return_op >= num_ops or absence.next_use_op < num_ops:  # else waited for at the end of the step
                self._needs[absence.next_use_op % num_ops].append(index)
        for ins in self._ins:
            ins.sort(key=lambda index: plan.absences[index].return_rank)

    def _swaps(self) -> list[tuple[int, Absence]]:
        """Return the swaps in the order in which copies out that follow on the same op are queued."""
        swaps = [(index, absence) for index, absence in enumerate(self._plan.absences) if absence.action == "swap"]
        return sorted(swaps, key=lambda item: (item[1].last_use_op, item[1].buffer_id))

    def run(self) -> None:
        """Go through the step. See [Note: one op]."""
        absences, num_ops, synchronous = self._plan.absences, len(self._trace.ops), self._plan.header.synchronous
        now = 0.0
        for index, absence in self._swaps():
            if self._carried_s[index] > 0.0:
                self._queue(absence).carry(self._carried_s[index])
        for op in self._trace.ops:
            for index in sorted(self._releases[op.index], key=self._end_of_release):
                now = self._wait(now, self._end_of_release(index), index, op.index, "out")
            for index in self._ins[op.index]:
                absence = absences[index]
                ready_s = self._carried_end[index] if absence.return_op >= num_ops else self._out_end[index]
                start_s, end_s = self._queue(absence).bring(self._size(absence), max(now, ready_s))
                self._in_end[index] = end_s
                self._copy(absence, "swap-in", start_s, end_s)
                if synchronous:
                    now = self._wait(now, end_s, index, op.index, "in")
                else:
                    now = self._take(now, absence, self._machine.in_compute_s_per_byte, op.index)
            for index in self._needs[op.index]:
                now = self._wait(now, self._in_end[index], index, op.index, "in")
            replay_s = self._replay_s.get(op.index, 0.0)
            self.recompute_s += replay_s
            self._span("replay", op.index, now, now + replay_s)
            start_s, before_s = now + replay_s, now + (replay_s + op.time_s)
            self.spans.append(Span(lane="compute", what="op", id=op.index, start_s=start_s, end_s=before_s))
            now = before_s
            for index in self._outs[op.index]:
                absence = absences[index]
                start_s, end_s = self._queue(absence).send(self._size(absence), now)
                self._out_end[index] = end_s
                self._copy(absence, "swap-out", start_s, end_s)
                if synchronous:
                    now = self._wait(now, end_s, index, op.index, "out")
                else:
                    now = self._take(now, absence, self._machine.out_compute_s_per_byte, op.index)
        self.time_s = self._end(now)

    def _end(self, now: float) -> float:
        """End the step: wait for what the next one does not begin with, and note what is left of the others."""
        num_ops = len(self._trace.ops)
        over_end = [(index, absence) for index, absence in self._swaps() if absence.next_use_op >= num_ops]
        for index, absence in over_end:
            if not self._carried_s[index]:
                now = self._wait(now, self._out_end[index], index, num_ops - 1, "out")
            if absence.return_op < num_ops:
                now = self._wait(now, self._in_end[index], index, num_ops - 1, "in")
        for index, _ in over_end:
            if self._carried_s[index]:
                self.left_s[index] = max(0.0, self._out_end[index] - now)
        return now

    def _end_of_release(self, index: int) -> float:
        absence = self._plan.absences[index]
        return (self._carried_end if absence.leave_op >= len(self._trace.ops) else self._out_end)[index]

    def _queue(self, absence: Absence) -> Queue:
        return self._host if absence.tier == "host" else self._disk

    def _size(self, absence: Absence) -> int:
        return self._trace.buffers[absence.buffer_id].size_bytes

    def _wait(self, now: float, until_s: float, index: int, op: int, what: str) -> float:
        if until_s <= now:
            return now
        buffer_id = self._plan.absences[index].buffer_id
        self.stalls.append(
            Stall(buffer_id=buffer_id, op=op, waited_for="out" if what == "out" else "in", time_s=until_s - now)
        )
        self.stall_s += until_s - now
        self._span("stall", op, now, until_s)
        return until_s

    def _take(self, now: float, absence: Absence, s_per_byte: float, op: int) -> float:
        """Let a copy that was just queued take compute. See [Note: copies that take compute] in machine/model.py."""
        time_s = self._size(absence) * s_per_byte + self._machine.copy_compute_s
        self._span("copy", op, now, now + time_s)
        return now + time_s

    def _span(self, what: str, op: int, start_s: float, end_s: float) -> None:
        if end_s > start_s:
            self.spans.append(Span(lane="compute", what=what, id=op, start_s=start_s, end_s=end_s))

    def _copy(self, absence: Absence, what: str, start_s: float, end_s: float) -> None:
        lane: Lane = "disk"
        if absence.tier == "host":
            lane = "device_to_host" if what == "swap-out" else "host_to_device"
        self.spans.append(Span(lane=lane, what=what, id=absence.buffer_id, start_s=start_s, end_s=end_s))


def _moved(trace: Trace, absences: Sequence[Absence]) -> tuple[int, int, int]:
    """Return the bytes that go to the host, to the disk, and that are dropped."""
    moved = {"host": 0, "disk": 0, "dropped": 0}
    for absence in absences:
        how = absence.tier if absence.action == "swap" else "dropped"
        moved[how] += trace.buffers[absence.buffer_id].size_bytes
    return moved["host"], moved["disk"], moved["dropped"]


def _sum(times_s: Iterable[float]) -> float:
    """Add up from left to right, as a clock does; `sum` of newer Pythons rounds otherwise."""
    total_s = 0.0
    for time_s in times_s:
        total_s += time_s
    return total_s


def _above(size_bytes: int, limit_bytes: int | None) -> int:
    return 0 if limit_bytes is None else max(0, size_bytes - limit_bytes)
