"""What a plan means for memory, written once: the step moment by moment, with the buffers that are on the device.

The validator holds these moments against a budget, the pool makes lives of them, and the simulator reads its peak off
them. `docs/plan-format.md` says the same in words.

Time is finer here than in the trace: every op of a replay is a moment of its own, before that of the op for which it
runs. Before each op, in this order: what has died is freed, then what a replay kept until here, then what leaves here;
what is swapped in here takes its memory; then the replay runs. What the op itself writes over is there until it runs.

Linear in ops, reads and what the replays run.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate

import msgspec

from torchdelta.plan.model import Absence, Plan, Replay, TierName
from torchdelta.plan.over_end import parts_within_step
from torchdelta.trace.model import BEFORE_STEP, Op, Trace, versions_over_end
from torchdelta.trace.replay_reads import replay_makes, replay_reads

__all__ = ["Moment", "Walk", "tier_load"]


class Moment(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One op that runs, in the step or in a replay, and what has changed since the moment before.

    Attributes:
        at_op: The op of the step that runs, or before which the replay runs.
        op: The op that runs.
        is_replay: Whether it runs in a replay.
        freed: Buffers that have given their memory back since the moment before.
        taken: Buffers that have taken memory since then, after that; the first moment has what the step begins with.
        replaced: Versions and the ones that the op writes over them in place, in the same memory.
        inside_bytes: What the op allocates beside these: its workspace, and outputs that are there already.
        held_bytes: Bytes on the device, all of this included.
        missing: Buffers that the op reads and that are not on the device.
        unready: Buffers that it reads and whose copy in compute has not waited for.
        unmade: Buffers that were to return before this op by a replay that does not write them.
    """

    at_op: int
    op: int
    is_replay: bool
    freed: tuple[int, ...] = ()
    taken: tuple[int, ...] = ()
    replaced: tuple[tuple[int, int], ...] = ()
    inside_bytes: int
    held_bytes: int
    missing: tuple[int, ...] = ()
    unready: tuple[int, ...] = ()
    unmade: tuple[int, ...] = ()


