"""From a trace to lives: what lasts, what wraps around, and where the step is cut."""

from torchdelta.pool.bounds import max_load_bytes
from torchdelta.pool.lives import lives_of_trace
from torchdelta.trace.model import Buffer, Header, Op, Trace

NUM_OPS = 10


def trace_of(*lives):
    """Make a trace from (birth, death, size); nothing reads or writes."""
    buffers = tuple(
        Buffer(id=number, storage_id=number, size_bytes=size, kind="activation", birth_op=birth, death_op=death)
        for number, (birth, death, size) in enumerate(lives)
    )
    ops = tuple(Op(index=index, name="aten.mm.default", phase="forward") for index in range(NUM_OPS))
    return Trace(header=Header(torch_version="2.13.0", device="cpu", created_by="test"), buffers=buffers, ops=ops)


def spans_of(instance):
    """Return (start, end) by id."""
    return dict(zip(instance.ids, zip(instance.starts.tolist(), instance.ends.tolist(), strict=True), strict=True))


def test_what_lasts_takes_its_place_all_the_time():
    """A parameter lives in every moment, an activation in its own."""
    instance = lives_of_trace(trace_of((-1, NUM_OPS, 8), (2, 5, 4)))
    assert spans_of(instance) == {"0": (0, 10), "1": (2, 5)}
    assert max_load_bytes(instance) == 12


def test_what_outlives_the_step_is_what_was_left_over_from_the_one_before():
    """Born at 7 and freed at 2 of the next step: one life of five moments, in a step that now begins at 2."""
    instance = lives_of_trace(trace_of((7, NUM_OPS, 4), (-1, 2, 4), (3, 6, 4)))
    spans = spans_of(instance)
    assert len(instance) == 2
    start, end = spans["0"]
    assert end - start == 5
    assert max_load_bytes(instance) == 4


def test_nothing_is_joined_that_is_alive_together():
    """The old one is still there when the new one is born: two places."""
    instance = lives_of_trace(trace_of((3, NUM_OPS, 4), (-1, 6, 4)))
    assert len(instance) == 2
    assert max_load_bytes(instance) == 8


def test_sizes_must_agree():
    """A gradient is no loss."""
    assert len(lives_of_trace(trace_of((7, NUM_OPS, 4), (-1, 2, 8)))) == 2


def test_what_crosses_every_cut_is_kept_all_the_time():
    """Where no moment is free of it, the least of it is stretched, and nothing else."""
    instance = lives_of_trace(trace_of((8, NUM_OPS, 2), (-1, 5, 2), (4, 9, 30)))
    spans = spans_of(instance)
    assert spans["0"] == (0, 10)
    start, end = spans["2"]
    assert end - start == 5
    assert max_load_bytes(instance) == 32
