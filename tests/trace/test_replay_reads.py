"""What a replay needs: batch norm's own statistics never, and what an op overwrites until that op."""

from hypothesis import given

from tests.trace.strategies import traces
from torchdelta.trace.model import Buffer, Header, Op, Trace
from torchdelta.trace.replay_reads import last_found_ops, replay_makes, replay_reads


def norm_twice(name: str) -> Trace:
    """Return a step that calls an op twice on the same statistics, then one that reads those of the first call."""
    lives = ((0, -1, 0), (0, 0, 2), (0, 2, 3), (1, -1, 3), (2, 0, 3), (3, 1, 3), (4, 2, 3))
    return Trace(
        header=Header(torch_version="2.13.0", device="cpu", created_by="tests"),
        buffers=tuple(
            Buffer(id=id_, storage_id=storage, size_bytes=4, kind="constant", birth_op=birth, death_op=death)
            for id_, (storage, birth, death) in enumerate(lives)
        ),
        ops=(
            Op(index=0, name=name, phase="forward", reads=(3, 0), writes=(4, 1)),
            Op(index=1, name="aten.neg.default", phase="forward", reads=(1,), writes=(5,)),
            Op(index=2, name=name, phase="forward", reads=(3, 1), writes=(6, 2)),
        ),
    )


def test_a_batch_norm_needs_no_statistics_and_makes_none() -> None:
    """They are neither looked for nor brought back; everything else is."""
    trace = norm_twice("aten.native_batch_norm.default")
    assert [replay_reads(trace, op) for op in range(3)] == [(3,), (1,), (3,)]
    assert [replay_makes(trace, op) for op in range(3)] == [(4,), (5,), (6,)]


def test_any_other_op_needs_what_it_writes_over() -> None:
    """A moving average in place is made from its old value, also where it is a buffer of a module."""
    trace = norm_twice("aten.lerp_.Scalar")
    assert [replay_reads(trace, op) for op in range(3)] == [op.reads for op in trace.ops]
    assert [replay_makes(trace, op) for op in range(3)] == [op.writes for op in trace.ops]


def test_statistics_that_are_only_read_are_needed() -> None:
    """A batch norm in evaluation writes nothing over: its output depends on the statistics."""
    trace = norm_twice("aten.neg.default")
    ops = (*trace.ops[:1], Op(index=1, name="aten.native_batch_norm.default", phase="forward", reads=(1,), writes=(5,)))
    trace = Trace(header=trace.header, buffers=trace.buffers, ops=(*ops, trace.ops[2]))
    assert replay_reads(trace, 1) == (1,)
    assert replay_makes(trace, 1) == (5,)


def test_an_overwritten_version_is_found_until_its_op() -> None:
    """The others are gone before the op at which they are dead."""
    assert last_found_ops(norm_twice("aten.neg.default")) == [0, 2, 2, 2, 2, 2, 2]


@given(traces())
def test_every_op_of_the_step_itself_finds_what_its_replay_would_need(trace: Trace) -> None:
    """In the plain step, at each op: what is written before it and not found any more is nothing that it reads."""
    last = last_found_ops(trace)
    for op in trace.ops:
        assert set(replay_reads(trace, op.index)) <= set(op.reads)
        assert set(replay_makes(trace, op.index)) <= set(op.writes)
        assert all(trace.buffers[id_].birth_op < op.index <= last[id_] for id_ in op.reads)
