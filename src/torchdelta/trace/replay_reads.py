"""What a replay of an op needs, what it makes, and until when it finds a buffer: one answer for everybody.

The simulator, the validator of plans and the bounds ask here, so that none of them charges for content that another one
takes to be there.

[Note: batch norm's own statistics]
A batch norm in training reads its running statistics and writes them again, and none of its other outputs depends on
them. So a replay does without: the runtime gives it scratch memory in their place. What it writes there is no new
version of the statistics, so a replay never makes one.
"""

from itertools import pairwise

from torchdelta.aten.batch_norm import BATCH_NORMS
from torchdelta.trace.model import Op, Trace, storage_versions

__all__ = ["last_found_ops", "remade_until_ops", "replay_makes", "replay_reads"]


def replay_reads(trace: Trace, op_index: int) -> tuple[int, ...]:
    """Return the ids of the buffers that a replay of an op has to find, in the order of its arguments.

    They are what the op reads, without the statistics of [Note: batch norm's own statistics].
    """
    op = trace.ops[op_index]
    return _without_statistics(trace, op, op.reads)


def replay_makes(trace: Trace, op_index: int) -> tuple[int, ...]:
    """Return the ids of the buffers whose content a replay of an op makes again, in the order of its outputs.

    They are what the op writes, without the statistics of [Note: batch norm's own statistics]. Whether the op may be
    replayed at all is not asked.
    """
    op = trace.ops[op_index]
    return _without_statistics(trace, op, op.writes)


def last_found_ops(trace: Trace) -> list[int]:
    """Return for each buffer the last op before which a replay finds it where nothing leaves, by buffer id.

    A version that an op overwrites is there until that op runs, so a replay immediately before the op finds it. Every
    other buffer is freed before the op at which it is dead.
    """
    last = [buffer.death_op - 1 for buffer in trace.buffers]
    for versions in storage_versions(trace).values():
        for old, _ in pairwise(versions):
            last[old.id] = old.death_op
    return last


def remade_until_ops(trace: Trace) -> list[int]:
    """Return for each buffer the last op before which a replay can make it, whatever was dropped; -1 for never.

    A source of a replay is there while it is alive, or is made again itself if the step has made it. The number of ops
    or more means always.
    """
    last_found = last_found_ops(trace)
    until = [-1] * len(trace.buffers)
    for op in trace.ops:
        if not op.recomputable:
            continue
        sources = replay_reads(trace, op.index)
        found = min((max(last_found[id_], until[id_]) for id_ in sources), default=len(trace.ops))
        for id_ in replay_makes(trace, op.index):
            until[id_] = found
    return until


def _without_statistics(trace: Trace, op: Op, ids: tuple[int, ...]) -> tuple[int, ...]:
    """Return ids without those in storages that a batch norm reads and writes over."""
    if op.name.removeprefix("aten.").partition(".")[0] not in BATCH_NORMS:
        return ids
    buffers = trace.buffers
    read = {buffers[id_].storage_id for id_ in op.reads if buffers[id_].death_op == op.index}
    own = {buffers[id_].storage_id for id_ in op.writes} & read
    return tuple(id_ for id_ in ids if buffers[id_].storage_id not in own)
