"""The machine: how fast it computes, how much it holds, and what its links to host and disk carry.

A machine comes from the catalog (`catalog.find`) or from measurement (`probe`). All rates are what large ops and large
transfers reach in practice, not what a vendor prints: the catalog multiplies printed peaks by a share and says so in
`sources`, `probe` measures.

[Note: both ways at once]
`both_ways_factor` is the share of its own rate that each direction of the host link keeps while the other one is busy:
1.0 for two independent engines on a full-duplex link, 0.5 where both share one bus (or one memory, on a CPU).

[Note: where swaps go]
`host_out_bytes_per_s` and its kin are the way to the first tier: the pinned memory of the host. On a CPU the host's
memory is the device's own, and a copy within it frees nothing, so that there the first tier is the disk: the same
fields have its rates, `host_memory_bytes` its room (0 without a disk: nothing can be swapped), `swaps_to` says "disk",
and the `disk_` fields, a second tier, are left empty.

[Note: copies that take compute]
A GPU copies beside its kernels. On a CPU the cores that compute copy as well, and kernels that use all cores wait for
the slowest one: each byte takes compute `out_compute_s_per_byte` or `in_compute_s_per_byte`, whether the copy itself is
waited for or not.

[Note: actions that take compute]
Where the thread that prepares ops also computes them, as on a CPU, what the runtime does for a copy or a replay takes
compute, too, however small the tensor: `copy_compute_s` for each copy, `replay_compute_s` for each op of a replay
beside the time of the op itself.

[Note: the reserve]
A program's tensors do not get all of a device's memory: the driver's context and loaded kernels take some, and the
allocator keeps blocks that fit nothing. The rule is ours: 0.6 GiB and a sixteenth of the memory. On the one card with
published cases, an RTX 3090 of 23.68 GiB, that leaves 21.60: of 62 training runs that went through
(pytorch-image-models, PyTorch 1.12, autocast) and 49 next larger batches that did not, the predicted peak is on the
wrong side of it in one; against the whole memory in 15. Other devices are our reading of that one.
"""

import math
from typing import Final, Literal

import msgspec

from torchdelta.errors import MachineError

__all__ = ["Machine", "device_of", "matrix_flops_per_s", "reserve_bytes", "reserve_of", "validate_machine"]

_RESERVE_BYTES: Final = 6 * 2**30 // 10
_RESERVE_SHARE: Final = 16
_POSITIVE: Final = ("memory_bytes", "memory_bytes_per_s", "host_out_bytes_per_s", "host_in_bytes_per_s")
_NOT_NEGATIVE: Final = (
    *("op_latency_s", "link_latency_s", "out_compute_s_per_byte", "in_compute_s_per_byte", "disk_latency_s"),
    *("copy_compute_s", "replay_compute_s"),
    *("disk_write_bytes_per_s", "disk_read_bytes_per_s", "host_memory_bytes", "disk_bytes"),
)


