"""The time of an op is that of its arithmetic or of its memory traffic."""

import pytest
from msgspec.structs import replace

from tests.trace.strategies import example
from torchdelta.machine.catalog import find
from torchdelta.machine.roofline import op_bytes, op_time_s, price
from torchdelta.trace.model import Op

A100 = replace(find("a100-80g"), kernels="", flops_per_s={"float32": 14e12, "tf32": 78e12}, memory_bytes_per_s=1.6e12)


def test_the_longer_of_the_two():
    """A large product is bound by arithmetic, a small one and everything else by memory."""
    product = Op(index=0, name="aten.mm.default", phase="forward", flops=2 * 4096**3, dtype="float32")
    assert op_time_s(product, 3 * 4 * 4096**2, A100) == pytest.approx(2 * 4096**3 / 78e12)
    assert op_time_s(product, 3 * 4 * 4096**2, A100, tf32=False) == pytest.approx(2 * 4096**3 / 14e12)
    assert op_time_s(product, 10**12, A100) == pytest.approx(10**12 / 1.6e12)
    assert op_time_s(replace(product, flops=0), 16 * 10**8, A100) == pytest.approx(1e-3)
    slow = replace(A100, op_latency_s=1e-5)
    assert op_time_s(replace(product, flops=1), 1, slow) == 1e-5


def test_every_op_of_a_trace_gets_its_time():
    """Recorded bytes come first, else the buffers' sizes; what only allocates takes no time; old times go."""
    trace = price(example(), A100)
    assert [op_bytes(op, trace) for op in trace.ops] == [104, 96, 52, 8, 100, 104, 72]
    assert [op.time_s for op in trace.ops] == [op_bytes(op, trace) / 1.6e12 for op in trace.ops]
    empty = replace(trace.ops[0], name="aten.empty.memory_format", moved_bytes=0, flops=0)
    assert op_time_s(empty, op_bytes(empty, trace), replace(A100, op_latency_s=1e-5)) == 0.0
