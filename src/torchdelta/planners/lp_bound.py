"""A proved lower bound of the slowdown that a budget costs, within the decision class *saved*: a linear program.

Ours, after the bound that reference prototypes of hybrid swap-and-recompute planners use; Checkmate (MLSys 2020) and
POET (ICML 2022) state the same problem as a MILP with one variable a tensor and a moment. Solved by HiGHS (extra
`solver`), in about 0.1 s for a ResNet-50 and seconds for a GPT2-XL.

Variables, all in [0, 1] where they are shares: `swap[i]`, `recompute[i]` for each candidate; for each candidate and
each chosen moment `m` in its gap `gone[i, m]` (its copy out has ended), `missing[i, m]` (its copy back has not begun)
and `away_r[i, m]` (dropped, and not there again); `rerun[o]` for each op that a replay may run; `stall[p]` and
`replay[p]`, the stall and the time of first reruns up to breakpoint `p`. The objective is all the stall and all the
reruns of the step.

[Note: why no plan of the class beats the bound]
Take any plan that fits and set each variable to what happens in it. Of a swapped buffer `away_s`, which is short for
`gone + missing - swap`, is 1 at the moments at which its memory is free, since no copy back begins before the copy out
has ended. `rerun` is 1 if the op runs again at all, `stall[p]` the time lost before breakpoint `p` to waiting and to
second and later reruns, `replay[p]` the time of first reruns before `p`. Every row below then holds, and the objective
is at most the time lost. So the least objective over all values of the variables is at most that of any plan.

1.  Memory at a moment: the load of the plain step less what is away is at most the budget. The memory of replays in
    progress would only add to it.
2.  Exclusion: `swap + recompute <= 1`, and `gone`, `missing <= swap <= gone + missing`, `away_r <= recompute`. A buffer
    leaves once and returns once: `gone` never falls over its gap, `missing` and `away_r` never rise.
3.  Out of the device: what was released after op `p - 1` or later, and is gone at `m`, crossed the link between the
    end of op `p - 1` and the start of op `m`: a transfer is queued after its release and memory is free after its end.
    The link carries one at a time, so their durations add up to at most that time.
4.  Into the device: what is missing at `m` and used at `q` or before crosses the link between the end of `m` and the
    start of `q`.
5.  Reruns: `rerun[o] >= recompute[i]` for each op in the chain of [Note: what a replay surely needs].
6.  Parents: at a moment at which a recomputed child is there again (after its gap, or `recompute - away_r = 1` within
    it), its parents are there too: they were when it was replayed, and who leaves only once stays from then on.
7.  When reruns happen: an op whose earliest possible replay is at `p` or later has not run again before `p`, and one
    that a candidate used before `p` needs has. Where an op makes one candidate and serves no other chain, it has run
    again exactly when the candidate is recomputed and there.

8.  Whole tensors (with `integral`): at a moment the memory of a tensor is free or not, so what counts in row 1 is 0 or
    1, and at most the shares of row 2. Two tensors that do not fit beside each other are then no longer halved.

Left out are moments that were not chosen, the memory of replays and of transfers in flight, the order of the queues,
and limits of the host: each makes the bound lower, never wrong.
"""

import math
from bisect import bisect_left, bisect_right
from itertools import accumulate

import msgspec

from torchdelta.machine.model import Machine
from torchdelta.plan.model import DecisionClass
from torchdelta.planners.linear_program import LinearProgram
from torchdelta.planners.saved_class import MIN_CANDIDATE_BYTES, Candidate, load_without, saved_candidates
from torchdelta.trace.model import Trace, load_curve

__all__ = ["Bound", "bound", "choose_moments", "least_peak_bound"]

NUM_MOMENTS = 10
"""Moments at which the memory is looked at: time-spaced local maxima of the load."""

NUM_BREAKPOINTS = 48
"""Points of time between which the links' flow is looked at, beside the moments themselves."""


