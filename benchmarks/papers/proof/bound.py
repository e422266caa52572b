"""A proved lower bound for steps whose gaps nest: what is used first in forward is needed last in backward.

Ours; a dynamic program over the step from both of its ends at once. The linear program of `torchdelta.bounds` divides
tensors, and near the least budget, where one is a fifth of it, that is far too optimistic. Here the tensors are whole
that are decided, which is done until it is proved that no way to go on stays below a ceiling. For a ResNet-50 that
takes minutes, so no planner asks for it.

[Note: from both ends]
Candidates are decided one after another in the order in which backward needs them, the last one first. A candidate
that has been decided is away (unless it stays) at all ops of forward after its last use and at all ops of backward
before its next one, so the outer ops of the step, before the last use and after the next use of everybody who is not
decided, are known: they are run. Backward is run with time turned round: there a copy back is queued by the use that
waits for it, and its memory is free once the copy has *begun*. What the inner part of the step has to know of the
outer one is a state: bytes that stay, copies under way in both directions with the time left, time lost so far, and
who is *held*, which means that it is needed by a replay further in. One state makes another needless if it holds the
same and has at most its bytes, its copies at any time, and its time lost.

[Note: why no plan of the class is faster]
For any decisions of the class *saved* under the rules of the simulator (each link first in, first out, in the order of
release and of need; replays at their first need; what a replay makes or brings back stays) some path through the states
loses no more than the simulator says. Its order of everything is that of the path, the links begin at once, compute
waits only if an op would not fit, so everything happens as early as it can in each half (in backward: as late). Left
out, which makes the bound lower and never wrong: what copies and replays take of compute beside their own time; the
memory of replays under way; that a copy back begins after its
copy out has ended; copies back under way in forward, and copies out in backward; small candidates (away for nothing);
of several candidates that one op uses next all copies back but two; where two replays for one op have copies brought
back, the second one's; and a replay that held ones owe is paid when they are let go, at the latest. An op that several
chains share runs at the innermost replay: it is paid by the outermost one, and gives its time to the link at each.

[Note: which states are left out]
From some number of states on, those are left out of which it is proved that they end above the ceiling: what they have
lost and what the inner part loses at least (`inner.py`) are more. The linear program of an inner part differs
between states only in right-hand sides, so the solution for one state bounds all others from below, too, and a few
dozen solutions judge thousands of states. Where that is not enough a large tensor that a solution divides is held to
each of its decisions in turn: a state is left out if it ends above the ceiling with every one.
"""

import numpy as np
from numpy.typing import NDArray

from benchmarks.papers.proof.inner import SLOPES, InnerProgram, look_ops, outside_of
from benchmarks.papers.proof.moves import advance
from benchmarks.papers.proof.states import (
    HELD_S,
    KEPT_BYTES,
    LOST_S,
    States,
    begin,
    finish,
    look_ahead,
)
from benchmarks.papers.proof.step import Step, nest_step
from torchdelta.bounds.saved_class import MIN_CANDIDATE_BYTES
from torchdelta.machine.model import Machine
from torchdelta.trace.model import Trace

__all__ = ["nested_bound"]

_MANY = 10_000
"""From so many states on it is asked what the inner part loses."""

_MORE = 1.5
"""After an answer that left more than four fifths: so many times as many states before it is asked again."""

_BRANCH = 500
"""From so many states near the ceiling on large tensors are held to each of their decisions."""

_NEAR = 0.01
"""States that are near the ceiling: they lose less by no more than this share of it."""

_DEPTH = 7
"""So many tensors at most are held at the same time."""

_MOST_SOLUTIONS = 1500
"""After so many solutions no more tensors are held: the states that are left go on instead."""

_PATIENCE = 10
"""Solutions in a row that leave out hardly a state, before no more are asked for: so many, or more for many states."""

_STATES_A_SOLUTION = 2000
"""States for which one more solution in a row is worth its time."""

_SLACK = 1e-5
"""States whose copies end within so much of the step are not told from each other."""

_FARTHEST = 1000.0
"""Ceilings of more plain steps are taken to be none."""

