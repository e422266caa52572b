"""The decision class *saved*, read off a trace: who may leave over which gap, and what a replay of it surely needs.

The bounds build on this and on nothing of the simulator, so that a mistake there cannot hide here. Whatever the trace
leaves open is read in favour of the plan: a bound may be too low, never too high.

[Note: when an op may run again]
A replay runs immediately before the op that uses a dropped buffer next: the *target*. It runs what made the target, and
what made any input of that which is not there. `_reruns` walks from the uses back to the producers, and tells for each
op the first and the last op before which it may run again, whatever is decided:

- a candidate may be the target, before its `next_use_op`;
- an input that may leave by replay is missing at most inside its own gap, up to its next use;
- an input that dies is missing from its death on; what an op overwrites is there until that op.

Ops that cannot run twice end the walk. An op may write several candidates: whoever wants one has all of them back.

[Note: what a replay surely needs]
A candidate that is dropped is back at its next use, or earlier where what made it runs again earlier: at `earliest_op`
or later. An input of an op that brings it back is

- a candidate that lives on: it must be on the device then, and since it leaves only once, until its own next use, if it
  had left by then;
- dead by `earliest_op`: its producer runs again too, in the same replay;
- anything else (alive, or of unknown state): free.

What a replay needs is `replay_reads` of its ops. Contents from before the step are taken to be there, also those that
the step overwrites, and so are statistics that no replay makes: a bound may assume it.
"""

import msgspec

from torchdelta.trace.model import BEFORE_STEP, Trace
from torchdelta.trace.replay_reads import last_found_ops, replay_makes, replay_reads

__all__ = ["MIN_CANDIDATE_BYTES", "Candidate", "load_without", "saved_candidates"]

MIN_CANDIDATE_BYTES = 256 * 1024
"""Smaller tensors are no variables of a bound: they are away whenever they might be, at no cost."""