class Bound(msgspec.Struct, frozen=True, kw_only=True):
    """What no plan of a class can beat.

    Attributes:
        decision_class: The class that it holds for, and only for it.
        budget_bytes: The budget.
        feasible: False if it is proved that no plan of the class fits.
        time_s: Least time of the step; infinite if nothing fits.
        plain_time_s: Time of the step without a budget.
        swap: The largest share of each candidate that the relaxation has swapped out at a moment, by buffer id; zeros
            left out.
        recompute: The same of what it has dropped.
        moments: The ops at which it looked at the memory.
    """

    decision_class: DecisionClass
    budget_bytes: int
    feasible: bool
    time_s: float
    plain_time_s: float
    swap: dict[int, float] = {}
    recompute: dict[int, float] = {}
    moments: tuple[int, ...] = ()

    @property
    def overhead(self) -> float:
        """The least slowdown as a share of the plain time: 0.05 is five percent."""
        return self.time_s / self.plain_time_s - 1 if self.plain_time_s else 0.0


def bound(
    trace: Trace,
    machine: Machine,
    budget_bytes: int,
    *,
    num_moments: int = NUM_MOMENTS,
    load_bytes: list[int] | None = None,
    integral: bool = False,
    min_candidate_bytes: int = MIN_CANDIDATE_BYTES,
) -> Bound:
    """Return a lower bound of the step's time under a budget, within the class *saved*.

    Args:
        trace: A priced trace (its ops carry `time_s`).
        machine: Whose links carry the swaps.
        budget_bytes: Bytes that the device may hold at any moment.
        num_moments: Moments at which the memory is looked at; more give a higher bound and take longer.
        load_bytes: The load at each op of the plain step; by default the trace's, workspaces included.
        integral: Force whole decisions, and tensors that are whole on the device or away: a MILP, for small traces.
        min_candidate_bytes: Smaller tensors are taken to be away at no cost.

    Raises:
        PlanError: The solver failed, or highspy is not installed.
    """
    load = load_curve(trace, with_workspace=True) if load_bytes is None else load_bytes
    everyone = saved_candidates(trace)
    plain_time_s = math.fsum(op.time_s for op in trace.ops)
    least = load_without(trace, load, everyone)
    if max(least) > budget_bytes:
        return Bound(
            decision_class="saved",
            budget_bytes=budget_bytes,
            feasible=False,
            time_s=math.inf,
            plain_time_s=plain_time_s,
        )
    small = tuple(c for c in everyone if c.size_bytes < min_candidate_bytes)
    load = load_without(trace, load, small)
    moments = choose_moments(trace, load, budget_bytes, num_moments)
    nothing = Bound(
        decision_class="saved",
        budget_bytes=budget_bytes,
        feasible=True,
        time_s=plain_time_s,
        plain_time_s=plain_time_s,
        moments=moments,
    )
    if not moments:
        return nothing
    rows = _Rows(trace, everyone, min_candidate_bytes, moments, integral=integral)
    rows.add_memory(load, budget_bytes)
    rows.add_links(machine)
    rows.add_reruns()
    rows.add_parents()
    solution = rows.program.solve(integral=integral)
    if solution is None:
        return msgspec.structs.replace(nothing, feasible=False, time_s=math.inf)
    return msgspec.structs.replace(
        nothing,
        time_s=plain_time_s + max(0.0, solution.objective) * rows.unit_s,
        swap=_shares(rows, solution.values, 0),
        recompute=_shares(rows, solution.values, 1),
    )


def least_peak_bound(trace: Trace, *, load_bytes: list[int] | None = None) -> int:
    """Return bytes below which no plan of the class *saved* can hold the step, at any speed."""
    load = load_curve(trace, with_workspace=True) if load_bytes is None else load_bytes
    return max(load_without(trace, load, saved_candidates(trace)))


def choose_moments(trace: Trace, load_bytes: list[int], budget_bytes: int, num_moments: int) -> tuple[int, ...]:
    """Return the ops at which to look at the memory: the highest above the budget in each of equal spans of time.

    The time above the budget is cut into equal spans, so that short and crowded stretches count no more than they cost.
    """
    above = [op for op, load in enumerate(load_bytes) if load > budget_bytes]
    if len(above) <= num_moments:
        return tuple(above)
    total_s = math.fsum(trace.ops[op].time_s for op in above)
    if total_s <= 0.0:
        return tuple(sorted(sorted(above, key=lambda op: (-load_bytes[op], op))[:num_moments]))
    best: dict[int, int] = {}
    elapsed_s = 0.0
    for op in above:
        span = min(int(elapsed_s / total_s * num_moments), num_moments - 1)
        elapsed_s += trace.ops[op].time_s
        if span not in best or load_bytes[op] > load_bytes[best[span]]:
            best[span] = op
    return tuple(sorted(best.values()))


