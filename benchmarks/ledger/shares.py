"""Turns a file of `torchdelta probe --share` into figures of the ledger."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import msgspec

from benchmarks.ledger.figures import Figure
from torchdelta.errors import MachineError
from torchdelta.machine.catalog import find
from torchdelta.machine.share import Share

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["figures_of_share"]


def figures_of_share(path: Path) -> list[Figure]:
    """Return what a user measured as published figures.

    Raises:
        MachineError: The file cannot be read, or is none of `torchdelta probe --share`.
    """
    try:
        share = msgspec.json.decode(path.read_bytes(), type=Share)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise MachineError(f"{path}: not a file of `torchdelta probe --share`: {error}") from error
    machine = _catalog_name(share)
    stem = f"shared/{share.device}/torch{share.torch_version}"
    rows = [
        ("matmul_fp16", "TFLOP/s", share.flops_per_s.get("float16", 0.0) / 1e12),
        ("matmul_tf32_or_fp32", "TFLOP/s", share.flops_per_s.get("tf32", share.flops_per_s["float32"]) / 1e12),
        ("streaming_rate", "GB/s", share.rates["memory_bytes_per_s"] / 1e9),
        ("pinned_h2d", "GB/s", share.rates["host_in_bytes_per_s"] / 1e9),
        ("pinned_d2h", "GB/s", share.rates["host_out_bytes_per_s"] / 1e9),
        ("pinned_h2d_while_d2h", "GB/s", share.rates["host_in_bytes_per_s"] * share.rates["both_ways_factor"] / 1e9),
    ]
    common: dict[str, Any] = {
        "gpu": share.device,
        "machine": machine,
        "source": "torchdelta probe --share",
        "path": share.measured_at,
    }
    found = [
        Figure(id=f"{stem}/{quantity}", quantity=quantity, unit=unit, published=value, **common)
        for quantity, unit, value in rows
        if value > 0
    ]
    for place, kernel in enumerate(share.kernels):
        found.append(
            Figure(
                id=f"{stem}/kernel{place}",
                quantity="shared_kernel",
                unit="us",
                published=kernel.time_s * 1e6,
                kernel=kernel,
                **common,
            )
        )
    return found


def _catalog_name(share: Share) -> str:
    """Return the machine of the catalog that a device is, "" if it is in none: by its name, and its memory in GB."""
    words = re.sub(r"-?(SXM\d?|PCIe|HBM\w*)", "", share.device.removeprefix("NVIDIA ").removeprefix("Tesla "))
    for name in (words.replace("-", " "), f"{words.split('-')[0]}-{round(share.memory_bytes / 1e9 / 8) * 8}g"):
        try:
            return find(name).name
        except MachineError:
            continue
    return ""
