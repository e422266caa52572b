"""What a play needs to know of a step, worked out once for all limits that it is played under."""

import numpy as np

from torchdelta.simulate.gaps import MIN_SIZE_BYTES
from torchdelta.trace.model import BEFORE_STEP, Trace
from torchdelta.trace.replay_reads import remade_until_ops, replay_makes, replay_reads

__all__ = ["PlayedStep"]

_NEVER_MADE_AGAIN = frozenset({"parameter", "gradient", "optimizer_state"})


class PlayedStep:
    """A step as a play sees it. Read only.

    Attributes:
        trace: The step, priced.
        num_ops: Its ops.
        size_bytes: Of each buffer.
        evictable: Whether each buffer may be evicted: it is born in the step, and large enough to be worth it.
        remade_until: Last op before which a replay can make each buffer, whatever has been dropped; -1 for never. No
            less than `num_ops` means always.
        producer: The op that writes each buffer that is born in the step.
        reads: What a replay of each op reads.
        makes: What a replay of each op makes again of its outputs.
        freed: By op, the buffers that are dead from it on and whose memory it does not take over.
        overwritten: By op, the versions that it writes over in place.
        next_uses: By op, the next read of each buffer that it reads, then of each that it writes; `num_ops` for none.
    """

    def __init__(self, trace: Trace) -> None:
        buffers, num_ops = trace.buffers, len(trace.ops)
        self.trace, self.num_ops = trace, num_ops
        self.size_bytes = np.array([buffer.size_bytes for buffer in buffers], dtype=np.int64)
        self.evictable = np.array([buffer.birth_op != BEFORE_STEP for buffer in buffers], dtype=np.bool_)
        self.evictable &= self.size_bytes >= MIN_SIZE_BYTES
        self.producer = {id_: op.index for op in trace.ops for id_ in op.writes}
        self.reads = [replay_reads(trace, op.index) for op in trace.ops]
        self.makes = [frozenset(replay_makes(trace, op.index)) for op in trace.ops]
        self.freed: list[list[int]] = [[] for _ in range(num_ops + 1)]
        self.overwritten: list[list[int]] = [[] for _ in range(num_ops + 1)]
        written = [{buffers[id_].storage_id for id_ in op.writes} for op in trace.ops] + [set[int]()]
        for buffer in buffers:
            dies = self.overwritten if buffer.storage_id in written[buffer.death_op] else self.freed
            dies[buffer.death_op].append(buffer.id)
        self.remade_until = np.array(remade_until_ops(trace), dtype=np.int64)
        never = [b.id for b in buffers if b.kind in _NEVER_MADE_AGAIN and b.birth_op != BEFORE_STEP]
        self.remade_until[never] = -1
        self.next_uses: list[list[int]] = [[] for _ in range(num_ops)]
        following = [num_ops] * len(buffers)
        for op in reversed(trace.ops):
            self.next_uses[op.index] = [following[id_] for id_ in (*op.reads, *op.writes)]
            for id_ in op.reads:
                following[id_] = op.index
