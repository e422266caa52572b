"""A step played op by op under a limit, as an online policy lives through it: for `dtr` and both `delta-2022`.

The published systems are online: they act when an allocation does not fit, and bring a buffer back when it is used. The
same process is played here on a trace, and what happened *is* the plan, with its own moments: the simulator prices it
as it was played. Linear in the ops, times the search for victims (vectorised).

[Note: one op of a play]
Before an op, its missing reads come back: swapped ones by a copy for which compute waits, dropped ones by one replay
of all that is missing. Whenever memory is short, for a copy, for an op of the replay or for the op itself, the policy
evicts: a dropped buffer's memory is free at once, a swapped one's when its copy has ended, for which compute waits.
What a replay has made stays as an ordinary buffer until it is evicted; where the policy wants it (`keeps_dead`) that
includes what is dead in the step, which is evicted by dropping it.

[Note: where a play differs from the systems]
- Memory is made free *before* an allocation (`soft`: after each op), so the limit is never passed.
- A buffer without a further use in the step, or smaller than `MIN_SIZE_BYTES`, is no candidate; nor is one that could
  not be made again at its next use, where it cannot be swapped: the systems keep alive what a replay may need, while in
  a plan what is dead in the step is gone.
- A plan's replay is one moment for what leaves: a buffer that was there before a replay and that the replay reads stays
  until the op has run for which it runs, and what is evicted in mid-replay is gone before it.
"""

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from torchdelta.machine.model import Machine
from torchdelta.planners.literature.online_policy import Policy
from torchdelta.planners.literature.played_program import Away, PlayedProgram
from torchdelta.planners.literature.played_step import PlayedStep
from torchdelta.planners.literature.played_time import PlayedTime
from torchdelta.trace.model import BEFORE_STEP, Op

__all__ = ["NoCandidateError", "Play"]


class NoCandidateError(Exception):
    """Memory is short, and nothing is left to evict. Never reaches a user."""


