"""Each invariant of a trace, broken on purpose in the documented example."""

from typing import Any

import pytest
from hypothesis import given
from msgspec.structs import replace

from tests.trace.strategies import example, traces
from torchdelta.errors import TraceFileError
from torchdelta.trace.model import FORMAT_VERSION, Buffer, Op, Product, SavedTensor, Trace
from torchdelta.trace.validate import find_fault, validate


def changed(kind: str, place: int, **fields: Any) -> Trace:
    """Return the example with some fields of one record changed."""
    trace = example()
    records = list(getattr(trace, kind))
    records[place] = replace(records[place], **fields)
    return replace(trace, **{kind: tuple(records)})


BROKEN = {
    "foreign format": (
        replace(example(), header=replace(example().header, format="other")),
        "header: format is 'other', not 'torchdelta-trace'",
    ),
    "other version": (
        replace(example(), header=replace(example().header, version=FORMAT_VERSION + 1)),
        "header: format version is 4; this torchdelta knows version 3",
    ),
    "negative batch": (
        replace(example(), header=replace(example().header, batch_size=-1)),
        "header: negative batch_size -1",
    ),
    "no ops": (
        replace(example(), ops=(), buffers=(), saved_tensors=()),
        "header: the trace has no ops, so it is not a training step",
    ),
    "sparse ids": (changed("buffers", 4, id=9), "buffer 9: ids must be dense and in order, 4 expected"),
    "negative storage": (changed("buffers", 4, storage_id=-1), "buffer 4: negative storage_id -1"),
    "negative size": (changed("buffers", 4, size_bytes=-1), "buffer 4: negative size_bytes -1"),
    "born too early": (changed("buffers", 0, birth_op=-2), "buffer 0: birth_op -2 is outside of the step's 7 ops"),
    "born too late": (
        changed("buffers", 4, birth_op=7, death_op=8),
        "buffer 4: birth_op 7 is outside of the step's 7 ops",
    ),
    "negative life": (
        changed("buffers", 4, death_op=1),
        "buffer 4: negative or empty life, death_op 1 is not above birth_op 2",
    ),
    "empty life": (
        changed("buffers", 4, death_op=2),
        "buffer 4: negative or empty life, death_op 2 is not above birth_op 2",
    ),
    "dies too late": (changed("buffers", 4, death_op=8), "buffer 4: death_op 8 is outside of the step's 7 ops"),
    "unordered ops": (
        changed("ops", 3, index=4),
        "op 4 'aten.ones_like.default': ops must be dense and in order, 3 expected",
    ),
    "unannounced phase": (
        replace(example(), header=replace(example().header, phases=("forward", "backward"))),
        "op 6 'aten.add_.Tensor': phase 'optimizer' is not among the header's phases forward, backward",
    ),
    "negative time": (
        changed("ops", 2, time_s=-1.0),
        "op 2 'aten.sum.default': time_s -1.0 is not a finite number of seconds from 0",
    ),
    "infinite time": (
        changed("ops", 2, time_s=float("inf")),
        "op 2 'aten.sum.default': time_s inf is not a finite number of seconds from 0",
    ),
    "no time": (
        changed("ops", 2, time_s=float("nan")),
        "op 2 'aten.sum.default': time_s nan is not a finite number of seconds from 0",
    ),
    "negative flops": (changed("ops", 2, flops=-1), "op 2 'aten.sum.default': negative flops -1"),
    "negative moved bytes": (
        changed("ops", 2, moved_bytes=-1),
        "op 2 'aten.sum.default': negative moved_bytes -1",
    ),
    "endless flops": (
        changed("ops", 2, flops=2**100 + 1),
        "op 2 'aten.sum.default': flops is above 1267650600228229401496703205376",
    ),
    "endless moved bytes": (
        changed("ops", 2, moved_bytes=10**400),
        "op 2 'aten.sum.default': moved_bytes is above 1267650600228229401496703205376",
    ),
    "endless product": (
        changed("ops", 0, product=Product(rows=4, columns=3, inner=10**400)),
        "op 0 'aten.mm.default': product.inner is above 1267650600228229401496703205376",
    ),
    "negative product": (
        changed("ops", 0, product=Product(rows=4, columns=-3, inner=2)),
        "op 0 'aten.mm.default': negative product.columns -3",
    ),
    "endless times": (
        changed("ops", 2, time_s=1e300),
        "op 2: with it the ops take more than 1e+30 seconds",
    ),
    "negative workspace": (
        changed("ops", 2, workspace_bytes=-1),
        "op 2 'aten.sum.default': negative workspace_bytes -1",
    ),
    "reads unknown": (
        changed("ops", 2, reads=(9,)),
        "op 2 'aten.sum.default': unknown buffer 9, the trace has 9",
    ),
    "writes unknown": (
        changed("ops", 2, writes=(-1,)),
        "op 2 'aten.sum.default': unknown buffer -1, the trace has 9",
    ),
    "reads twice": (
        changed("ops", 2, reads=(3, 3)),
        "op 2 'aten.sum.default': the same buffer twice in its reads or twice in its writes",
    ),
    "writes twice": (
        changed("ops", 2, writes=(4, 4)),
        "op 2 'aten.sum.default': the same buffer twice in its reads or twice in its writes",
    ),
    "writes another's": (
        changed("ops", 2, writes=(4, 5)),
        "op 2 'aten.sum.default': writes buffer 5, which is born at op 3",
    ),
    "writes the old": (
        changed("ops", 2, writes=(4, 1)),
        "op 2 'aten.sum.default': writes buffer 1, which is born before the step",
    ),
    "unwritten": (changed("ops", 2, writes=()), "buffer 4: born at op 2, which does not write it"),
    "overlapping versions": (
        changed("buffers", 2, death_op=2),
        "buffer 3: versions 2 and 3 of storage 2 overlap, one dies at op 2 and the next is born at 1",
    ),
    "gap between versions": (
        changed("buffers", 0, death_op=5),
        "buffer 8: versions 0 and 8 of storage 0 leave a gap, one dies at op 5 and the next is born at 6",
    ),
    "reads the future": (
        changed("ops", 2, reads=(5,)),
        "op 2 'aten.sum.default': reads buffer 5 before its birth at op 3",
    ),
    "reads its own output": (
        changed("ops", 2, reads=(4,)),
        "op 2 'aten.sum.default': reads buffer 4 before its birth at op 2",
    ),
    "reads the dead": (
        changed("ops", 6, reads=(0, 6)),
        "op 6 'aten.add_.Tensor': reads buffer 6 after its death at op 6",
    ),
    "reads the overwritten": (
        changed("ops", 2, reads=(2,)),
        "op 2 'aten.sum.default': reads buffer 2 after its death at op 1",
    ),
    "saved nowhere": (changed("saved_tensors", 0, op=8), "saved tensor 0: op 8 is outside of the step's 7 ops"),
    "saved unknown": (changed("saved_tensors", 1, buffer_id=9), "saved tensor 1: unknown buffer 9, the trace has 9"),
    "saved before birth": (
        changed("saved_tensors", 1, op=0),
        "saved tensor 1: saved at op 0, but buffer 3 lives from op 1 to 5",
    ),
    "saved after death": (
        changed("saved_tensors", 1, op=6),
        "saved tensor 1: saved at op 6, but buffer 3 lives from op 1 to 5",
    ),
    "dimensions": (changed("saved_tensors", 0, stride=(1,)), "saved tensor 0: 2 dimensions but 1 strides"),
    "negative stride": (
        changed("saved_tensors", 0, stride=(2, -1)),
        "saved tensor 0: negative shape, stride or offset: (4, 2), (2, -1), 0",
    ),
    "view outside": (
        changed("saved_tensors", 0, offset=1),
        "saved tensor 0: its view ends at byte 36, but buffer 1 has 32 bytes",
    ),
    "unmarked": (changed("buffers", 1, saved=False), "buffer 1: saved, but not marked so"),
    "marked": (changed("buffers", 0, saved=True), "buffer 0: marked as saved, but no saved tensor names it"),
}