_ROUNDING = 1e-9

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]


def nested_bound(
    trace: Trace,
    machine: Machine,
    budget_bytes: int,
    ceiling_s: float,
    *,
    min_candidate_bytes: int = MIN_CANDIDATE_BYTES,
    max_states: int = 2_000_000,
    many: int = _MANY,
    branch: int = _BRANCH,
) -> float:
    """Return a time that no plan of the class *saved* beats, in seconds: the least one, or `ceiling_s` if that is less.

    Args:
        trace: A priced trace (its ops carry `time_s`).
        machine: Whose host links carry the swaps.
        budget_bytes: Bytes that the device may hold at any moment.
        ceiling_s: What is to be proved at most, such as the time of the best plan known. The lower, the faster.
        min_candidate_bytes: Smaller tensors are taken to be away at no cost.
        max_states: Give up at so many, with what is proved by then.
        many: States from which on linear programs say which may be left out.
        branch: States left from which on the programs hold large tensors to one decision after another.

    Raises:
        PlanError: highspy is not installed, or HiGHS gave up.
    """
    step = nest_step(trace, machine, budget_bytes, min_candidate_bytes)
    if step is None:
        return min(ceiling_s, sum(op.time_s for op in trace.ops))
    search = _Search(step, ceiling_s - step.plain_s, many, branch)
    return min(step.plain_s + max(search.least_lost_s(max_states), 0.0) * (1.0 - _ROUNDING), ceiling_s)


class _Search:
    """The search from the outside inward. Mutable."""

    def __init__(self, step: Step, ceiling_s: float, many: int, branch: int) -> None:
        self.step = step
        self.ceiling_s = ceiling_s
        self.many, self.branch = many, branch
        self.ask = many  # after an answer that was of little use, not before there are more
        self.slack_s = _SLACK * float(step.nest.time_s.sum())

    def least_lost_s(self, max_states: int) -> float:
        """Return the least time lost, or the ceiling, or what is proved when there are too many states."""
        nest = self.step.nest
        states, proved_s = begin(), 0.0
        num_candidates = len(nest.last_op)
        for position in range(num_candidates):
            states = advance(nest, states, position, self.ceiling_s, self.slack_s)
            floats = states[1]
            least_s = floats[:, LOST_S] + floats[:, HELD_S]
            is_edge = position + 1 < num_candidates and nest.next_op[position] > nest.next_op[position + 1]
            is_far = self.ceiling_s > _FARTHEST * self.step.plain_s  # nothing to leave out there
            if (
                self.ask <= len(least_s) and is_edge and not is_far
            ):  # not between two for one op, whose copies may change places
                least_s = self._least_s(states, position + 1)
                left = least_s <= self.ceiling_s
                self.ask = max(self.many, int(_MORE * left.sum()) if left.mean() > 0.8 else 0)
                states, least_s = (states[0][left], states[1][left], states[2][left]), least_s[left]
            if not len(least_s):
                return self.ceiling_s
            proved_s = max(proved_s, float(least_s.min()))
            if len(least_s) > max_states:
                return min(proved_s, self.ceiling_s)
        ends_s = finish(nest, states, self.step.middle)
        return min(float(ends_s.min()), self.ceiling_s)

    def _least_s(self, states: States, position: int) -> Floats:
        """Return for each state what it will have lost in the end at least; infinite where it cannot end at all."""
        nest, middle, rates, _ = self.step
        masks, floats, _ = states
        out_ops, in_ops = look_ops(nest, position, middle)
        ahead = look_ahead(nest, states, position, np.array(rates), SLOPES, out_ops, in_ops)
        outside = outside_of(nest, masks, position)
        points = np.column_stack([floats[:, KEPT_BYTES], ahead, outside.flags(masks)])
        lost_s = floats[:, LOST_S] + floats[:, HELD_S]
        least_s = np.full(len(lost_s), np.inf)
        fits = np.nonzero(np.isfinite(points).all(axis=1))[0]
        if not len(fits):
            return least_s
        inner = InnerProgram(nest, position, middle, rates, outside, self.ceiling_s)
        least_s[fits] = _Judge(inner, points[fits], lost_s[fits], self.ceiling_s).least_s(0)
        near = np.nonzero((least_s <= self.ceiling_s) & (least_s >= (1 - _NEAR) * self.ceiling_s))[0]
        if len(near) >= self.branch:
            held_s = _Judge(inner, points[near], lost_s[near], self.ceiling_s).least_s(_DEPTH)
            least_s[near] = np.maximum(least_s[near], held_s)
            self.branch = max(self.branch, 2 * int(np.count_nonzero(least_s[near] <= self.ceiling_s)))
        return least_s