class Play:
    """The state of the play; a policy reads it as `online_policy.State`. Mutable; `program` is the record."""

    def __init__(
        self,
        step: PlayedStep,
        machine: Machine,
        limit_bytes: int,
        policy: Policy,
        *,
        soft: bool = False,
        synchronous: bool = False,
    ) -> None:
        """Prepare a play.

        Where it is `soft` it evicts after each op and not before it, and goes on where nothing is left to
        evict. Where it is `synchronous` compute waits for every copy as soon as it is queued.
        """
        num_buffers, num_ops = len(step.trace.buffers), step.num_ops
        self.step, self.program = step, PlayedProgram(step.trace)
        self.clock_s = 0.0
        self.last_access_s: NDArray[np.float64] = np.zeros(num_buffers)
        self._policy, self._limit_bytes, self._soft = policy, limit_bytes, soft
        self._time = PlayedTime(step, machine, synchronous=synchronous)
        self._op = 0
        self._resident = np.array([b.birth_op == BEFORE_STEP for b in step.trace.buffers], dtype=np.bool_)
        self._used_bytes = int(step.size_bytes[self._resident].sum())
        self._most_bytes = 0  # at the op at hand
        self._next_use = np.full(num_buffers, num_ops, dtype=np.int64)
        self._last_use = np.full(num_buffers, -1, dtype=np.int64)
        self._locked = np.zeros(num_buffers, dtype=np.bool_)
        self._kept = np.zeros(num_buffers, dtype=np.bool_)  # dead in the step, made by a replay
        self._ids = np.flatnonzero(step.evictable)
        self._away: dict[int, Away] = {}
        self._arriving: dict[int, Away] = {}  # by buffer: fetched ahead and not used yet
        self._under_way = np.zeros(num_buffers, dtype=np.bool_)  # of these, compute would have to wait for it
        self._swapped: list[int] = []  # in the order in which they left
        self._made: set[int] = set()  # by the replay before the op at hand

    def run(self) -> PlayedProgram:
        """Play the step and return what happened.

        Raises:
            NoCandidateError: At some moment nothing is left to evict.
        """
        for op in self.step.trace.ops:
            self._op, self._most_bytes = op.index, self._used_bytes
            self._die(self.step.freed[op.index])
            chain, copied = self._missing(op)
            self._fetch(copied)
            self._replay(chain, op)
            self._run(op)
            self._end_replay(chain)
            if self._time.waits:
                self._prefetch()
            self._pass_time(op, chain)
            self._use(op)
            if self._soft:
                self._locked[:] = False
                self._shrink_to(self._limit_bytes, op.index + 1)
        return self.program

    def _die(self, ids: Iterable[int]) -> None:
        for id_ in ids:
            if self._resident[id_]:
                self._free(id_)
                if self.step.evictable[id_]:
                    self._policy.dropped(id_)

    def _missing(self, op: Op) -> tuple[list[int], list[int]]:
        """Return the ops that run again before an op, in order, and what is copied in; lock all that is needed."""
        self._locked[:] = False
        ops, copied, stack = set[int](), dict[int, None](), [op.reads]
        while stack:
            for id_ in stack.pop():
                self._locked[id_] = True
                if self._resident[id_]:
                    if id_ in self._arriving:
                        away = self._arriving.pop(id_)
                        away.next_use_op = self._op
                        self._under_way[id_] = False
                        self._time.waits.append(away)
                elif id_ in self._away and self._away[id_].action == "swap":
                    copied[id_] = None
                elif id_ in self.step.producer and self.step.producer[id_] not in ops:
                    ops.add(self.step.producer[id_])
                    stack.append(self.step.reads[self.step.producer[id_]])
        return sorted(ops), list(copied)

    def _fetch(self, ids: list[int]) -> None:
        """Bring swapped buffers back that are needed now."""
        self._make_room(self._bytes(ids))
        for id_ in ids:
            away = self._bring(id_)
            away.next_use_op = self._op
            self._time.waits.append(away)

    def _prefetch(self) -> None:
        """Bring swapped buffers back ahead of their use, the last to leave first, while there is room."""
        while self._swapped and len(self._arriving) < self._policy.prefetch_count:
            id_ = self._swapped[-1]
            away = self._away.get(id_)
            if away is None or away.action != "swap":  # it is back already
                self._swapped.pop()
                continue
            size_bytes = int(self.step.size_bytes[id_])
            if away.leave_op == self._op or self._most_bytes + size_bytes > self._limit_bytes:
                return
            self._swapped.pop()
            self._arriving[id_] = self._bring(id_)
            self._under_way[id_] = True
            self._most_bytes += size_bytes

    def _bring(self, id_: int) -> Away:
        away = self._away.pop(id_)
        away.return_op, away.return_rank = self._op, len(self._time.copies_in)
        self._time.copies_in.append(away)
        self._take(id_)
        self._last_use[id_] = self._op
        self.last_access_s[id_] = self.clock_s
        return away

    def _replay(self, chain: list[int], op: Op) -> None:
        """Run ops again; what they make is there for the op, and later while there is room."""
        step = self.step
        last_read = {id_: place for place, index in enumerate(chain) for id_ in step.reads[index]}
        fleeting: set[int] = set()
        for place, index in enumerate(chain):
            again = step.trace.ops[index]
            new = [id_ for id_ in again.writes if not self._resident[id_]]
            old = [id_ for id_ in step.overwritten[index] if id_ in fleeting or self._kept[id_]]
            inside_bytes = again.workspace_bytes + self._bytes(id_ for id_ in again.writes if self._resident[id_])
            self._make_room(inside_bytes + self._bytes(new) - self._bytes(old))
            for id_ in old:
                self._overwrite(id_)
            fleeting.difference_update(old)
            self.clock_s += again.time_s
            for id_ in new:
                self._take(id_)
                if self._stays(id_, index):
                    self._made.add(id_)
                    self._kept[id_] = id_ not in self._away
                    self._policy.remade(id_)
                else:
                    fleeting.add(id_)
            self.last_access_s[list(step.reads[index])] = self.clock_s
            for id_ in (*step.reads[index], *new):
                self._last_use[id_] = self._op
            done = [id_ for id_ in (*step.reads[index], *new) if last_read.get(id_, -1) <= place]
            for id_ in done:
                if id_ in fleeting:
                    fleeting.discard(id_)
                    self._free(id_)
                elif id_ in self._made and id_ not in op.reads:
                    self._locked[id_] = False
            if self._soft:
                self._shrink_to(self._limit_bytes, self._op)

    def _stays(self, id_: int, index: int) -> bool:
        """Whether what a replay makes is an ordinary buffer from there on, and not gone after its last read in it."""
        away = self._away.get(id_)
        stays = self._policy.keeps_dead if away is None else away.action == "recompute"
        return stays and bool(self.step.evictable[id_]) and id_ in self.step.makes[index]

    def _overwrite(self, id_: int) -> None:
        """Let a replay write over what it, or one before it, has made."""
        if id_ in self._made:
            self._made.discard(id_)
        elif self._kept[id_]:
            self.program.drop_kept(id_, self._op + 1)
        if self._kept[id_]:
            self._policy.dropped(id_)
        self._kept[id_] = False
        self._free(id_)

    def _run(self, op: Op) -> None:
        old = [id_ for id_ in self.step.overwritten[op.index] if self._resident[id_]]
        self._make_room(self._bytes(op.writes) - self._bytes(old) + op.workspace_bytes)
        self._die(old)
        for id_ in op.writes:
            self._take(id_)

    def _end_replay(self, chain: list[int]) -> None:
        """Have what the replay made, and what was not evicted since, stay."""
        if chain:
            self.program.replay(self._op, chain)
        for id_ in self._made:
            if self._kept[id_]:
                self.program.keep(id_, self._op)
            else:
                away = self._away.pop(id_)
                away.return_op = away.next_use_op = self._op
        self._made.clear()

    def _pass_time(self, op: Op, chain: list[int]) -> None:
        for away in self._time.run(op.index, chain, self._arriving.values()):
            self._last_use[away.buffer_id] = op.index
            self._under_way[away.buffer_id] = False
        self.clock_s = self._time.now_s

    def _use(self, op: Op) -> None:
        for id_, next_use in zip((*op.reads, *op.writes), self.step.next_uses[op.index], strict=True):
            self._next_use[id_], self._last_use[id_] = next_use, op.index
            self.last_access_s[id_] = self.clock_s

    def _make_room(self, need_bytes: int) -> None:
        if not self._soft:
            self._shrink_to(self._limit_bytes - need_bytes, self._op)
        self._most_bytes = max(self._most_bytes, self._used_bytes + need_bytes)

    def _shrink_to(self, limit_bytes: int, leave_op: int) -> None:
        while self._used_bytes > limit_bytes:
            candidates = self._candidates(leave_op)
            if len(candidates):
                self._evict(int(candidates[int(np.argmin(self._policy.scores(self, candidates)))]), leave_op)
            elif self._soft:
                return
            else:
                raise NoCandidateError

    def _candidates(self, leave_op: int) -> NDArray[np.int64]:
        ids = self._ids
        ids = ids[self._resident[ids] & ~self._locked[ids] & ~self._under_way[ids]]
        next_use = self._next_use[ids]
        away_for_a_while = (next_use > leave_op) & (next_use < self.step.num_ops)
        if not self._policy.can_swap:
            away_for_a_while &= self.step.remade_until[ids] >= next_use
        return ids[away_for_a_while | self._kept[ids]]

    def _evict(self, id_: int, leave_op: int) -> None:
        self._free(id_)
        if id_ in self._made:  # back for this replay alone
            self._made.discard(id_)
            self._policy.dropped(id_)
        elif self._kept[id_]:
            self.program.drop_kept(id_, leave_op)
            self._policy.dropped(id_)
        else:
            if id_ in self._arriving:  # fetched ahead for nothing
                fetched = self._arriving.pop(id_)
                fetched.next_use_op = fetched.arrived_op
            can_recompute = self.step.remade_until[id_] >= self._next_use[id_]
            recomputes = not self._policy.can_swap or (can_recompute and self._policy.recomputes(self, id_))
            action = "recompute" if recomputes else "swap"
            away = self.program.leave(id_, action, int(self._last_use[id_]), leave_op)
            self._away[id_] = away
            if recomputes:
                self._policy.dropped(id_)
            else:
                self._time.copies_out.append(away)
                self._swapped.append(id_)
        self._kept[id_] = False

    def _bytes(self, ids: Iterable[int]) -> int:
        return sum(int(self.step.size_bytes[id_]) for id_ in ids)

    def _take(self, id_: int) -> None:
        self._resident[id_] = True
        self._used_bytes += int(self.step.size_bytes[id_])

    def _free(self, id_: int) -> None:
        self._resident[id_] = False
        self._used_bytes -= int(self.step.size_bytes[id_])
