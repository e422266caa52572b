"""The rows of the linear program of `lp_bound.py`, whose points they are numbered by."""

import math
from bisect import bisect_left, bisect_right
from itertools import accumulate

from torchdelta.bounds.linear_program import LinearProgram
from torchdelta.bounds.saved_class import Candidate
from torchdelta.machine.model import Machine
from torchdelta.trace.model import Trace

__all__ = ["NUM_BREAKPOINTS", "Rows"]

NUM_BREAKPOINTS = 48
"""Points of time between which the links' flow is looked at, beside the moments themselves."""

_Crossing = tuple[int, float, float]
"""A share that is away, the seconds that it takes on the link, and the plain seconds that it has for them."""


class Rows:
    """The linear program in the making. Mutable; lives as long as one call of `bound`.

    Attributes:
        program: What is solved.
        unit_s: Seconds of one unit of its objective.
        everyone: All candidates of the class.
        gone: The variables of [Note: why no plan of the class beats the bound], by candidate and moment.
    """

    def __init__(
        self,
        trace: Trace,
        everyone: tuple[Candidate, ...],
        min_candidate_bytes: int,
        moments: tuple[int, ...],
        machine: Machine,
        *,
        integral: bool,
    ) -> None:
        self.trace = trace
        self.machine = machine
        self.integral = integral
        self.moments = moments
        self.everyone = everyone
        # Who is away at none of the moments relieves none of them, but may be a parent or a cause of reruns: left out.
        self.chosen = [i for i, c in enumerate(everyone) if c.size_bytes >= min_candidate_bytes and self._moments_of(c)]
        self.start_s = [0.0, *accumulate(op.time_s for op in trace.ops)]  # of each op in the plain step
        self.unit_s = max(self.start_s[-1], 1e-9) / 1000
        self.program = program = LinearProgram()
        can = {i: float(everyone[i].recomputable) for i in self.chosen}
        self.swap = {i: program.variable(1.0, integral=integral) for i in self.chosen}
        self.recompute = {i: program.variable(can[i], integral=integral) for i in self.chosen}
        self.gone: dict[tuple[int, int], int] = {}
        self.missing: dict[tuple[int, int], int] = {}
        self.away_r: dict[tuple[int, int], int] = {}
        for i in self.chosen:
            program.row([(self.swap[i], 1.0), (self.recompute[i], 1.0)], upper=1.0)
            self._add_gap(i)
        self.breakpoints = self._breakpoints()
        self.stall, self.replay = self._time_lost(), self._time_lost()
        self._lost_by_kind = [self.stall, self.replay]

    def _time_lost(self) -> dict[int, int]:
        """Return variables of the time that is lost through the end of op `p - 1`, which never falls, by `p`."""
        lost = {p: self.program.variable(math.inf) for p in self.breakpoints}
        for before, after in zip(self.breakpoints, self.breakpoints[1:], strict=False):
            self.program.row([(lost[before], 1.0), (lost[after], -1.0)], upper=0.0)
        self.program.cost(lost[self.breakpoints[-1]], 1.0)
        return lost

    def _add_gap(self, i: int) -> None:
        """Add the variables of one candidate's gap, and the rows of point 2."""
        program, before = self.program, -1
        for m in self._moments_of(self.everyone[i]):
            gone, missing, away = (program.variable(1.0) for _ in range(3))
            self.gone[i, m], self.missing[i, m], self.away_r[i, m] = gone, missing, away
            program.row([(gone, 1.0), (self.swap[i], -1.0)], upper=0.0)
            program.row([(missing, 1.0), (self.swap[i], -1.0)], upper=0.0)
            program.row([(gone, 1.0), (missing, 1.0), (self.swap[i], -1.0)], lower=0.0)
            program.row([(away, 1.0), (self.recompute[i], -1.0)], upper=0.0)
            if before >= 0:
                program.row([(self.gone[i, before], 1.0), (gone, -1.0)], upper=0.0)
                program.row([(missing, 1.0), (self.missing[i, before], -1.0)], upper=0.0)
                program.row([(away, 1.0), (self.away_r[i, before], -1.0)], upper=0.0)
            before = m

    def _away_s(self, i: int, m: int, factor: float = 1.0) -> list[tuple[int, float]]:
        """Return the share that is swapped and away at a moment: out already, and not on its way back."""
        return [(self.gone[i, m], factor), (self.missing[i, m], factor), (self.swap[i], -factor)]

    def away(self, values: list[float], i: int, m: int) -> tuple[float, float]:
        """Return the shares of a candidate that a solution has swapped out, and has dropped, at a moment."""
        swapped = sum(factor * values[variable] for variable, factor in self._away_s(i, m))
        return min(swapped, 1.0), min(values[self.away_r[i, m]], 1.0)

    def _moments_of(self, candidate: Candidate) -> tuple[int, ...]:
        first = bisect_right(self.moments, candidate.last_use_op)
        return self.moments[first : bisect_left(self.moments, candidate.next_use_op)]

    def _breakpoints(self) -> list[int]:
        """Return the ops before which time is told, the step's end included."""
        ends = {0, len(self.trace.ops), *self.moments, *(m + 1 for m in self.moments)}
        total_s = self.start_s[-1]
        ends.update(bisect_left(self.start_s, total_s * k / NUM_BREAKPOINTS) for k in range(NUM_BREAKPOINTS))
        return sorted(ends)

    def _at_or_before(self, op: int) -> int:
        return self.breakpoints[bisect_right(self.breakpoints, op) - 1]

    def _at_or_after(self, op: int) -> int:
        return self.breakpoints[bisect_left(self.breakpoints, op)]

    def add_memory(self, load_bytes: list[int], budget_bytes: int) -> None:
        """Add the rows of point 1.

        Where tensors are whole, what is away of one is a variable of its own, 0 or 1: rows of such variables alone are
        knapsacks, whose covers cut the relaxation (where three tensors do not fit, and 2.9 of them do).
        """
        for m in self.moments:
            chosen = [i for i in self.chosen if (i, m) in self.gone]
            # What has to leave may be a tiny part of the budget: the row's own tensors keep it above the tolerances.
            unit = max(1, *(self.everyone[i].size_bytes for i in chosen)) / 1000
            terms: list[tuple[int, float]] = []
            for i in chosen:
                size = self.everyone[i].size_bytes / unit
                if not self.integral:
                    terms += [*self._away_s(i, m, size), (self.away_r[i, m], size)]
                    continue
                away = self.program.variable(1.0, integral=True)
                self.program.row([(away, 1.0), *self._away_s(i, m, -1.0), (self.away_r[i, m], -1.0)], upper=0.0)
                terms.append((away, size))
            self.program.row(terms, lower=(load_bytes[m] - budget_bytes) / unit)

    def add_links(self) -> None:
        """Add the rows of points 3 and 4: one for each moment and breakpoint between which something crosses."""
        machine = self.machine
        for m in self.moments:
            out: dict[int, list[_Crossing]] = {}
            back: dict[int, list[_Crossing]] = {}
            for i in self.chosen:
                if (i, m) not in self.gone:
                    continue
                candidate = self.everyone[i]
                out_s = _copy_s(machine, candidate.size_bytes, inward=False)
                in_s = _copy_s(machine, candidate.size_bytes, inward=True)
                released, used = candidate.last_use_op + 1, candidate.next_use_op
                out_plain_s = self.start_s[m] - self.start_s[released]
                in_plain_s = self.start_s[used] - self.start_s[m + 1]
                out.setdefault(self._at_or_before(released), []).append((self.gone[i, m], out_s, out_plain_s))
                back.setdefault(self._at_or_after(used + 1), []).append((self.missing[i, m], in_s, in_plain_s))
            self._add_flow([(out[p], self._lost(p, m + 1)) for p in sorted(out, reverse=True)])
            self._add_flow([(back[q], self._lost(m + 1, q)) for q in sorted(back)])

    def _add_flow(self, steps: list[tuple[list[_Crossing], list[tuple[int, float]]]]) -> None:
        """Add a row a step: what crosses up to there (a running sum keeps rows short) takes no more than there is.

        A step is its crossings, and minus the time lost in the whole span that ends with it.
        """
        running, plain_s = -1, 0.0
        for crossings, minus_lost in steps:
            terms = [(variable, seconds / self.unit_s) for variable, seconds, _ in crossings]
            if running >= 0:
                terms.append((running, 1.0))
            running_next = self.program.variable(math.inf)
            self.program.row([*terms, (running_next, -1.0)], lower=0.0, upper=0.0)
            running = running_next
            plain_s = max(plain_s, *(span_s for _, _, span_s in crossings))
            self.program.row([(running, 1.0), *minus_lost], upper=plain_s / self.unit_s)

    def _lost(self, p: int, q: int) -> list[tuple[int, float]]:
        if p == q:
            return []
        kinds = self._lost_by_kind
        return [*((lost[p], 1.0) for lost in kinds), *((lost[q], -1.0) for lost in kinds)]

    def add_copies(self) -> None:
        """Add the rows of point 8: what copies take of compute by each breakpoint, at least and at most.

        Call this before `add_links`. Where copies take nothing there is nothing to add.
        """
        out, back = (
            {i: _taken_s(self.machine, self.everyone[i].size_bytes, inward=way) / self.unit_s for i in self.chosen}
            for way in (False, True)
        )
        if not any(out.values()) and not any(back.values()):
            return
        copies = self._time_lost()
        self._lost_by_kind.append(copies)
        end = self.breakpoints[-1]
        for p in self.breakpoints:
            possible, certain = list[tuple[int, float]](), list[tuple[int, float]]()
            for i in self.chosen:
                candidate, both = self.everyone[i], out[i] + back[i]
                if candidate.last_use_op < p or p == end:
                    possible.append((self.swap[i], -both))
                if candidate.next_use_op < p or p == end:
                    certain.append((self.swap[i], -both))
                elif (i, p - 1) in self.gone:  # what is gone at the op before has been copied out
                    certain.append((self.gone[i, p - 1], -out[i]))
            self.program.row([(copies[p], 1.0), *possible], upper=0.0)
            self.program.row([(copies[p], 1.0), *certain], lower=0.0)

    def add_reruns(self) -> None:
        """Add the rows of points 5 and 7."""
        users: dict[int, list[int]] = {}
        for i in self.chosen:
            if self.everyone[i].recomputable:
                for op in self.everyone[i].chain_ops:
                    users.setdefault(op, []).append(i)
        extra_s = self.machine.replay_compute_s
        cost = {op: (self.trace.ops[op].time_s + extra_s) / self.unit_s for op in users}
        rerun = {op: self.program.variable(1.0) for op in users}
        for op, needed_by in users.items():
            for i in needed_by:
                self.program.row([(self.recompute[i], 1.0), (rerun[op], -1.0)], upper=0.0)
        first = {op: min(self.everyone[i].earliest_op for i in needed_by) for op, needed_by in users.items()}
        last = {op: max(self.everyone[i].next_use_op for i in needed_by) for op, needed_by in users.items()}
        sole = {op: needed_by[0] for op, needed_by in users.items() if len(needed_by) == 1}
        end = self.breakpoints[-1]
        for p in self.breakpoints:
            possible = [(rerun[op], -cost[op]) for op in users if first[op] < p or p == end]
            certain = [(rerun[op], -cost[op]) for op in users if last[op] < p or p == end]
            if p - 1 in self.moments:
                for op, i in sole.items():
                    # The candidate is away at moment p - 1: its producer has not run again before p, else it has.
                    if (i, p - 1) in self.away_r and first[op] < p <= last[op] and p != end:
                        possible.append((self.away_r[i, p - 1], cost[op]))
                        certain += [(self.recompute[i], -cost[op]), (self.away_r[i, p - 1], cost[op])]
            self.program.row([(self.replay[p], 1.0), *possible], upper=0.0)
            self.program.row([(self.replay[p], 1.0), *certain], lower=0.0)

    def add_parents(self) -> None:
        """Add the rows of point 6."""
        chosen = set(self.chosen)
        for i in self.chosen:
            child = self.everyone[i]
            if not child.recomputable:
                continue
            for parent in child.parents:
                if parent not in chosen:
                    continue
                for m in self._moments_of(self.everyone[parent]):
                    if m < child.earliest_op or m <= child.last_use_op:
                        continue
                    terms = [*self._away_s(parent, m), (self.away_r[parent, m], 1.0), (self.recompute[i], 1.0)]
                    if (i, m) in self.away_r:
                        terms.append((self.away_r[i, m], -1.0))
                    self.program.row(terms, upper=1.0)


