"""Traces of the same step number their buffers alike, whatever else there was before the step."""

from __future__ import annotations

import random

import msgspec

from tests.planners.chains import MIB, chain
from torchdelta.trace.model import BEFORE_STEP, Buffer, Trace, counts
from torchdelta.trace.numbering import num_involved, numbered_by_use
from torchdelta.trace.validate import validate

STEP = chain([(MIB, 8e-3, 2e-3)] * 4, weight_bytes=3 * MIB, optimizer=True)


def _shuffled(trace: Trace, seed: int, num_idle: int) -> Trace:
    """Return the same step with some idle buffers and other numbers."""
    most = max(buffer.storage_id for buffer in trace.buffers)
    idle = [
        Buffer(
            id=0, storage_id=most + 1 + i, size_bytes=i + 1, kind="input", birth_op=BEFORE_STEP, death_op=len(trace.ops)
        )
        for i in range(num_idle)
    ]
    buffers = [*trace.buffers, *idle]
    order = list(range(len(buffers)))
    random.Random(seed).shuffle(order)
    new = {old: place for place, old in enumerate(order)}
    replace = msgspec.structs.replace
    return Trace(
        header=trace.header,
        buffers=tuple(replace(buffers[old], id=place) for place, old in enumerate(order)),
        ops=tuple(
            replace(op, reads=tuple(new[i] for i in op.reads), writes=tuple(new[i] for i in op.writes))
            for op in trace.ops
        ),
        saved_tensors=tuple(replace(saved, buffer_id=new[saved.buffer_id]) for saved in trace.saved_tensors),
    )


def test_numbers_do_not_depend_on_what_else_there_is() -> None:
    """Two shuffles, one with idle buffers: the same buffers but for one more at the end, which has their bytes."""
    plain, _ = numbered_by_use(_shuffled(STEP, 1, 0))
    other, new_ids = numbered_by_use(_shuffled(STEP, 2, 3))
    validate(other)
    assert other.buffers[:-1] == plain.buffers
    assert other.ops == plain.ops
    assert other.saved_tensors == plain.saved_tensors
    assert other.buffers[-1].size_bytes == 1 + 2 + 3
    assert num_involved(plain) == num_involved(other) == len(plain.buffers)
    assert len(new_ids) == len(plain.buffers)
    assert counts(other).peak.size_bytes == counts(STEP).peak.size_bytes + 6
