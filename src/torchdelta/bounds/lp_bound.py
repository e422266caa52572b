"""A proved lower bound of the slowdown that a budget costs, within the decision class *saved*: a linear program.

Ours, after the bound that reference prototypes of hybrid swap-and-recompute planners use; Checkmate (MLSys 2020) and
POET (ICML 2022) state the same problem as a MILP with one variable a tensor and a moment. Solved by HiGHS (extra
`solver`), in about 0.1 s for a ResNet-50 and seconds for a GPT2-XL.

Variables, all in [0, 1] where they are shares: `swap[i]`, `recompute[i]` for each candidate; for each candidate and
each chosen moment `m` in its gap `gone[i, m]` (its copy out has ended), `missing[i, m]` (its copy back has not begun)
and `away_r[i, m]` (dropped, and not there again); `rerun[o]` for each op that a replay may run; `stall[p]` and
`replay[p]` and `copies[p]`, the stall, the time of first reruns, and what copies take of compute up to breakpoint `p`.
The objective is all three over the step.

[Note: why no plan of the class beats the bound]
Take any plan that fits and set each variable to what happens in it. Of a swapped buffer `away_s`, which is short for
`gone + missing - swap`, is 1 at the moments at which its memory is free, since no copy back begins before the copy out
has ended. `rerun[o]` is 1 if a candidate with `o` in its chain is recomputed; the *first rerun* of `o` is the one in
the first replay that brings such a candidate back. `replay[p]` is the time of first reruns before breakpoint `p`,
`stall[p]` all other time lost before `p`: to waiting, and to reruns for whatever else. Every row below then holds, and
the objective is the time lost. So the least objective over all values of the variables is at most that of any plan.

`copies[p]` is what the copies of swapped candidates cost compute. A copy counts from the moment at which compute stood
still for it; what follows the end of op `p - 1`, even before op `p` begins, is not before `p`. It counts for what it
takes of compute (machine/model.py), but for no more than the faster link needs for it, because a synchronous plan waits
for that instead. Whatever it costs beyond that is part of `stall`.

The plans meant are those of the class *saved* as `saved_class.py` reads it: a buffer that is dropped leaves right after
its last use in forward, a replay runs before the op that uses its target, and what it brings back stays. All planners
of that class make such plans. A plan file may also drop a buffer only after a replay in backward has read it, and such
a plan can beat the bound.

1.  Memory at a moment: the load of the plain step less what is away is at most the budget. The memory of replays in
    progress would only add to it.
2.  Exclusion: `swap + recompute <= 1`, and `gone`, `missing <= swap <= gone + missing`, `away_r <= recompute`. A buffer
    leaves once and returns once: `gone` never falls over its gap, `missing` and `away_r` never rise.
3.  Out of the device: what was released after op `p - 1` or later, and is gone at `m`, crossed the link between the
    end of op `p - 1` and the start of op `m`: a transfer is queued after its release and memory is free after its end.
    A link carries one at a time, so their durations add up to at most that time. Of two links see `_copy_s`.
4.  Into the device: what is missing at `m` and used at `q` or before crosses the link between the end of `m` and the
    start of `q`.
5.  Reruns: `rerun[o] >= recompute[i]` for each op in the chain of [Note: what a replay surely needs].
6.  Parents: at a moment at which a recomputed child is there again (after its gap, or `recompute - away_r = 1` within
    it), its parents are there too: they were when it was replayed, and who had left by then stays from then on.
7.  When first reruns happen: not before `p` where no candidate with the op in its chain is back before `p`, and before
    `p` where one is that is used before `p`. Where an op is in the chain of one candidate alone, exactly when that one
    is recomputed and there.
8.  When copies take compute: not before `p` where a buffer is used in forward at `p` or later; before `p` where it is
    used again before `p`, and its copy out where it is gone before `p`.
9.  Whole tensors (with `integral`): at a moment the memory of a tensor is free or not, so what counts in row 1 is 0 or
    1, and at most the shares of row 2. Two tensors that do not fit beside each other are then no longer halved.

Left out are moments that were not chosen, the memory of replays and of transfers in flight, the order of the queues,
and limits of the host: each makes the bound lower, never wrong.
"""

import math

import msgspec

from torchdelta.bounds.lp_rows import Rows
from torchdelta.bounds.saved_class import MIN_CANDIDATE_BYTES, load_without, saved_candidates
from torchdelta.machine.model import Machine
from torchdelta.plan.model import DecisionClass
from torchdelta.trace.model import Trace, load_curve

__all__ = ["Bound", "bound", "choose_moments", "least_peak_bound"]

NUM_MOMENTS = 10
"""Moments at which the memory is looked at: time-spaced local maxima of the load."""


class Bound(msgspec.Struct, frozen=True, kw_only=True):
    """A bound for all plans of a class whose dropped buffers leave right after their last use in forward.

    See [Note: why no plan of the class beats the bound].

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
        machine: Whose links carry the swaps, and from whose compute copies and replays take.
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
    nothing = Bound(
        decision_class="saved",
        budget_bytes=budget_bytes,
        feasible=True,
        time_s=plain_time_s,
        plain_time_s=plain_time_s,
    )
    if max(load_without(trace, load, everyone)) > budget_bytes:
        return msgspec.structs.replace(nothing, feasible=False, time_s=math.inf)
    small = tuple(c for c in everyone if c.size_bytes < min_candidate_bytes)
    load = load_without(trace, load, small)
    moments = choose_moments(trace, load, budget_bytes, num_moments)
    nothing = msgspec.structs.replace(nothing, moments=moments)
    if not moments:
        return nothing
    rows = Rows(trace, everyone, min_candidate_bytes, moments, machine, integral=integral)
    rows.add_memory(load, budget_bytes)
    rows.add_copies()
    rows.add_links()
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


def _shares(rows: Rows, values: list[float], action: int) -> dict[int, float]:
    """Return the largest share of each buffer that is away at a moment, by the first or the second action."""
    shares: dict[int, float] = {}
    for i, m in rows.gone:
        share, buffer_id = rows.away(values, i, m)[action], rows.everyone[i].buffer_id
        if share > max(shares.get(buffer_id, 0.0), 1e-6):
            shares[buffer_id] = share
    return shares