def _taken_s(machine: Machine, size_bytes: int, *, inward: bool) -> float:
    """Return the least seconds that a copy costs compute: see [Note: why no plan of the class beats the bound]."""
    taken_s = size_bytes * (machine.in_compute_s_per_byte if inward else machine.out_compute_s_per_byte)
    host = machine.host_in_bytes_per_s if inward else machine.host_out_bytes_per_s
    disk = machine.disk_read_bytes_per_s if inward else machine.disk_write_bytes_per_s
    return min(taken_s + machine.copy_compute_s, size_bytes / max(host, disk))


def _copy_s(machine: Machine, size_bytes: int, *, inward: bool) -> float:
    """Return the least seconds that a copy takes of those that the links have together.

    With a disk there are two links beside each other, and each copy takes one of them. A share `s` of the time of the
    host's link and `1 - s` of the disk's come to no more than the time that passes, whatever takes which; with shares
    that are as the rates, both ways cost a copy the same but for the latencies, and the lesser one counts.
    """
    host = machine.host_in_bytes_per_s if inward else machine.host_out_bytes_per_s
    disk = machine.disk_read_bytes_per_s if inward else machine.disk_write_bytes_per_s
    host_s = machine.link_latency_s + size_bytes / host
    if disk <= 0.0:
        return host_s
    disk_s = machine.disk_latency_s + size_bytes / disk
    share = host / (host + disk)
    return min(share * host_s, (1.0 - share) * disk_s)
