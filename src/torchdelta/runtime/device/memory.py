"""The device whose memory the budget limits: which one it is, and how much memory it has.

[Note: one session, one device]
A session limits the memory of one device: the GPU that is current when it starts, or the CPU if there is no GPU.
Storages on other devices (on the CPU beside a GPU, on a second GPU) are tracked, because replays read them, but they
are neither counted nor evicted. A process that trains on one of several GPUs makes it current first, as torch requires.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Final, Self

import torch

from torchdelta._torch.device import allocator_statistics, reset_allocator_peak
from torchdelta.errors import SizeError
from torchdelta.host import num_processes_here, read_host_memory
from torchdelta.machine.model import reserve_of
from torchdelta.units import format_bytes

if TYPE_CHECKING:
    from torchdelta.runtime.state.usage import Peak, Usage


# On CPU a budget that takes what is free leaves this share of it, and at least so much, to what is no tensor.
_MARGIN_SHARE: Final = 10
_LEAST_MARGIN_BYTES: Final = 256 * 2**20
# Devices with their own allocator, streams and autograd threads. Tests add a stand-in.
ACCELERATORS: Final = {"cuda"}


def session_device() -> torch.device:
    """Return the device, with its index, whose memory a session that starts now limits."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None or accelerator.type not in ACCELERATORS:
        return torch.device("cpu")
    return torch.device(accelerator.type, _current_index(accelerator.type))


# Whether CUDA was first used by a question below, so that the current device is not yet a choice of the program.
_has_asked_first = False


def _current_index(device_type: str) -> int:
    if device_type == "cuda" and not torch.cuda.is_initialized():
        # `torchdelta run` opens the scope before a script under torchrun has made its device current. Querying the
        # current device would create a context on device 0 in every process.
        return _local_rank()
    index = torch.accelerator.current_device_index()
    return _local_rank() if _has_asked_first and index == 0 else index


def _local_rank() -> int:
    """Return the device that is meant for this process under torchrun; 0 if there is no such device."""
    rank = os.environ.get("LOCAL_RANK", "")
    return int(rank) if rank.isdecimal() and int(rank) < torch.cuda.device_count() else 0


def _note_question() -> None:
    """Note that CUDA is about to be asked about a device, which makes it begin."""
    global _has_asked_first  # noqa: PLW0603
    _has_asked_first = _has_asked_first or not torch.cuda.is_initialized()


def device_memory_bytes() -> int:
    """Return the bytes of the device: the GPU's memory, or on CPU the lesser of RAM and the limits of the cgroups."""
    device = session_device()
    if device.type == "cuda":
        _note_question()
        return int(torch.cuda.get_device_properties(device).total_memory)
    return read_host_memory().usable_bytes


def free_for_tensors(tensor_bytes: int, *, swap_bytes: int | None = 0) -> tuple[int, str]:
    """Return a budget that takes what is free on the device, less a margin, and one line that says how it was found.

    On a GPU: what the driver says is free, and what this process's allocator holds already, less the reserve for
    context and fragmentation that `torchdelta fit` keeps, too (0.6 GiB and a sixteenth of the memory). On CPU: what is
    free (`HostMemory.free_bytes`), its share if torchrun started several processes here, less a tenth and at least
    256 MiB for what is no tensor; and the tensors that exist already, since they count against the budget.

    Args:
        tensor_bytes: Bytes of the tensors of this process, on CPU.
        swap_bytes: On CPU: bytes of this memory that swapped tensors may take; None is half of it.

    Raises:
        SizeError: Nothing is left.
    """
    device = session_device()
    if device.type == "cuda":
        _note_question()
        free_bytes, total_bytes = torch.cuda.mem_get_info(device)
        own_bytes = int(torch.cuda.memory_reserved(device))
        margin_bytes = reserve_of(total_bytes)
        own, margin = "held by this process's allocator", "reserve for context and fragmentation"
    else:
        free_bytes = read_host_memory().free_bytes // num_processes_here()
        own_bytes = tensor_bytes
        margin_bytes = max(_LEAST_MARGIN_BYTES, free_bytes // _MARGIN_SHARE)
        margin_bytes += max(0, free_bytes - margin_bytes) // 2 if swap_bytes is None else swap_bytes
        own, margin = "of tensors that exist", "margin"
    how = (
        f"{format_bytes(free_bytes)} free on {device}, plus {format_bytes(own_bytes)} {own}, less "
        f"{format_bytes(margin_bytes)} {margin}"
    )
    budget_bytes = free_bytes + own_bytes - margin_bytes
    if budget_bytes <= 0:
        raise SizeError(f"budget 'auto' leaves nothing: {how}: name a budget in bytes, such as '8GiB'")
    return budget_bytes, how


class PeakMeter:
    """Measures by how many bytes the peak of a piece of code exceeds the level at its start.

    An accelerator's allocator has statistics, and on CPU there may be a counter at the allocator. Without it, on Linux
    the kernel's high-water mark of resident pages is reset and read. That is a lower estimate, since pages that the C
    library has kept are resident already. On other systems the result is 0.

    An accelerator's peak is one for the whole process and has other readers (`torch.cuda.max_memory_allocated`). If
    `resets` is False it is not reset, and code that stays below an earlier peak measures as 0. Where the allocator is
    watched (device/counter.py), its own peak is not needed.

    If `nests` is True, other meters may run inside this one.
    """

    def __init__(self, device: torch.device, usage: Usage, *, resets: bool = True, nests: bool = False) -> None:
        self._device = device
        self._watched = usage if (device.type != "cpu" or nests) and usage.sees_peaks else None
        self._counter = usage.counter if usage.is_counting else None
        self._resets = resets
        self.extra_bytes = 0
        self._peak: Peak | None = None  # where the usage sees peaks
        self._start_bytes = 0
        self._old_peak_bytes = 0

    def __enter__(self) -> Self:
        """Read the level."""
        if self._watched is not None:
            self._peak = self._watched.begin_peak()
            return self
        if self._device.type != "cpu":
            if self._resets:
                reset_allocator_peak(self._device)
            statistics = allocator_statistics(self._device)
            if statistics is not None:
                self._start_bytes = statistics["current"]
                self._old_peak_bytes = statistics["peak"]
            return self
        if self._counter is not None:
            self._counter.mark()
            return self
        try:
            Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
        except OSError:
            return self
        self._start_bytes = _resident_bytes("VmRSS")
        return self

    def __exit__(self, *_exc: object) -> None:
        """Read the high-water mark."""
        if self._watched is not None and self._peak is not None:
            self._watched.end_peak(self._peak)
            self.extra_bytes = self._peak.size_bytes - self._peak.start_bytes
        elif self._device.type != "cpu":
            statistics = allocator_statistics(self._device)
            if statistics is not None and statistics["peak"] > self._old_peak_bytes:
                self.extra_bytes = statistics["peak"] - self._start_bytes
        elif self._counter is not None:
            self.extra_bytes = self._counter.growth_bytes()
        elif self._start_bytes:
            self.extra_bytes = max(0, _resident_bytes("VmHWM") - self._start_bytes)


def _resident_bytes(field: str) -> int:
    try:
        for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
            if line.startswith(field):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 0