class _Judge:
    """Says of states at the edge of one inner program which end above the ceiling. Mutable."""

    def __init__(self, inner: InnerProgram, points: Floats, lost_s: Floats, ceiling_s: float) -> None:
        self.inner = inner
        self.points = points
        self.lost_s = lost_s
        self.ceiling_s = ceiling_s
        self.num_solutions = 0

    def least_s(self, depth: int) -> Floats:
        """Return what each state will have lost in the end at least, with up to so many candidates held."""
        return self._node(np.arange(len(self.lost_s)), depth)

    def _node(self, rows: NDArray[np.int64], depth: int) -> Floats:
        least_s, divided = self._cuts(rows)
        left = np.nonzero(least_s <= self.ceiling_s)[0]
        if not len(left) or not depth or not divided or self.num_solutions > _MOST_SOLUTIONS:
            return least_s
        candidate = max(divided, key=lambda each: (divided[each], -each))
        best_s = np.full(len(left), np.inf)  # with the decision that suits each state best
        for choice in range(3):
            if choice == 2 and not self.inner.can_drop(candidate):
                continue
            open_rows = np.nonzero(best_s > self.ceiling_s)[0]
            self.inner.hold(candidate, (float(choice == 0), float(choice == 1), float(choice == 2)))
            if len(open_rows):
                found_s = self._node(rows[left[open_rows]], depth - 1)
                best_s[open_rows] = np.minimum(best_s[open_rows], found_s)
            self.inner.let_go(candidate)
            if (best_s <= self.ceiling_s).mean() > 0.9:  # hardly anything to gain here
                best_s = least_s[left]
                break
        # Where a decision was found that stays below, the others were not asked: nothing is known beyond the cuts.
        least_s[left] = np.where(best_s > self.ceiling_s, np.maximum(least_s[left], best_s), least_s[left])
        return least_s

    def _cuts(self, rows: NDArray[np.int64]) -> tuple[Floats, dict[int, float]]:
        """Return the least losses by cuts at some of these states, and bytes of candidates that solutions divide."""
        points, lost_s = self.points[rows], self.lost_s[rows]
        least_s = lost_s.copy()
        is_open = np.ones(len(rows), np.bool_)
        divided: dict[int, float] = {}
        waiting, number = 0, 0
        patience = max(_PATIENCE, len(rows) // _STATES_A_SOLUTION)
        while waiting < patience:
            asked = np.nonzero(is_open & (least_s <= self.ceiling_s))[0]
            if not len(asked):
                break
            if number % 2:
                row = asked[number * 7919 % len(asked)]
            else:  # of those that are nearest to the ceiling
                nearest = asked[np.argsort(-least_s[asked], kind="stable")[: 1 + len(asked) // 10]]
                row = nearest[number * 104729 % len(nearest)]
            number += 1
            is_open[row] = False
            cut = self.inner.cut(points[row])
            self.num_solutions += 1
            before = int((least_s <= self.ceiling_s).sum())
            least_s = np.maximum(least_s, lost_s + cut.at(points))
            after = int((least_s <= self.ceiling_s).sum())
            waiting = 0 if before - after > max(1, before // 200) else waiting + 1
            if least_s[row] <= self.ceiling_s:
                for each, shares in self.inner.shares(cut.values).items():
                    part = 1.0 - max(shares)
                    if part > 0.02:
                        divided[each] = divided.get(each, 0.0) + part * float(self.inner.size[each])
        return least_s, divided
