"""What `torchdelta probe --share` writes: the measured machine and a dozen kernels, for the ledger of predictions.

[Note: what is shared]
Nothing about a person or a host: the device's name, the versions of torch and CUDA, the machine's rates, and the time
of each kernel below, the best of `NUM_ROUNDS` rounds. Each kernel is given as a trace's op has it, so that the ledger
can predict it (`docs/fidelity.md`). The text is JSON of at most `MAX_BYTES` bytes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import msgspec
import torch

from torchdelta.machine.model import Machine  # noqa: TC001 - msgspec reads it
from torchdelta.machine.probe import timer_of
from torchdelta.trace.model import Op, Product

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["MAX_BYTES", "Share", "SharedKernel", "measure_share"]

MAX_BYTES: Final = 4096
_VERSION: Final = 1
_RATES: Final = ("memory_bytes_per_s", "host_out_bytes_per_s", "host_in_bytes_per_s", "both_ways_factor")
"""Of a machine, beside its memory and its FLOP/s."""


class SharedKernel(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A kernel that was timed. The fields but `time_s` are those of a trace's op, `product` by its order."""

    name: str
    time_s: float
    flops: int = 0
    dtype: str = ""
    moved_bytes: int
    product: tuple[int, int, int, int, int] | None = None
    layout: str = ""

    def op(self) -> Op:
        """Return it as an op of a trace."""
        sizes = None
        if self.product is not None:
            groups, rows, columns, inner, window = self.product
            sizes = Product(groups=groups, rows=rows, columns=columns, inner=inner, window=window)
        return Op(
            index=0,
            name=self.name,
            phase="forward",
            flops=self.flops,
            dtype=self.dtype,
            moved_bytes=self.moved_bytes,
            product=sizes,
            layout=self.layout,
        )


class Share(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A machine and kernels that were measured on it.

    Attributes:
        version: Of this file's form.
        cuda_version: Of the CUDA that it was built with; "" on CPU.
        measured_at: The day, in ISO 8601.
        rates: Other rates of the machine by field name.
    """

    version: int = _VERSION
    device: str
    torch_version: str
    cuda_version: str = ""
    measured_at: str
    memory_bytes: int
    flops_per_s: dict[str, float]
    rates: dict[str, float]
    kernels: tuple[SharedKernel, ...]


def measure_share(device: str, machine: Machine, *, measured_at: str, quick: bool = False) -> Share:
    """Time the kernels on a device whose machine was measured."""
    seconds_of = timer_of(device, quick=quick)
    kernels = tuple(
        msgspec.structs.replace(kernel, time_s=_rounded(seconds_of(run)))
        for kernel, run in _kernels(device, scale=64 if quick or device == "cpu" else 1)
    )
    name = machine.description
    if device == "cuda":
        name = torch.cuda.get_device_properties(torch.cuda.current_device()).name
    return Share(
        device=name,
        torch_version=str(torch.__version__),
        cuda_version=str(torch.version.cuda or ""),
        measured_at=measured_at[:10],
        memory_bytes=machine.memory_bytes,
        flops_per_s={dtype: _rounded(rate) for dtype, rate in machine.flops_per_s.items()},
        rates={field: _rounded(getattr(machine, field)) for field in _RATES},
        kernels=kernels,
    )


def _rounded(value: float) -> float:
    """Round to four digits, which is more than can be repeated."""
    return float(f"{value:.4g}")


def _kernels(device: str, *, scale: int) -> Iterator[tuple[SharedKernel, Callable[[], Any]]]:
    """Yield each kernel and what runs it once. One is built at a time: together they would take gigabytes."""
    half = torch.float16 if device == "cuda" else torch.bfloat16
    batch = max(64 // scale, 1)
    for channels_last in (True, False):
        for groups, taps in ((1, 1), (1, 3), (32, 3), (256, 3)):
            yield _convolution(device, half, batch, groups, taps, channels_last=channels_last)
    yield _product(device, half, max(16384 // scale, 64))
    x = torch.ones(max(2**25 // scale, 2), dtype=half, device=device)
    size_bytes = x.numel() * x.element_size()
    yield SharedKernel(name="aten.add.Tensor", time_s=0.0, moved_bytes=3 * size_bytes), lambda: x + x
    images = torch.ones(batch, 256, 56, 56, dtype=half, device=device)
    norm = torch.nn.BatchNorm2d(256, device=device)
    moved = 2 * images.numel() * images.element_size()
    name = "aten.cudnn_batch_norm.default" if device == "cuda" else "aten.native_batch_norm.default"
    yield SharedKernel(name=name, time_s=0.0, moved_bytes=moved), lambda: norm(images)
    rows = x.view(-1, 2)[: x.numel() // 2048 * 1024].view(-1, 1024) if x.numel() >= 2048 else x.view(1, -1)
    moved = 2 * rows.numel() * rows.element_size()
    width = (rows.shape[-1],)
    yield (
        SharedKernel(name="aten.native_layer_norm.default", time_s=0.0, moved_bytes=moved),
        lambda: torch.nn.functional.layer_norm(rows, width),
    )
    yield (
        SharedKernel(name="aten._softmax.default", time_s=0.0, moved_bytes=moved),
        lambda: torch.softmax(rows, dim=-1),
    )


def _convolution(
    device: str, dtype: torch.dtype, batch: int, groups: int, taps: int, *, channels_last: bool
) -> tuple[SharedKernel, Callable[[], Any]]:
    channels, side = 256, 28
    layout = torch.channels_last if channels_last else torch.contiguous_format
    x = torch.ones(batch, channels, side, side, dtype=dtype, device=device).contiguous(memory_format=layout)
    weight = torch.ones(channels, channels // groups, taps, taps, dtype=dtype, device=device)
    weight = weight.contiguous(memory_format=layout)
    sizes = (groups, batch * side * side, channels // groups, channels // groups, taps * taps)
    flops = 2 * groups * sizes[1] * sizes[2] * sizes[3] * sizes[4]
    kernel = SharedKernel(
        name="aten.convolution.default",
        time_s=0.0,
        flops=flops,
        dtype=str(dtype).removeprefix("torch."),
        moved_bytes=(2 * x.numel() + weight.numel()) * x.element_size(),
        product=sizes,
        layout="channels_last" if channels_last else "",
    )
    return kernel, lambda: torch.nn.functional.conv2d(x, weight, padding=taps // 2, groups=groups)


def _product(device: str, dtype: torch.dtype, rows: int) -> tuple[SharedKernel, Callable[[], Any]]:
    a, b = torch.ones(rows, 1024, dtype=dtype, device=device), torch.ones(1024, 1024, dtype=dtype, device=device)
    kernel = SharedKernel(
        name="aten.mm.default",
        time_s=0.0,
        flops=2 * rows * 1024 * 1024,
        dtype=str(dtype).removeprefix("torch."),
        moved_bytes=(2 * a.numel() + b.numel()) * a.element_size(),
        product=(1, rows, 1024, 1024, 0),
    )
    return kernel, lambda: a @ b