_Crossing = tuple[int, float, float]
"""A share that is away, the seconds that it takes on the link, and the plain seconds that it has for them."""


class _Rows:
    """The linear program in the making. Mutable; lives as long as one call of `bound`."""

    def __init__(
        self,
        trace: Trace,
        everyone: tuple[Candidate, ...],
        min_candidate_bytes: int,
        moments: tuple[int, ...],
        *,
        integral: bool,
    ) -> None:
        self.trace = trace
        self.integral = integral
        self.moments = moments
        self.everyone = everyone
        # Who is away at none of the moments relieves none of them, but may be a parent or a cause of reruns: left out.
        self.chosen = [i for i, c in enumerate(everyone) if c.size_bytes >= min_candidate_bytes and self._spans(c)]
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
        # Time lost through the end of op `p - 1`; both never fall.
        self.stall = {p: program.variable(math.inf) for p in self.breakpoints}
        self.replay = {p: program.variable(math.inf) for p in self.breakpoints}
        for before, after in zip(self.breakpoints, self.breakpoints[1:], strict=False):
            program.row([(self.stall[before], 1.0), (self.stall[after], -1.0)], upper=0.0)
            program.row([(self.replay[before], 1.0), (self.replay[after], -1.0)], upper=0.0)
        program.cost(self.stall[self.breakpoints[-1]], 1.0)
        program.cost(self.replay[self.breakpoints[-1]], 1.0)

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

    def _spans(self, candidate: Candidate) -> bool:
        return bool(self._moments_of(candidate))

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
        unit = max(budget_bytes, 1) / 1000
        for m in self.moments:
            terms: list[tuple[int, float]] = []
            for i in self.chosen:
                if (i, m) not in self.gone:
                    continue
                size = self.everyone[i].size_bytes / unit
                if not self.integral:
                    terms += [*self._away_s(i, m, size), (self.away_r[i, m], size)]
                    continue
                away = self.program.variable(1.0, integral=True)
                self.program.row([(away, 1.0), *self._away_s(i, m, -1.0), (self.away_r[i, m], -1.0)], upper=0.0)
                terms.append((away, size))
            self.program.row(terms, lower=(load_bytes[m] - budget_bytes) / unit)

    def add_links(self, machine: Machine) -> None:
        """Add the rows of points 3 and 4: one for each moment and breakpoint between which something crosses."""
        for m in self.moments:
            out: dict[int, list[_Crossing]] = {}
            back: dict[int, list[_Crossing]] = {}
            for i in self.chosen:
                if (i, m) not in self.gone:
                    continue
                candidate = self.everyone[i]
                out_s = machine.link_latency_s + candidate.size_bytes / machine.host_out_bytes_per_s
                in_s = machine.link_latency_s + candidate.size_bytes / machine.host_in_bytes_per_s
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
        return [(self.stall[p], 1.0), (self.replay[p], 1.0), (self.stall[q], -1.0), (self.replay[q], -1.0)]

    def add_reruns(self) -> None:
        """Add the rows of points 5 and 7."""
        users: dict[int, list[int]] = {}
        for i in self.chosen:
            if self.everyone[i].recomputable:
                for op in self.everyone[i].chain_ops:
                    users.setdefault(op, []).append(i)
        cost = {op: self.trace.ops[op].time_s / self.unit_s for op in users}
        rerun = {op: self.program.variable(1.0) for op in users}
        for op, needed_by in users.items():
            for i in needed_by:
                self.program.row([(self.recompute[i], 1.0), (rerun[op], -1.0)], upper=0.0)
        first = {op: min(self.everyone[i].earliest_op for i in needed_by) for op, needed_by in users.items()}
        last = {op: max(self.everyone[i].next_use_op for i in needed_by) for op, needed_by in users.items()}
        sole = {op: needed_by[0] for op, needed_by in users.items() if len(needed_by) == 1 and self._only_makes(op)}
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

    def _only_makes(self, op: int) -> bool:
        return len(self.trace.ops[op].writes) == 1

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


def _shares(rows: _Rows, values: list[float], action: int) -> dict[int, float]:
    """Return the largest share of each buffer that is away at a moment, by the first or the second action."""
    shares: dict[int, float] = {}
    for i, m in rows.gone:
        share, buffer_id = rows.away(values, i, m)[action], rows.everyone[i].buffer_id
        if share > max(shares.get(buffer_id, 0.0), 1e-6):
            shares[buffer_id] = share
    return shares
