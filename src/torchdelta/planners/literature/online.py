"""A step played op by op under a hard limit, as an online policy would live through it: for `dtr` and `delta-2022`.

The published systems are online: they act when an allocation does not fit. Here the same process is played on a trace,
and what it did becomes the decisions of a plan: a gap in which the buffer was evicted is one in which it leaves. So it
is judged by the same simulator as every other plan. Linear in the ops, times the victims' search (vectorised).

Where an online system differs from this reading, on purpose and in its favour: memory is made free *before* an
allocation (the originals evict afterwards and pass their budget); a buffer without a further use is no candidate; and
a plan knows the gap, so that a buffer leaves right after its last use and not when memory runs out.
"""

from collections.abc import Iterable
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from torchdelta.planners.literature.lower_limit import NoChoiceError
from torchdelta.simulate.gaps import Gap
from torchdelta.simulate.model import Code
from torchdelta.simulate.problem import PlanningProblem
from torchdelta.trace.model import BEFORE_STEP, Trace

__all__ = ["Play", "Policy", "frugal", "play"]

_KEEP, _AGAIN = int(Code.KEEP), int(Code.AGAIN)
_DROPPED = frozenset({int(Code.RECOMPUTE), int(Code.AGAIN)})


class Policy(Protocol):
    """Who leaves, and how."""

    def scores(self, state: "Play", candidates: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return a score for each of these buffers: the lowest leaves."""
        ...

    def action(self, state: "Play", buffer_id: int) -> int:
        """Return the `Code` by which a buffer leaves."""
        ...

    def left(self, state: "Play", buffer_id: int) -> None:
        """Take note that a buffer was evicted."""
        ...

    def came_back(self, state: "Play", buffer_id: int) -> None:
        """Take note that it is there again."""
        ...


class Play:
    """The state of the play. Mutable; a policy reads it.

    Attributes:
        trace: The step.
        gaps: The gaps in which buffers may leave.
        clock_s: Time since the start, replays included.
        last_access_s: When each buffer was last read or written.
        size_bytes: Size of each buffer.
        open_gap: The gap that each buffer is in, -1 if it is in none.
        codes: What was decided for each gap.
    """

    def __init__(self, trace: Trace, gaps: tuple[Gap, ...], limit_bytes: int, policy: Policy, *, soft: bool) -> None:
        self.trace, self.gaps, self._limit_bytes, self._policy = trace, gaps, limit_bytes, policy
        self._soft = soft
        num_buffers = len(trace.buffers)
        self.clock_s = 0.0
        self.last_access_s = np.zeros(num_buffers)
        self.size_bytes = np.array([b.size_bytes for b in trace.buffers], dtype=np.int64)
        self.open_gap = np.full(num_buffers, -1, dtype=np.int64)
        self.codes = np.zeros(len(gaps), dtype=np.int8)
        self._resident = np.array([b.birth_op == BEFORE_STEP for b in trace.buffers], dtype=np.bool_)
        self._locked = np.zeros(num_buffers, dtype=np.int64)
        self._producer = {id_: op.index for op in trace.ops for id_ in op.writes}
        self._gap_after = {(gap.buffer_id, gap.last_use_op): index for index, gap in enumerate(gaps)}
        self._ids = np.array(sorted({gap.buffer_id for gap in gaps}), dtype=np.int64)
        self._deaths: list[list[int]] = [[] for _ in range(len(trace.ops) + 1)]
        for buffer in trace.buffers:
            self._deaths[buffer.death_op].append(buffer.id)
        self._used_bytes = int(self.size_bytes[self._resident].sum())
        self._op = 0

    def run(self) -> NDArray[np.int8]:
        """Play the step and return the codes."""
        for op in self.trace.ops:
            self._op = op.index
            self._lock(op.reads)
            for id_ in op.reads:
                if not self._resident[id_] and self.trace.buffers[id_].death_op >= op.index:
                    self._bring(id_)
            self._release(self._deaths[op.index])
            self._make_room(sum(int(self.size_bytes[id_]) for id_ in op.writes) + op.workspace_bytes)
            self._admit(op.writes)
            self.clock_s += op.time_s
            for id_ in (*op.reads, *op.writes):
                self.last_access_s[id_] = self.clock_s
                self.open_gap[id_] = self._gap_after.get((id_, op.index), -1)
            self._unlock(op.reads)
            if self._soft:
                self._shrink_to(self._limit_bytes)
        return self.codes

    def _lock(self, ids: Iterable[int]) -> None:
        for id_ in ids:
            self._locked[id_] += 1

    def _unlock(self, ids: Iterable[int]) -> None:
        for id_ in ids:
            self._locked[id_] -= 1

    def _admit(self, ids: Iterable[int]) -> None:
        for id_ in ids:
            if not self._resident[id_]:
                self._resident[id_] = True
                self._used_bytes += int(self.size_bytes[id_])

    def _release(self, ids: Iterable[int]) -> None:
        for id_ in ids:
            if self._resident[id_]:
                self._resident[id_] = False
                self._used_bytes -= int(self.size_bytes[id_])
            self.open_gap[id_] = -1

    def _make_room(self, need_bytes: int) -> None:
        if self._soft:
            return
        self._shrink_to(self._limit_bytes - need_bytes)

    def _shrink_to(self, limit_bytes: int) -> None:
        while self._used_bytes > limit_bytes:
            ids = self._ids
            candidates = ids[self._resident[ids] & (self.open_gap[ids] >= 0) & (self._locked[ids] == 0)]
            if not len(candidates):
                if self._soft:
                    return
                raise NoChoiceError
            self._evict(int(candidates[int(np.argmin(self._policy.scores(self, candidates)))]))

    def _evict(self, id_: int) -> None:
        gap = int(self.open_gap[id_])
        if self.codes[gap] == _KEEP:
            self.codes[gap] = self._policy.action(self, id_)
        elif self.gaps[gap].can_recompute:
            # The second time within one gap: a replay met it, and it left again before its own use.
            self.codes[gap] = _AGAIN
        self._resident[id_] = False
        self._used_bytes -= int(self.size_bytes[id_])
        self._policy.left(self, id_)

    def _bring(self, id_: int) -> None:
        """Make an evicted buffer resident, by a copy or by the replay of its whole missing chain."""
        if int(self.codes[self.open_gap[id_]]) not in _DROPPED:
            self._make_room(int(self.size_bytes[id_]))
            self._admit((id_,))
            self._policy.came_back(self, id_)
            return
        ops, copied = self._chain(id_)
        for other in copied:
            self._lock((other,))
            self._bring(other)
        uses = {read: index for index in ops for read in self.trace.ops[index].reads}  # the last one within the replay
        for index in ops:
            self._lock(self.trace.ops[index].reads)
        for index in ops:
            op = self.trace.ops[index]
            made = [write for write in op.writes if not self._resident[write]]
            self._make_room(sum(int(self.size_bytes[write]) for write in made) + op.workspace_bytes)
            self._admit(made)
            self.clock_s += op.time_s
            for other in (*op.reads, *made):
                self.last_access_s[other] = self.clock_s
            for other in made:
                if self._stays(other, id_):
                    self._policy.came_back(self, other)
                elif other not in uses:
                    self._free(other)
            self._unlock(op.reads)
            for read in op.reads:
                if uses[read] == index and self._is_transient(read):
                    self._free(read)
        self._unlock(copied)

    def _chain(self, id_: int) -> tuple[list[int], list[int]]:
        """Return the ops that bring a dropped buffer back, in order, and the swapped buffers that they read."""
        ops, copied, stack = {self._producer[id_]}, dict[int, None](), [self._producer[id_]]
        while stack:
            for read in self.trace.ops[stack.pop()].reads:
                if self._resident[read] or read not in self._producer:
                    continue
                gap = int(self.open_gap[read])
                if gap >= 0 and int(self.codes[gap]) not in _DROPPED:
                    copied[read] = None
                elif self._producer[read] not in ops:
                    ops.add(self._producer[read])
                    stack.append(self._producer[read])
        return sorted(ops), list(copied)

    def _stays(self, other: int, wanted: int) -> bool:
        return other == wanted or self.open_gap[other] >= 0

    def _is_transient(self, id_: int) -> bool:
        """Tell whether a buffer is there only for a replay: dead in the step itself, and no input of the op at hand."""
        dead = self.trace.buffers[id_].death_op <= self._op
        return bool(self._resident[id_]) and dead and self.open_gap[id_] < 0 and not self._locked[id_]

    def _free(self, id_: int) -> None:
        self._resident[id_] = False
        self._used_bytes -= int(self.size_bytes[id_])


def play(
    trace: Trace, gaps: tuple[Gap, ...], limit_bytes: int, policy: Policy, *, soft: bool = False
) -> NDArray[np.int8]:
    """Return the codes that a policy ends with under a limit.

    Args:
        trace: A priced trace.
        gaps: In which buffers may leave.
        limit_bytes: Bytes on the device.
        policy: Who leaves, and how.
        soft: Evict after each op and not before it, and go on where nothing is left to evict.

    Raises:
        NoChoiceError: At some moment nothing is left to evict.
    """
    return Play(trace, gaps, limit_bytes, policy, soft=soft).run()


def frugal(problem: PlanningProblem, codes: NDArray[np.int8], budget_bytes: int) -> NDArray[np.int8]:
    """Let what replays met stay, where that holds the budget and is faster than to drop and make it once more.

    A play drops a buffer a second time in one gap at the moment at which memory runs out; a plan can only say whether
    replays leave it there or not, for the whole gap.
    """
    staying = np.where(codes == _AGAIN, np.int8(Code.RECOMPUTE), codes)
    first, second = problem.score(staying, budget_bytes), problem.score(codes, budget_bytes)
    if first.is_feasible and (first.time_s <= second.time_s or not second.is_feasible):
        return staying
    return codes
