"""Measures the machine it runs on: arithmetic, memory, links to host and disk.

[Note: what is measured]
Each rate is the best of `NUM_ROUNDS` rounds, each long enough that the clock and the launch do not matter, after one
run that nobody counts: other work on the machine only ever makes a round slower. On CUDA: square products of up to 8192
(float32 with and without TF32, and halves), copies in the memory, copies to and from pinned host memory, alone and both
at once on two streams. A CPU's tier is its disk ([Note: where swaps go] in model.py); reads and writes are taken to
share it evenly.
Disk: a file without a name in the swap directory, past the page cache where the file system allows it; otherwise its
rate is that of the cache, and `sources` says so. It has `NUM_DISK_ROUNDS` rounds. The op latency is a launch of the
smallest op, without a wait.

All of it takes a few seconds. Where all rounds were disturbed the machine looks slower than it is: probe an idle one. A
result below `LEAST_RATES`, a tenth or less of what any machine reaches that runs torch, is refused, but for a quick
one, which nobody keeps.
"""

from __future__ import annotations

import functools
import time
from typing import TYPE_CHECKING, Any, Final, Literal

import torch

from torchdelta.errors import MachineError
from torchdelta.host import read_host_memory
from torchdelta.machine.cache import load_per_core
from torchdelta.machine.disk import NUM_DISK_ROUNDS, NUM_LATENCY_READS, DiskRates, disk_rates
from torchdelta.machine.model import Machine, validate_machine
from torchdelta.names import unknown_name

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

__all__ = ["LEAST_RATES", "NUM_ROUNDS", "probe", "timer_of"]

NUM_ROUNDS: Final = 5
LEAST_RATES: Final = {"flops_per_s": 1e9, "memory_bytes_per_s": 2e8, "host_out_bytes_per_s": 1e7}
"""Of float32 products, of the memory, and of the way out."""
_DTYPES: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_MIB: Final = 2**20
_MEASURED: Final = f"measured, best of {NUM_ROUNDS}"
_WAYS: Final[tuple[str, ...]] = ("host_out_bytes_per_s", "host_in_bytes_per_s")


def probe(device: str | None = None, *, directory: Path | None = None, quick: bool = False) -> Machine:
    """Measure this machine.

    Args:
        device: "cpu" or "cuda"; None takes CUDA where there is one.
        directory: Where swapped tensors would go; None leaves the disk out, and a CPU without a tier.
        quick: Smaller sizes and shorter rounds: a tenth of the time, and not to be believed to better than a half.

    Raises:
        MachineError: There is no such device here, the directory cannot be written, or the machine was so busy that
            what was measured cannot be right.
    """
    has_cuda = torch.cuda.is_available()
    device = device or ("cuda" if has_cuda else "cpu")
    if device not in {"cpu", "cuda"}:
        raise MachineError(unknown_name("device", device, ("cpu", "cuda")))
    if device == "cuda" and not has_cuda:
        raise MachineError("there is no CUDA device here: probe cpu, or take a machine of the catalog")
    disk = None if directory is None else disk_rates(directory, size_bytes=(16 if quick else 256) * _MIB)
    measured = _Cuda(quick=quick) if device == "cuda" else _Cpu(quick=quick)
    machine = measured.machine(disk)
    validate_machine(machine)
    if not quick:
        _check_plausible(machine)
    return machine


def timer_of(device: str, *, quick: bool = False) -> Callable[[Callable[[], object]], float]:
    """Return what measures the seconds of one run of something on "cpu" or "cuda", the best of `NUM_ROUNDS` rounds."""
    return (_Cuda(quick=quick) if device == "cuda" else _Cpu(quick=quick)).seconds_of


def _check_plausible(machine: Machine) -> None:
    found = {
        "flops_per_s": machine.flops_per_s["float32"],
        "memory_bytes_per_s": machine.memory_bytes_per_s,
        "host_out_bytes_per_s": machine.host_out_bytes_per_s,
    }
    for name, least in LEAST_RATES.items():
        if found[name] < least:
            load = load_per_core()
            busy = "" if load is None else f" (its load is {load:.2f} a core)"
            raise MachineError(
                f"{name} was measured as {found[name]:.3g}, which is implausible: below {least:g}; the machine is busy"
                f"{busy}: probe it again when it is idle"
            )


