"""The price of a kernel by its kind: what makes it slower or faster, and what does not."""

import pytest
from msgspec.structs import replace

from torchdelta.machine.catalog import find
from torchdelta.machine.kernels import CUDA_SHARES, kernel_time_s
from torchdelta.machine.roofline import op_time_s
from torchdelta.trace.model import Op, Product

A100, V100 = find("a100-80g"), find("v100-32g")
NUM_BYTES = 10**8


def convolution(*, groups=1, channels=256, window=9, dtype="float16", layout="channels_last", name="convolution"):
    """Return a convolution of 256 or so channels to as many, and the bytes that it moves."""
    inner = channels // groups
    sizes = Product(groups=groups, rows=2**18, columns=256 // groups, inner=inner, window=window)
    flops = 2 * groups * sizes.rows * sizes.columns * inner * window
    op = Op(index=0, name=f"aten.{name}.default", phase="forward", flops=flops, dtype=dtype, product=sizes)
    return replace(op, layout=layout)


def time_s(op, machine=A100, moved_bytes=NUM_BYTES):
    """Return the price without the launch."""
    return kernel_time_s(op, moved_bytes, machine) - CUDA_SHARES.launch_s


def test_a_large_product_takes_the_share_of_its_rate():
    """A product that fills its tiles is priced at the share of the machine's rate, and a launch."""
    sizes = Product(rows=2**20, columns=2**20, inner=2**20)
    op = Op(index=0, name="aten.mm.default", phase="forward", flops=2**61, dtype="float16", product=sizes)
    expected_s = 2**61 / (A100.flops_per_s["float16"] * CUDA_SHARES.matrix)
    assert kernel_time_s(op, 1, A100) == pytest.approx(expected_s + CUDA_SHARES.launch_s, rel=1e-3)
    assert op_time_s(op, 1, A100) == kernel_time_s(op, 1, A100)


def test_small_products_leave_tiles_empty():
    """At the same FLOPs a narrow result and a short sum take longer."""
    wide = Op(index=0, name="aten.bmm.default", phase="forward", flops=2**40, dtype="float16")
    times_s = [
        time_s(
            replace(wide, product=Product(groups=2**9 * 2**20 // (rows * inner), rows=rows, columns=rows, inner=inner))
        )
        for rows, inner in ((1024, 1024), (1024, 64), (32, 1024))
    ]
    assert times_s[0] < min(times_s[1:])


def test_layout_matters_on_tensor_cores_only():
    """Half and TF32 convolutions pay for copies where channels are not innermost or not a multiple of 8."""
    assert time_s(convolution(layout="")) > time_s(convolution())
    assert time_s(convolution(layout="", window=1)) - time_s(convolution(window=1)) < (
        time_s(convolution(layout="")) - time_s(convolution())
    )
    assert time_s(convolution(layout="", dtype="float32")) > time_s(convolution(dtype="float32"))
    assert time_s(convolution(layout="", dtype="float32"), V100) == time_s(convolution(dtype="float32"), V100)
    assert time_s(convolution(channels=257)) > 1.1 * time_s(convolution(channels=256))


def test_kinds_of_convolutions():
    """Per FLOP a grouped one is slower than a dense one, and a depthwise one than that; a backward than forward."""
    per_flop = {
        groups: time_s(convolution(groups=groups), moved_bytes=1) / convolution(groups=groups).flops
        for groups in (1, 32, 256)
    }
    assert per_flop[1] < per_flop[32] < per_flop[256]
    assert time_s(convolution(name="convolution_backward")) > time_s(convolution())
    with_winograd, without = convolution(dtype="float32"), convolution(dtype="float32", window=25)
    assert time_s(with_winograd, V100) / with_winograd.flops < time_s(without, V100) / without.flops


def test_a_batch_norm_reads_twice():
    """Training takes three passes where inference takes two, backward five where the sizes say three."""
    training = Op(index=0, name="aten.native_batch_norm.default", phase="forward", writes=(1, 2, 3, 4, 5))
    inference = replace(training, writes=(1, 2, 3))
    backward = replace(inference, name="aten.native_batch_norm_backward.default")
    assert time_s(training) == pytest.approx(1.5 * time_s(inference))
    assert time_s(backward) == pytest.approx(5 / 3 * time_s(inference))
    assert time_s(replace(training, layout="channels_last")) < time_s(training)


def test_a_half_without_units_runs_as_float32():
    """A V100 has no units for bfloat16: its products run at the rate of float32 and pay for no copies."""
    op = convolution(dtype="bfloat16", layout="", window=25)
    assert time_s(op, V100) == time_s(convolution(dtype="float32", layout="", window=25), V100)


def test_a_trace_without_sizes_is_priced():
    """An op of an older trace, without sizes, gets the price of a large product."""
    op = Op(index=0, name="aten.mm.default", phase="forward", flops=2**40, dtype="float16")
    assert time_s(op, moved_bytes=1) == pytest.approx(2**40 / (A100.flops_per_s["float16"] * CUDA_SHARES.matrix))


def test_groups_that_cudnn_8_has_no_kernel_for():
    """With channels innermost, and a library of before 2024, wide groups run on the vector units, but not ResNeXt's."""
    old = replace(A100, kernels="cuda-cudnn8")
    lacking, resnext, narrow = convolution(groups=8), convolution(groups=32), convolution(groups=32, channels=256)
    narrow = replace(narrow, product=replace(narrow.product, groups=31))
    wide_as_resnext = replace(resnext, product=replace(resnext.product, groups=31, inner=16))
    assert time_s(lacking, old) > 3 * time_s(lacking)
    assert time_s(wide_as_resnext, old) > 3 * time_s(wide_as_resnext)
    for op in (
        resnext,
        narrow,
        convolution(groups=1),
        convolution(groups=256),
        convolution(groups=8, layout=""),
        replace(lacking, dtype="float64"),
    ):
        assert time_s(op, old) == time_s(op)