class Machine(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a machine costs. `validate_machine` states what must hold of it.

    Attributes:
        name: Short name, as the command line takes it: `"a100-80g"`.
        description: Its name in words.
        memory_bytes: Device memory that a program finds.
        flops_per_s: Floating-point operations a second of large matrix products, by dtype; `"tf32"` for float32 on
            tensor cores. A multiply-add counts as two.
        memory_bytes_per_s: Rate of the device memory under streaming kernels, reads and writes added.
        kernels: How ops are priced: "cuda" by the kind of their kernels ([Note: the kernel model] in kernels.py),
            "cuda-cudnn8" the same with a library of before 2024, "" all alike.
        op_latency_s: Least time of one op, its launch included; 0.0 leaves that out of the price.
        swaps_to: What the first tier is, "host" or "disk": see [Note: where swaps go].
        host_out_bytes_per_s: Device to pinned host memory (to the first tier), large transfers.
        host_in_bytes_per_s: Pinned host memory (the first tier) to device, large transfers.
        both_ways_factor: See [Note: both ways at once].
        link_latency_s: Fixed time of each transfer.
        out_compute_s_per_byte: See [Note: copies that take compute].
        in_compute_s_per_byte: The same for copies to the device.
        copy_compute_s: See [Note: actions that take compute].
        replay_compute_s: The same for each op of a replay.
        host_memory_bytes: Host memory (room in the first tier) that swapped tensors may take, None without a limit.
        disk_write_bytes_per_s: Device to disk, the slowest part of the way; 0.0 without a disk.
        disk_read_bytes_per_s: Disk to device, the slowest part of the way; 0.0 without a disk.
        disk_latency_s: Fixed time of each read or write.
        disk_bytes: Disk space that swapped tensors may take, None without a limit.
        sources: Where each figure is from, by field name.
    """

    name: str
    description: str = ""
    memory_bytes: int
    flops_per_s: dict[str, float]
    memory_bytes_per_s: float
    kernels: Literal["", "cuda", "cuda-cudnn8"] = ""
    op_latency_s: float = 0.0
    swaps_to: Literal["host", "disk"] = "host"
    host_out_bytes_per_s: float
    host_in_bytes_per_s: float
    both_ways_factor: float = 1.0
    link_latency_s: float = 0.0
    out_compute_s_per_byte: float = 0.0
    in_compute_s_per_byte: float = 0.0
    copy_compute_s: float = 0.0
    replay_compute_s: float = 0.0
    host_memory_bytes: int | None = None
    disk_write_bytes_per_s: float = 0.0
    disk_read_bytes_per_s: float = 0.0
    disk_latency_s: float = 0.0
    disk_bytes: int | None = None
    sources: dict[str, str] = {}


def matrix_flops_per_s(machine: Machine, dtype: str, *, tf32: bool = True) -> float:
    """Return the rate of large matrix products of a dtype.

    A dtype that the machine does not name gets the rate of float32, a double-width one half of it (our rule: on such a
    machine it runs on the same units).

    Args:
        machine: A valid machine.
        dtype: Name without its package, such as `"float32"`.
        tf32: Whether float32 products run on tensor cores where there are any.
    """
    rates = machine.flops_per_s
    if dtype == "float32" and tf32 and "tf32" in rates:
        return rates["tf32"]
    rate = rates.get(dtype)
    if rate is not None:
        return rate
    return rates["float32"] / (2.0 if dtype in {"float64", "complex128"} else 1.0)


def device_of(machine: Machine) -> Literal["cpu", "cuda"]:
    """Return the device of a step on a machine, as `trace_step` takes it: what swaps to its disk is a CPU."""
    return "cpu" if machine.swaps_to == "disk" else "cuda"


def reserve_bytes(machine: Machine) -> int:
    """Return the bytes of the device memory that context and allocator take: see [Note: the reserve]."""
    return reserve_of(machine.memory_bytes)


def reserve_of(memory_bytes: int) -> int:
    """Return the reserve of a device with so much memory."""
    return _RESERVE_BYTES + memory_bytes // _RESERVE_SHARE


def validate_machine(machine: Machine) -> None:
    """Check what every reader of a machine relies on.

    Raises:
        MachineError: With one line that names the machine, the field and what is wrong with it.
    """
    positive: dict[str, float] = {field: getattr(machine, field) for field in _POSITIVE}
    positive |= {f"flops_per_s[{dtype!r}]": rate for dtype, rate in machine.flops_per_s.items()}
    not_negative: dict[str, float] = {field: getattr(machine, field) or 0 for field in _NOT_NEGATIVE}
    if not machine.name:
        raise MachineError("a machine has no name")
    if "float32" not in machine.flops_per_s:
        raise MachineError(
            f"machine {machine.name}: flops_per_s has no rate for float32, from which others are derived"
        )
    for field, value in positive.items():
        if not (math.isfinite(value) and value > 0):
            raise MachineError(f"machine {machine.name}: {field} is {value}, not a positive number")
    for field, value in not_negative.items():
        if not (math.isfinite(value) and value >= 0):
            raise MachineError(f"machine {machine.name}: {field} is {value}, not a number from 0")
    if not 0 < machine.both_ways_factor <= 1:
        share = machine.both_ways_factor
        raise MachineError(f"machine {machine.name}: both_ways_factor is {share}, not a share above 0 and up to 1")
    if machine.swaps_to == "disk" and machine.disk_write_bytes_per_s > 0:
        raise MachineError(
            f"machine {machine.name}: it swaps to its disk already, so the disk cannot be its second tier"
        )
    if (machine.disk_write_bytes_per_s > 0) != (machine.disk_read_bytes_per_s > 0):
        raise MachineError(f"machine {machine.name}: its disk has a rate in one direction only")