class _Cpu:
    """Measures on CPU; what differs on CUDA is overridden."""

    device = "cpu"
    matrix_width = 2048
    copy_bytes = 256 * _MIB
    float32_names = ("float32",)
    kernels: Literal["", "cuda"] = ""

    def __init__(self, *, quick: bool) -> None:
        self._round_s = 0.01 if quick else 0.1
        if quick:
            self.matrix_width //= 4
            self.copy_bytes //= 16

    def synchronize(self) -> None:
        """Wait for what was issued."""

    def name(self) -> tuple[str, str, int]:
        """Return short name, name in words, and memory."""
        threads = torch.get_num_threads()
        return "local-cpu", f"this machine's CPU, {threads} threads", read_host_memory().usable_bytes

    def machine(self, disk: DiskRates | None) -> Machine:
        """Measure everything."""
        name, description, memory_bytes = self.name()
        tiers, tier_sources = self._tiers(disk)
        sources = dict.fromkeys(("flops_per_s", "memory_bytes_per_s", "op_latency_s"), _MEASURED)
        return Machine(
            name=name,
            description=description,
            memory_bytes=memory_bytes,
            flops_per_s=self._matrix_rates(),
            memory_bytes_per_s=self._memory_rate(),
            op_latency_s=self._op_latency_s(),
            kernels=self.kernels,
            sources=sources | tier_sources | {"memory_bytes": "as the system reports it"},
            **tiers,
        )

    def _tiers(self, disk: DiskRates | None) -> tuple[dict[str, Any], dict[str, str]]:
        """Return the fields of a machine that are about swaps, and where they are from."""
        fields: dict[str, Any] = {"swaps_to": "disk", "both_ways_factor": 0.5}
        if disk is None:
            fields |= {"host_out_bytes_per_s": 1e9, "host_in_bytes_per_s": 1e9, "host_memory_bytes": 0}
            return fields, dict.fromkeys(_WAYS, "no disk was measured: nothing can be swapped")
        fields |= {
            "host_out_bytes_per_s": disk.write_bytes_per_s,
            "host_in_bytes_per_s": disk.read_bytes_per_s,
            "link_latency_s": disk.latency_s,
            "host_memory_bytes": disk.free_bytes,
        }
        return fields, dict.fromkeys(_WAYS, _how(disk)) | {"link_latency_s": f"measured, median of {NUM_LATENCY_READS}"}

    # -- rates

    def seconds_of(self, run: Callable[[], object]) -> float:
        """Return the seconds of one run."""
        run()
        self.synchronize()
        num_runs = 1
        while True:
            elapsed_s = self.time_round(run, num_runs)
            if elapsed_s >= self._round_s:
                break
            num_runs = max(2 * num_runs, int(num_runs * self._round_s / max(elapsed_s, 1e-9)))
        return min(self.time_round(run, num_runs) for _ in range(NUM_ROUNDS)) / num_runs

    def time_round(self, run: Callable[[], object], num_runs: int) -> float:
        """Return the seconds of so many runs one after the other, the device's work included."""
        start_s = time.perf_counter()
        for _ in range(num_runs):
            run()
        self.synchronize()
        return time.perf_counter() - start_s

    def _matrix_rates(self) -> dict[str, float]:
        return {name: self._matrix_rate(dtype) for name, dtype in _DTYPES.items()}

    def _matrix_rate(self, dtype: torch.dtype) -> float:
        # From small to large: a CPU without such units may take a thousand times as long for a product of halves.
        width = min(128, self.matrix_width)
        while True:
            a, b, c = (torch.ones(width, width, dtype=dtype, device=self.device) for _ in range(3))
            run = functools.partial(torch.mm, a, b, out=c)
            run()
            fastest_s = min(self.time_round(run, 1) for _ in range(NUM_ROUNDS))
            if 2 * width > self.matrix_width or 8 * fastest_s > 2 * self._round_s:
                return 2 * width**3 / self.seconds_of(run)
            width *= 2

    def _memory_rate(self) -> float:
        source, target = (torch.ones(self.copy_bytes, dtype=torch.uint8, device=self.device) for _ in range(2))
        # A copy reads and writes.
        return 2 * self.copy_bytes / self.seconds_of(lambda: target.copy_(source))

    def _op_latency_s(self) -> float:
        x = torch.ones((), device=self.device)
        return self.seconds_of(lambda: x.add_(1))