class Walk:
    """The step under a plan. Mutable; `moments` goes through it once.

    Attributes:
        here: The buffers that are on the device at the moment that `moments` gave last.
    """

    def __init__(self, trace: Trace, plan: Plan) -> None:
        self.here: set[int] = set()
        self._trace, self._buffers = trace, trace.buffers
        self._used_bytes = 0
        self._freed: list[int] = []
        self._taken: list[int] = []
        self._kept_until: dict[int, int] = {}
        self._ready_op: dict[int, int] = {}  # by buffer on its way in: the op before which compute waits for it
        self._replays = {replay.at_op: replay for replay in plan.replays}
        num_ops = len(trace.ops)
        self._leaving: list[list[Absence]] = [[] for _ in range(num_ops + 1)]
        self._returning: list[list[Absence]] = [[] for _ in range(num_ops + 1)]
        self._arriving: list[list[tuple[int, int]]] = [[] for _ in range(num_ops + 1)]
        self._deaths: list[list[int]] = [[] for _ in range(num_ops + 1)]
        over_end = versions_over_end(trace)
        for absence in plan.absences:
            for part in parts_within_step(trace, absence, over_end):
                if part.action == "recompute" or part.leave_op < part.return_op:  # else its memory is never free
                    self._leaving[part.leave_op].append(part)
                    self._returning[part.return_op].append(part)
            if absence.action == "swap":
                later = num_ops if absence.return_op >= num_ops else 0
                id_ = over_end[absence.buffer_id].id if later else absence.buffer_id
                self._arriving[absence.return_op - later].append((id_, absence.next_use_op - later))
        for buffer in trace.buffers:
            self._deaths[buffer.death_op].append(buffer.id)

    def moments(self) -> Iterator[Moment]:
        """Go through the step."""
        self._take(buffer.id for buffer in self._buffers if buffer.birth_op == BEFORE_STEP)
        for op in self._trace.ops:
            yield from self._before(op)
            targets = [part.buffer_id for part in self._returning[op.index] if part.action == "recompute"]
            missing = tuple(id_ for id_ in op.reads if id_ not in self.here)
            unmade = tuple(id_ for id_ in targets if id_ not in self.here)
            unready = self._unready(op.reads, op.index)
            replaced = self._write(op, {id_ for id_ in self._deaths[op.index] if id_ in self.here})
            yield self._moment(
                op, op, 0, replaced=replaced, is_replay=False, missing=missing, unready=unready, unmade=unmade
            )

    def _before(self, op: Op) -> Iterator[Moment]:
        """Let go and come back what does so before an op, and run the replay there."""
        index = op.index
        written = {self._buffers[id_].storage_id for id_ in op.writes}
        self._free(id_ for id_ in self._deaths[index] if self._buffers[id_].storage_id not in written)
        expired = [id_ for id_, until in self._kept_until.items() if until <= index]
        self._free(expired)
        for id_ in expired:
            del self._kept_until[id_]
        leaving, returning = self._leaving[index], self._returning[index]
        self._free(part.buffer_id for part in leaving)
        for part in returning:
            self._kept_until.pop(part.buffer_id, None)
        self._take(part.buffer_id for part in returning if part.action == "swap")
        self._ready_op.update(self._arriving[index])
        if index in self._replays:
            yield from self._replay(self._replays[index])

    def _replay(self, replay: Replay) -> Iterator[Moment]:
        at_op = self._trace.ops[replay.at_op]
        stays = {part.buffer_id for part in self._returning[at_op.index] if part.action == "recompute"}
        kept = {keep.buffer_id: keep.until_op for keep in replay.keeps}
        last_read = {id_: place for place, op in enumerate(replay.ops) for id_ in replay_reads(self._trace, op)}
        made: set[int] = set()
        scratch: set[int] = set()  # takes memory, but is not the content that the step had there
        for place, index in enumerate(replay.ops):
            op = self._trace.ops[index]
            reads = replay_reads(self._trace, index)
            missing = tuple(id_ for id_ in reads if id_ not in self.here or id_ in scratch)
            unready = self._unready(reads, at_op.index)
            twice = [id_ for id_ in op.writes if id_ in self.here]
            new = [id_ for id_ in op.writes if id_ not in self.here]
            written = {self._buffers[id_].storage_id for id_ in op.writes}
            made_before = (id_ for id_ in (*made, *self._kept_until) if self._buffers[id_].death_op == index)
            old = {id_ for id_ in made_before if self._buffers[id_].storage_id in written}
            replaced = self._write(op, old)
            gone = {id_ for id_ in old if id_ in self.here}  # for what is there already
            self._free(gone)
            gone.update(id_ for id_, _ in replaced)
            made.difference_update(gone)
            for id_ in gone:
                self._kept_until.pop(id_, None)
            made.update(new)
            scratch.update(set(new).difference(replay_makes(self._trace, index)))
            twice_bytes = sum(self._buffers[id_].size_bytes for id_ in twice)
            yield self._moment(
                at_op, op, twice_bytes, replaced=replaced, is_replay=True, missing=missing, unready=unready
            )
            stay = (stays | kept.keys()) - scratch
            done = [id_ for id_ in made if last_read.get(id_, -1) <= place and id_ not in stay]
            self._free(done)
            made.difference_update(done)
        self._kept_until.update({id_: until for id_, until in kept.items() if id_ in made})

    def _unready(self, ids: Iterable[int], at_op: int) -> tuple[int, ...]:
        return tuple(id_ for id_ in ids if self._ready_op.get(id_, 0) > at_op) if self._ready_op else ()

    def _write(self, op: Op, old: set[int]) -> tuple[tuple[int, int], ...]:
        """Let an op write: over these old versions where they are of the same storage, else in fresh memory."""
        by_storage = {self._buffers[id_].storage_id: id_ for id_ in old}
        replaced: list[tuple[int, int]] = []
        for id_ in op.writes:
            before = by_storage.get(self._buffers[id_].storage_id)
            if before is None or id_ in self.here:
                self._take((id_,))
                continue
            replaced.append((before, id_))
            self.here.discard(before)
            self.here.add(id_)
            self._used_bytes += self._buffers[id_].size_bytes - self._buffers[before].size_bytes
        return tuple(replaced)

    def _moment(
        self,
        at_op: Op,
        op: Op,
        twice_bytes: int,
        *,
        replaced: tuple[tuple[int, int], ...],
        is_replay: bool,
        missing: tuple[int, ...],
        unready: tuple[int, ...],
        unmade: tuple[int, ...] = (),
    ) -> Moment:
        freed, self._freed = tuple(self._freed), []
        taken, self._taken = tuple(self._taken), []
        inside_bytes = op.workspace_bytes + twice_bytes
        return Moment(
            at_op=at_op.index,
            op=op.index,
            is_replay=is_replay,
            freed=freed,
            taken=taken,
            replaced=replaced,
            inside_bytes=inside_bytes,
            held_bytes=self._used_bytes + inside_bytes,
            missing=missing,
            unready=unready,
            unmade=unmade,
        )

    def _take(self, ids: Iterable[int]) -> None:
        for id_ in ids:
            if id_ not in self.here:
                self.here.add(id_)
                self._taken.append(id_)
                self._used_bytes += self._buffers[id_].size_bytes

    def _free(self, ids: Iterable[int]) -> None:
        for id_ in ids:
            if id_ in self.here:
                self.here.discard(id_)
                self._used_bytes -= self._buffers[id_].size_bytes
                if id_ in self._taken:  # came and went without a moment in between
                    self._taken.remove(id_)
                else:
                    self._freed.append(id_)


def tier_load(trace: Trace, absences: Sequence[Absence], tier: TierName) -> list[int]:
    """Return the bytes that the host or the disk holds at each op.

    It holds a buffer from the op after which its copy out is queued until its next use has run; over the end of the
    step, at both ends of it.
    """
    num_ops = len(trace.ops)
    changes = [0] * (num_ops + 2)
    for absence in absences:
        if absence.action != "swap" or absence.tier != tier:
            continue
        size_bytes = trace.buffers[absence.buffer_id].size_bytes
        changes[absence.queued_op + 1] += size_bytes
        if absence.next_use_op < num_ops:
            changes[absence.next_use_op + 1] -= size_bytes
        else:  # there already when the step begins
            changes[0] += size_bytes
            changes[absence.next_use_op - num_ops + 1] -= size_bytes
    return list(accumulate(changes))[:num_ops]
