"""The decision class *saved*, read off a trace: who may leave over which gap, and what a replay of it surely needs.

The bounds build on this and on nothing of the simulator, so that a mistake there cannot hide here. Whatever the trace
leaves open is read in favour of the plan: a bound may be too low, never too high.

[Note: what a replay surely needs]
A candidate that is recomputed is back at its first use in backward, or earlier if a child that is replayed earlier
needs it. So its replay runs somewhere between `earliest_op` (the first use in backward of it or of any descendant that
may be replayed) and its own `next_use_op`. An input of a replayed op is

- a candidate that lives on: it must be on the device then, and since it leaves only once, until its own next use;
- dead by `earliest_op`: its producer runs again too, in the same replay or in one before;
- anything else (alive, or of unknown state): free.

Contents from before the step are taken to be there, also those that the step overwrites (batch-norm statistics): the
runtime restores them, and a bound may assume it.
"""

import msgspec

from torchdelta.trace.model import BEFORE_STEP, Buffer, Trace

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
        earliest_op: No replay of it runs before this op.
        parents: Positions of the candidates that must be on the device when it is replayed.
        chain_ops: Ops that surely run again when it is recomputed, its producer included.
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
    gaps = _gaps(trace)
    ids = list(gaps)
    position = {buffer_id: index for index, buffer_id in enumerate(ids)}
    producer = {id_: op.index for op in trace.ops for id_ in op.writes}
    earliest = {id_: gaps[id_][1] for id_ in ids}
    # Children are born after their parents, so going backward every candidate is final before its parents are told.
    for id_ in sorted(ids, key=lambda id_: producer[id_], reverse=True):
        for parent in _ancestors(trace, producer, gaps, id_):
            earliest[parent] = min(earliest[parent], earliest[id_])
    found: list[Candidate] = []
    for id_ in ids:
        recomputable, parents, chain = _replay(trace, producer, gaps, earliest[id_], id_)
        found.append(
            Candidate(
                buffer_id=id_,
                size_bytes=trace.buffers[id_].size_bytes,
                last_use_op=gaps[id_][0],
                next_use_op=gaps[id_][1],
                producer_op=producer[id_],
                recomputable=recomputable,
                earliest_op=earliest[id_],
                parents=tuple(sorted(position[parent] for parent in parents)),
                chain_ops=tuple(sorted(chain)),
            )
        )
    return tuple(found)


def load_without(trace: Trace, load_bytes: list[int], candidates: tuple[Candidate, ...]) -> list[int]:
    """Return the load at each op if every candidate were away whenever it can be: no plan of the class goes below.

    Args:
        trace: A valid trace.
        load_bytes: Its load at each op, all candidates on the device.
        candidates: Who may leave.
    """
    changes = [0] * (len(trace.ops) + 2)
    for candidate in candidates:
        changes[candidate.last_use_op + 1] += candidate.size_bytes
        changes[candidate.next_use_op] -= candidate.size_bytes
    away, least = 0, list[int]()
    for op, load in enumerate(load_bytes):
        away += changes[op]
        least.append(load - away)
    return least


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


def _ancestors(trace: Trace, producer: dict[int, int], gaps: dict[int, tuple[int, int]], id_: int) -> set[int]:
    """Return the candidates that a replay might read, whatever lies between being dead or not."""
    seen, stack, ancestors = {producer[id_]}, [producer[id_]], set[int]()
    while stack:
        for read in trace.ops[stack.pop()].reads:
            if read in gaps:
                ancestors.add(read)
            # Also through a candidate, which may have died by then.
            if read in producer and producer[read] not in seen and (read not in gaps or _may_die(trace, read, id_)):
                seen.add(producer[read])
                stack.append(producer[read])
    ancestors.discard(id_)
    return ancestors


def _may_die(trace: Trace, parent: int, child: int) -> bool:
    return trace.buffers[parent].death_op <= trace.buffers[child].death_op


def _replay(
    trace: Trace, producer: dict[int, int], gaps: dict[int, tuple[int, int]], earliest_op: int, id_: int
) -> tuple[bool, set[int], set[int]]:
    """Return whether a candidate may be recomputed, the candidates that its replay reads, and the ops that it runs."""
    chain, stack, parents = {producer[id_]}, [producer[id_]], set[int]()
    while stack:
        op = trace.ops[stack.pop()]
        if not op.recomputable:
            return False, set(), set()
        for read in op.reads:
            buffer: Buffer = trace.buffers[read]
            if buffer.birth_op == BEFORE_STEP:
                continue
            if buffer.death_op > earliest_op:
                if read in gaps and read != id_:
                    parents.add(read)
            elif producer[read] not in chain:
                chain.add(producer[read])
                stack.append(producer[read])
    return True, parents, chain
