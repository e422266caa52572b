"""The private torch APIs that say what devices do: settings that kernels read, generators, streams, allocators.

What is here works for all accelerators that torch knows alike, so that a stand-in can take the part of CUDA in tests.
See `__init__.py` for the rules.
"""

# torch's stubs do not have all that is here.
# pyright: reportAttributeAccessIssue=false, reportPrivateImportUsage=false

from __future__ import annotations

import sys
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import torch

if TYPE_CHECKING:
    from collections.abc import Callable


reads_cuda_settings = torch.version.cuda is not None or torch.version.hip is not None

# Read for every recorded op, so each is one C call.
_default_dtype: Callable[[], torch.dtype] = torch.get_default_dtype
_num_threads: Callable[[], int] = torch.get_num_threads
_is_deterministic: Callable[[], bool] = torch._C._get_deterministic_algorithms
_matmul_precision: Callable[[], str] = torch._C._get_float32_matmul_precision


def _switches(*names: str) -> tuple[tuple[Callable[[], Any], Callable[..., None]], ...]:
    """Return what reads and what sets each of these settings. A call costs a tenth of a microsecond."""
    return tuple(
        (getattr(torch._C, f"_get_{name}"), getattr(torch._C, f"_set_{name}"))
        for name in names
        if hasattr(torch._C, f"_get_{name}")
    )


# Which libraries compute convolutions and more on a CPU.
_CPU_SETTINGS = _switches("mkldnn_enabled", "mkldnn_deterministic", "nnpack_enabled")
# Settings that kernels on CUDA read besides. They exist in every build.
_CUDA_SETTINGS = _switches(
    "cudnn_enabled",
    "cudnn_benchmark",
    "cudnn_deterministic",
    "cublas_allow_fp16_reduced_precision_reduction",
    "cublas_allow_bf16_reduced_precision_reduction",
    "cublas_allow_fp16_accumulation",
)


def _fp32_precisions(*backends: str) -> dict[tuple[str, str], Callable[[], str]]:
    """Return what reads the precision of float32, by backend and kind of op: first the settings that others inherit.

    One call sets it for all backends (`torch.set_float32_matmul_precision`), others for one of them
    (`torch.backends.cuda.matmul.allow_tf32`), so no single value stands for all.
    """
    places = [("generic", "all"), *((backend, op) for backend in backends for op in ("all", "matmul", "conv", "rnn"))]
    return {place: partial(torch._C._get_fp32_precision_getter, *place) for place in places}


_fp32_readers = _fp32_precisions("mkldnn", "cuda") if reads_cuda_settings else _fp32_precisions("mkldnn")
_cublas_tf32: Callable[[], bool] = torch._C._get_cublas_allow_tf32
_cudnn_tf32: Callable[[], bool] = torch._C._get_cudnn_allow_tf32
is_mkldnn_enabled: Callable[[], bool] = torch._C._get_mkldnn_enabled


def has_half_convolutions(dtype: torch.dtype) -> bool:
    """Return whether oneDNN computes convolutions in a half precision on this processor; without it they are unfolded.

    True where torch has no such question any more.
    """
    name = "_is_mkldnn_bf16_supported" if dtype is torch.bfloat16 else "_is_mkldnn_fp16_supported"
    try:
        return bool(is_mkldnn_enabled() and getattr(torch.ops.mkldnn, name)())
    except AttributeError:
        return True


def _unless_mixed(read: Callable[[], Any]) -> Any:
    """Return a setting; None where old and new settings are mixed, which torch refuses."""
    try:
        return read()
    except RuntimeError:
        return None


warns_only: Callable[[], bool] = torch._C._get_deterministic_algorithms_warn_only


_LEAST_NORMAL: Final = sys.float_info.min


def flushes_denormals() -> bool:
    """Return whether this thread takes denormal numbers for 0 (`torch.set_flush_denormal`), Python's floats included.

    torch sets this, but does not tell it.
    """
    return _LEAST_NORMAL * 0.5 == 0.0


def numeric_environment() -> tuple[Any, ...]:
    """Return the global settings that kernels read besides their arguments: a replay runs under the recorded ones."""
    try:
        precision: Any = _matmul_precision()
    except RuntimeError:  # old and new settings are mixed, which torch refuses
        precision = _unless_mixed(_cublas_tf32)
    common = (
        *(_default_dtype(), tuple([read() for read, _ in _CPU_SETTINGS]), (_is_deterministic(), warns_only())),
        _num_threads(),
        *(precision, tuple([read() for read in _fp32_readers.values()]), flushes_denormals()),
    )
    if not reads_cuda_settings:
        return common
    return (*common, _unless_mixed(_cudnn_tf32), *(read() for read, _ in _CUDA_SETTINGS))