class _Cuda(_Cpu):
    """Measures on the current CUDA device."""

    device = "cuda"
    matrix_width = 8192
    kernels = "cuda"

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def name(self) -> tuple[str, str, int]:
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        return "local-cuda", f"this machine's {properties.name}", properties.total_memory

    def _matrix_rates(self) -> dict[str, float]:
        before = torch.backends.cuda.matmul.allow_tf32
        try:
            torch.backends.cuda.matmul.allow_tf32 = False
            rates = super()._matrix_rates()
            torch.backends.cuda.matmul.allow_tf32 = True
            tf32 = self._matrix_rate(torch.float32)
        finally:
            torch.backends.cuda.matmul.allow_tf32 = before
        # Where there are no such units the setting changes nothing.
        return rates | ({"tf32": tf32} if tf32 > 1.2 * rates["float32"] else {})

    def _tiers(self, disk: DiskRates | None) -> tuple[dict[str, Any], dict[str, str]]:
        out, into, together = self._links()
        fields: dict[str, Any] = {
            "host_out_bytes_per_s": out,
            "host_in_bytes_per_s": into,
            "both_ways_factor": together,
            "link_latency_s": self._link_latency_s(),
            "host_memory_bytes": read_host_memory().usable_bytes,
        }
        measured: tuple[str, ...] = (*_WAYS, "both_ways_factor", "link_latency_s")
        sources: dict[str, str] = dict.fromkeys(measured, _MEASURED)
        if disk is not None:
            fields |= {
                # A device's way to the disk leads through the host: the slower part counts.
                "disk_write_bytes_per_s": min(disk.write_bytes_per_s, out),
                "disk_read_bytes_per_s": min(disk.read_bytes_per_s, into),
                "disk_latency_s": disk.latency_s,
                "disk_bytes": disk.free_bytes,
            }
            sources.update(disk_write_bytes_per_s=_how(disk), disk_read_bytes_per_s=_how(disk))
        return fields, sources

    def _links(self) -> tuple[float, float, float]:
        """Return bytes a second out, in, and the share of each that is left when both are under way."""
        on_device = [torch.ones(self.copy_bytes, dtype=torch.uint8, device=self.device) for _ in range(2)]
        on_host = [torch.ones(self.copy_bytes, dtype=torch.uint8).pin_memory() for _ in range(2)]
        streams = (torch.cuda.Stream(), torch.cuda.Stream())

        def out() -> None:
            with torch.cuda.stream(streams[0]):
                on_host[0].copy_(on_device[0], non_blocking=True)

        def into() -> None:
            with torch.cuda.stream(streams[1]):
                on_device[1].copy_(on_host[1], non_blocking=True)

        def both() -> None:
            out()
            into()

        out_s, into_s, both_s = self.seconds_of(out), self.seconds_of(into), self.seconds_of(both)
        return self.copy_bytes / out_s, self.copy_bytes / into_s, _share(max(out_s, into_s), both_s)

    def _link_latency_s(self) -> float:
        source = torch.ones(1024, dtype=torch.uint8, device=self.device)
        target = torch.ones(1024, dtype=torch.uint8).pin_memory()

        def copy() -> None:
            target.copy_(source, non_blocking=True)
            torch.cuda.synchronize()

        return self.seconds_of(copy)


def _how(disk: DiskRates) -> str:
    way = "direct" if disk.is_direct else "through the page cache, which flatters"
    return f"measured, best of {NUM_DISK_ROUNDS}, {way}"


def _share(alone_s: float, together_s: float) -> float:
    """Return the share of its rate that a copy keeps beside another one."""
    return min(1.0, max(0.05, alone_s / together_s))
