"""Two batch sizes give every other one."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from torch import nn

from tests.trace.strategies import example, traces
from torchdelta.errors import TraceError
from torchdelta.trace.model import Trace
from torchdelta.trace.scale import CONVOLUTION_WORKSPACE_BYTES, difference_from_line, scale
from torchdelta.trace.symbolic import trace_step
from torchdelta.trace.validate import validate


def at(trace: Trace, batch_size: int) -> Trace:
    """The trace with everything that a batch stretches stretched: sizes and costs have a fixed and a growing part."""
    grow = lambda fixed: fixed + 3 * fixed * batch_size  # noqa: E731
    return Trace(
        header=replace(trace.header, batch_size=batch_size),
        buffers=tuple(replace(b, size_bytes=grow(b.size_bytes)) for b in trace.buffers),
        ops=tuple(
            replace(
                op, flops=grow(op.flops), moved_bytes=grow(op.moved_bytes), workspace_bytes=grow(op.workspace_bytes)
            )
            for op in trace.ops
        ),
        saved_tensors=trace.saved_tensors,
    )


@given(traces(), st.integers(2, 9), st.integers(2, 9), st.integers(1, 4096))
def test_what_is_linear_comes_out_exact(trace: Trace, first: int, second: int, wanted: int):
    """From any two sizes, in either order, every integer of a third is exact; one of the two gives itself."""
    if first == second:
        second += 1
    scaled = scale(at(trace, first), at(trace, second), wanted)
    assert scaled == at(trace, wanted)
    validate(scaled)
    assert scale(at(trace, first), at(trace, second), second) == at(trace, second)


@pytest.mark.parametrize(("device", "most"), [("cuda", CONVOLUTION_WORKSPACE_BYTES), ("cpu", 4000 * 2**20)])
def test_the_workspace_of_a_convolution_has_an_end_on_an_accelerator(device, most):
    """Two small batches do not make a large one take gigabytes, which then set the least budget; on CPU they do."""

    def convolution(batch_size: int) -> Trace:
        trace = at(example(), batch_size)
        ops = (replace(trace.ops[0], name="aten.convolution.default", workspace_bytes=batch_size * 2**20),)
        return replace(trace, header=replace(trace.header, device=device), ops=(*ops, *trace.ops[1:]))

    assert scale(convolution(2), convolution(4), 4000).ops[0].workspace_bytes == most
    assert scale(convolution(2), convolution(4), 100).ops[0].workspace_bytes == 100 * 2**20


def test_different_steps_are_refused():
    """The first difference is named, and so are batch sizes that are missing, equal or none."""
    two, four = at(example(), 2), at(example(), 4)
    with pytest.raises(TraceError, match=r"differ: op 2 has name 'aten.sum\.default' and 'aten.mean\.default'"):
        scale(two, replace(four, ops=(*four.ops[:2], replace(four.ops[2], name="aten.mean.default"), *four.ops[3:])), 8)
    with pytest.raises(TraceError, match="at batch sizes 2 and 4 differ: 7 and 6 ops"):
        scale(two, replace(four, ops=four.ops[:-1]), 8)
    with pytest.raises(TraceError, match="different batch sizes are needed to price others, not 2 and 2"):
        scale(two, two, 8)
    with pytest.raises(TraceError, match="not None and 4"):
        scale(replace(two, header=replace(two.header, batch_size=None)), four, 8)
    with pytest.raises(TraceError, match="batch size 0 is no batch"):
        scale(two, four, 0)


class Compared(nn.Module):
    """Compares the samples of a batch with one another, or does not."""

    def __init__(self, *, compares: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)
        self.compares = compares

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return a loss."""
        made = self.layer(x)
        return (made @ made.t()).exp().mean() if self.compares else made.exp().mean()


@pytest.mark.parametrize("compares", [False, True])
def test_what_is_not_on_the_line_is_named(compares: bool) -> None:
    """A contrastive loss grows with the square of the batch, which two traces cannot show."""
    first, second, third = (
        trace_step(lambda size: (Compared(compares=compares), torch.randn(size, 16)), batch_size=size, device="cpu")
        for size in (2, 4, 8)
    )
    difference = difference_from_line(first, second, third)
    expected = "what aten.mm.default makes has 256 bytes at batch 8, not 160" if compares else ""
    assert difference == expected
