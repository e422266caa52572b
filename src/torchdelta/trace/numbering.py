"""Numbers the buffers of a trace by their first use, so that two traces of the same step number them alike.

A recorder numbers what exists before a step in the order in which the garbage collector lists it: that order, and what
else the process holds, differ from run to run. A plan names buffers by their numbers.
"""

import msgspec

from torchdelta.trace.model import BEFORE_STEP, Buffer, Trace

__all__ = ["num_involved", "numbered_by_use"]


def numbered_by_use(trace: Trace) -> tuple[Trace, dict[int, int]]:
    """Return the trace with its buffers in the order in which the ops name them, and the new ids by the old ones.

    Behind them stand buffers that no op names and that die in the step; the last buffer is all the others that no op
    names, in one: it has their bytes and is there all the time. The ids of these are not among those returned.
    """
    order: dict[int, None] = {}
    for op in trace.ops:
        order.update(dict.fromkeys((*op.reads, *op.writes)))
    order.update(dict.fromkeys(saved.buffer_id for saved in trace.saved_tensors))
    others = [buffer for buffer in trace.buffers if buffer.id not in order]
    dying = [buffer for buffer in others if buffer.death_op < len(trace.ops)]
    order.update(dict.fromkeys(b.id for b in sorted(dying, key=lambda b: (b.death_op, b.size_bytes, b.kind))))
    new_ids = {old: new for new, old in enumerate(order)}
    buffers = [msgspec.structs.replace(trace.buffers[old], id=new) for old, new in new_ids.items()]
    idle = [buffer for buffer in others if buffer.id not in order]
    if idle:
        buffers.append(
            Buffer(
                id=len(buffers),
                storage_id=idle[0].storage_id,
                size_bytes=sum(buffer.size_bytes for buffer in idle),
                kind="constant",
                birth_op=BEFORE_STEP,
                death_op=len(trace.ops),
            )
        )
    ops = tuple(
        msgspec.structs.replace(
            op, reads=tuple(new_ids[id_] for id_ in op.reads), writes=tuple(new_ids[id_] for id_ in op.writes)
        )
        for op in trace.ops
    )
    saved_tensors = tuple(
        msgspec.structs.replace(saved, buffer_id=new_ids[saved.buffer_id]) for saved in trace.saved_tensors
    )
    return Trace(header=trace.header, buffers=tuple(buffers), ops=ops, saved_tensors=saved_tensors), new_ids


def num_involved(trace: Trace) -> int:
    """Return how many buffers a trace has that is numbered by use, the last one not counted if it is the idle one."""
    last = trace.buffers[-1]
    named = {id_ for op in trace.ops for id_ in (*op.reads, *op.writes)}
    named |= {saved.buffer_id for saved in trace.saved_tensors}
    is_idle = last.id not in named and last.death_op == len(trace.ops)
    return len(trace.buffers) - is_idle