class Candidate(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A buffer that may leave once, over the gap between its uses in forward and in backward.

    Attributes:
        buffer_id: The buffer.
        size_bytes: Bytes of its storage.
        last_use_op: Its last use in forward; its birth if nothing there reads it.
        next_use_op: Its first use after forward.
        producer_op: The op that wrote it.
        recomputable: Whether a replay may bring it back.
        earliest_op: No replay brings it back before this op.
        parents: Positions of the candidates that must be on the device when it is brought back by a replay, and that
            have left by then if they leave at all.
        chain_ops: Ops that surely run again in the replay that brings it back, its producer included.
    """

    buffer_id: int
    size_bytes: int
    last_use_op: int
    next_use_op: int
    producer_op: int
    recomputable: bool
    earliest_op: int
    parents: tuple[int, ...]
    chain_ops: tuple[int, ...]


def saved_candidates(trace: Trace) -> tuple[Candidate, ...]:
    """Return every candidate of the class *saved*, by buffer id, however small.

    Linear in the reads of the ops, times the length of a replay's chain.
    """
    return _SavedClass(trace).candidates()


def load_without(trace: Trace, load_bytes: list[int], candidates: tuple[Candidate, ...]) -> list[int]:
    """Return the load at each op if every candidate were away whenever it can be: no plan of the class goes below."""
    changes = [0] * (len(trace.ops) + 2)
    for candidate in candidates:
        changes[candidate.last_use_op + 1] += candidate.size_bytes
        changes[candidate.next_use_op] -= candidate.size_bytes
    away, least = 0, list[int]()
    for op, load in enumerate(load_bytes):
        away += changes[op]
        least.append(load - away)
    return least


class _SavedClass:
    """A trace as the walks over its replays need it. Lives as long as one call of `saved_candidates`."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.reads = [replay_reads(trace, op.index) for op in trace.ops]
        self.producer = {id_: op.index for op in trace.ops for id_ in replay_makes(trace, op.index)}
        self.last_found = last_found_ops(trace)
        self.gaps = _gaps(trace)
        self.first_rerun, self.last_rerun = self._reruns()

    def candidates(self) -> tuple[Candidate, ...]:
        position = {buffer_id: index for index, buffer_id in enumerate(self.gaps)}
        found: list[Candidate] = []
        for id_, (last_use_op, next_use_op) in self.gaps.items():
            producer_op = self.producer.get(id_, -1)
            earliest_op = next_use_op
            if producer_op >= 0:
                earliest_op = min(max(self.first_rerun[producer_op], last_use_op + 1), next_use_op)
            recomputable, parents, chain = self._replay(id_, earliest_op)
            found.append(
                Candidate(
                    buffer_id=id_,
                    size_bytes=self.trace.buffers[id_].size_bytes,
                    last_use_op=last_use_op,
                    next_use_op=next_use_op,
                    producer_op=producer_op,
                    recomputable=recomputable,
                    earliest_op=earliest_op,
                    parents=tuple(sorted(position[parent] for parent in parents)),
                    chain_ops=tuple(sorted(chain)),
                )
            )
        return tuple(found)

    def _reruns(self) -> tuple[list[int], list[int]]:
        """Return the first and the last op before which each op may run again. See [Note: when an op may run again]."""
        num_ops = len(self.trace.ops)
        first, last = [num_ops] * num_ops, [-1] * num_ops

        def may_run(op: int, from_op: int, to_op: int) -> None:
            if self.trace.ops[op].recomputable and from_op <= to_op:
                first[op], last[op] = min(first[op], from_op), max(last[op], to_op)

        for id_, (_, next_use_op) in self.gaps.items():
            if id_ in self.producer:
                may_run(self.producer[id_], next_use_op, next_use_op)
        for op in reversed(range(num_ops)):  # who reads stands behind who writes
            if last[op] < 0:
                continue
            for read in self.reads[op]:
                producer = self.producer.get(read)
                if producer is None:
                    continue
                may_run(producer, max(first[op], self.last_found[read] + 1), last[op])
                if read in self.gaps:
                    last_use_op, next_use_op = self.gaps[read]
                    may_run(producer, max(first[op], last_use_op + 1), min(last[op], next_use_op))
        return first, last

    def _replay(self, id_: int, earliest_op: int) -> tuple[bool, set[int], set[int]]:
        """Return whether a candidate may be recomputed, its parents, and the ops that surely run with it."""
        if id_ not in self.producer:
            return False, set(), set()
        chain, stack, parents = {self.producer[id_]}, [self.producer[id_]], set[int]()
        while stack:
            op = stack.pop()
            if not self.trace.ops[op].recomputable:
                return False, set(), set()
            for read in self.reads[op]:
                producer = self.producer.get(read)
                if producer is None:
                    continue
                if self.last_found[read] >= earliest_op:
                    if read in self.gaps and self.gaps[read][0] < earliest_op:
                        parents.add(read)
                elif producer not in chain:
                    chain.add(producer)
                    stack.append(producer)
        return True, parents, chain


def _gaps(trace: Trace) -> dict[int, tuple[int, int]]:
    """Return (last use in forward, first use in backward) of every saved buffer that forward wrote, by id."""
    first_later: dict[int, int] = {}
    last_forward: dict[int, int] = {}
    for op in trace.ops:
        for id_ in op.reads:
            if op.phase == "forward":
                last_forward[id_] = op.index
            else:
                first_later.setdefault(id_, op.index)
    gaps: dict[int, tuple[int, int]] = {}
    for buffer in trace.buffers:
        if not buffer.saved or buffer.birth_op == BEFORE_STEP or trace.ops[buffer.birth_op].phase != "forward":
            continue
        last = max(last_forward.get(buffer.id, buffer.birth_op), buffer.birth_op)
        following = first_later.get(buffer.id)  # without one there is nothing to come back for: it stays
        if following is not None and following > last + 1:
            gaps[buffer.id] = (last, following)
    return gaps