@pytest.mark.parametrize(("trace", "message"), BROKEN.values(), ids=BROKEN.keys())
def test_each_broken_invariant_is_one_clear_line(trace: Trace, message: str) -> None:
    """Whatever is wrong, the error is one line that names the record and the numbers."""
    with pytest.raises(TraceFileError) as caught:
        validate(trace)
    assert str(caught.value) == message


@given(traces(resize=True))
def test_random_traces_are_valid(trace: Trace) -> None:
    """What the strategy draws satisfies every invariant, so that the property tests speak about valid traces."""
    assert find_fault(trace) is None


def test_example_is_valid() -> None:
    """The documented example satisfies every invariant."""
    assert find_fault(example()) is None


def test_hidden_write_of_what_was_just_saved_is_valid() -> None:
    """A tensor that its own op overwrites, unseen by autograd, is saved as the later version."""
    trace = changed("saved_tensors", 1, op=1)
    assert find_fault(trace) is None


def test_op_zero_may_overwrite_what_it_finds() -> None:
    """A buffer from before the step that op 0 overwrites has no moment of its own, and is valid."""
    buffers = tuple(
        Buffer(id=id_, storage_id=0, size_bytes=8, kind="parameter", birth_op=id_ - 1, death_op=id_) for id_ in (0, 1)
    )
    op = Op(index=0, name="aten.zero_.default", phase="optimizer", reads=(0,), writes=(1,))
    assert find_fault(replace(example(), buffers=buffers, ops=(op,), saved_tensors=())) is None


def test_unknown_dtype_is_accepted() -> None:
    """A dtype that is younger than this library does not make a trace invalid."""
    saved = SavedTensor(op=0, buffer_id=1, shape=(99,), stride=(1,), offset=0, dtype="float4_e2m1fn_x2")
    trace = example()
    assert find_fault(replace(trace, saved_tensors=(saved, trace.saved_tensors[1]))) is None