def set_numeric_environment(environment: tuple[Any, ...]) -> None:
    """Set what `numeric_environment` returned; some only where they differ (they are slow to set)."""
    dtype, on_cpu, (is_deterministic, only_warns), num_threads, precision, precisions, flushes, *others = environment
    torch.set_default_dtype(dtype)
    for (_, write), value in zip(_CPU_SETTINGS, on_cpu, strict=True):
        write(value)
    torch._C._set_deterministic_algorithms(is_deterministic, warn_only=only_warns)
    if torch.get_num_threads() != num_threads:
        torch.set_num_threads(num_threads)
    if flushes_denormals() != flushes:
        torch.set_flush_denormal(flushes)
    if isinstance(precision, str):
        torch._C._set_float32_matmul_precision(precision)
    elif precision is not None:
        torch._C._set_cublas_allow_tf32(precision)
    if others and others[0] is not None:
        torch._C._set_cudnn_allow_tf32(others[0])
    # After the old settings, which set some of them.
    for (place, read), value in zip(_fp32_readers.items(), precisions, strict=True):
        if read() != value:
            torch._C._set_fp32_precision_setter(*place, value)
    if others:
        for (_, write), value in zip(_CUDA_SETTINGS, others[1:], strict=True):
            write(*(value if isinstance(value, tuple) else (value,)))  # some are pairs: two switches set at once


def default_generator_of(device: torch.device) -> torch.Generator | None:
    """Return the generator that random ops on a device draw from when they are given none; None where none draws."""
    if device.type == "cpu":
        return torch.default_generator
    if device.type == "meta":  # there are no numbers to draw
        return None
    index: Any = device.index  # which may be None, whatever the stubs say
    if index is None:
        index = torch.accelerator.current_device_index()
    return torch.get_device_module(device.type).default_generators[index]


def current_stream(device: torch.device) -> torch.Stream:
    """Return the stream that kernels on an accelerator are queued in now, on this thread."""
    return torch.accelerator.current_stream(device.index)


def stream_id_reader(device: torch.device) -> Callable[[], int]:
    """Return what tells one current stream from another, at the least cost: it is asked before every op."""
    index = device.index
    if device.type == "cuda":
        raw_stream: Callable[[int], int] = torch._C._cuda_getCurrentRawStream
        return lambda: raw_stream(index)
    return lambda: torch.accelerator.current_stream(index).stream_id


def capture_reader(device: torch.device) -> Callable[[], bool]:
    """Return what says whether the current stream is being captured into a graph."""
    if device.type == "cuda":
        return torch._C._cuda_isCurrentStreamCapturing
    return lambda: False


def default_to_foreach(parameters: list[torch.Tensor]) -> bool:
    """Return whether an optimizer that is not told steps on lists of these parameters, and not one by one."""
    from torch.optim.optimizer import _default_to_fused_or_foreach

    return _default_to_fused_or_foreach(parameters, differentiable=False, use_fused=False)[1]


def has_graph_trees() -> bool:
    """Return whether compiled code of this process may run as captured CUDA graphs (`mode="reduce-overhead"`)."""
    return "torch._inductor.cudagraph_trees" in sys.modules


def begin_pool(device: torch.device) -> Any:
    """Serve what is allocated on a CUDA device, by whatever thread, from a new pool, and return it.

    `torch.cuda.use_mem_pool` does the same for a thread, which autograd's threads are not. torch can serve one stream
    alone as well, but not the default stream, on which nearly all programs run.
    """
    with torch.cuda.device(device):
        pool = torch.cuda.MemPool()
    torch._C._cuda_beginAllocateToPool(device.index, pool.id)
    return pool


def before_captures(call: Callable[[], None]) -> Callable[[], None]:
    """Call a function before each capture of a CUDA graph begins. Return what ends that."""
    original = torch.cuda.CUDAGraph.capture_begin

    def capture_begin(self: Any, *args: Any, **kwargs: Any) -> Any:
        call()
        return original(self, *args, **kwargs)

    torch.cuda.CUDAGraph.capture_begin = capture_begin

    def undo() -> None:
        if torch.cuda.CUDAGraph.capture_begin is capture_begin:
            torch.cuda.CUDAGraph.capture_begin = original

    return undo


def end_pool(device: torch.device, pool: Any) -> None:
    """Serve from the pool no more. What lives in it goes on."""
    torch._C._cuda_endAllocateToPool(device.index, pool.id)
    torch._C._cuda_releasePool(device.index, pool.id)


def can_watch_allocator(device: torch.device) -> bool:
    """Return False where CUDA has another allocator than torch's own caching one, the only one that calls trackers."""
    return device.type != "cuda" or torch._C._cuda_getAllocatorBackend() == "native"


def allocator_statistics(device: torch.device) -> dict[str, Any] | None:
    """Return an accelerator's "active_bytes" (current, peak, allocated, freed); None before its allocator has begun."""
    if not torch._C._accelerator_isAllocatorInitialized():
        return None
    return torch._C._accelerator_getDeviceStats(device.index)["active_bytes"]["all"]


def reset_allocator_peak(device: torch.device) -> None:
    """Begin to measure an accelerator's peaks anew; the process has only one of each."""
    if torch._C._accelerator_isAllocatorInitialized():
        torch._C._accelerator_resetPeakStats(device.index)
