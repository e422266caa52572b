"""Machines that are not here: what common accelerators compute, hold and transfer.

[Note: how the figures were made]
Peaks are the vendor's, dense (no structured sparsity), tensor cores with float32 accumulation; they were looked up in
datasheets, architecture whitepapers or tables made from them, and each machine's `sources` says which. What large
products and streaming kernels reach is a share of it that was measured by others (mli/transformers-benchmarks: large
square products, a vector times a scalar; facebookresearch/HolisticTraceAnalysis: elementwise kernels over 64 MB), on
this GPU or on the nearest one; `sources` says so, too. GeForce cards run above the clock that their printed peaks are
for, and reach all of it; cards for data centres about three quarters. What other kernels reach of these rates is in
kernels.py. Links are what large pinned copies reach on PCI Express x16 (links.py). Both directions at once keep 0.9 of
their rates on an RTX 5090 (tinygrad/open-gpu-kernel-modules issue 29) and 0.55 in a box of eight RTX 4090s
(NVIDIA/nvbandwidth issue 15); 0.9 elsewhere is our reading. Memory is what `torch.cuda` reports as the total, a little
under the name's number. Host memory is one GPU's share of a system in which it is usual, NVIDIA's own for data centres;
these sizes are from memory and were not looked up, and that swapped tensors may take all of it is our simplification.
`torchdelta probe` measures instead.
"""

import difflib
from typing import Final, NamedTuple

from torchdelta.errors import MachineError
from torchdelta.machine.cache import CachedMachine, read_cached
from torchdelta.machine.links import LANE_BYTES_PER_S
from torchdelta.machine.model import Machine
from torchdelta.names import unknown_name

__all__ = ["CATALOG", "find", "measured", "names"]

_GIB: Final = 2**30
_LINK_LATENCY_S: Final = 10e-6
_WIDTH: Final = 16
_MLI: Final = "mli/transformers-benchmarks"


class _Chip(NamedTuple):
    """What the cards with one chip have in common. See [Note: how the figures were made].

    Attributes:
        peaks: Printed peaks in TFLOP/s, by data type.
        peaks_from: Where they are printed.
        shares: What large products on tensor cores and on vector units, and streaming kernels, reach of printed peaks.
        shares_from: Who measured that.
        pci_express: The generation of its link.
        both_ways: The share of its rates that a link keeps in both directions at once, and who measured that.
    """

    peaks: dict[str, float]
    peaks_from: str
    shares: tuple[float, float, float]
    shares_from: str
    pci_express: int
    both_ways: tuple[float, str] = (0.9, "as measured on an RTX 5090, our reading")


_T4: Final = _Chip(
    peaks={"float32": 8.1, "float16": 65},
    peaks_from="NVIDIA T4 datasheet",
    shares=(0.5, 0.89, 0.8),
    shares_from="not measured: a card of 70 W, our reading",
    pci_express=3,
)
_V100: Final = _Chip(
    peaks={"float32": 15.7, "float16": 125},
    peaks_from="NVIDIA V100 datasheet",
    shares=(0.76, 0.89, 0.85),
    shares_from=f"95 and 14 TFLOP/s and 784 GB/s of a V100, {_MLI}; 738 GB/s, HTA",
    pci_express=3,
)
_A100: Final = _Chip(
    peaks={"float32": 19.5, "tf32": 156, "bfloat16": 312, "float16": 312},
    peaks_from="NVIDIA A100 datasheet",
    shares=(0.74, 0.89, 0.82),
    shares_from=f"230 and 116 TFLOP/s and 1616 GB/s of an A100, {_MLI}; 1716 GB/s, HTA",
    pci_express=4,
)
_H100: Final = _Chip(
    peaks={"float32": 66.9, "tf32": 494.7, "bfloat16": 989.4, "float16": 989.4},
    peaks_from="NVIDIA H100 and H200 datasheets and H100 architecture whitepaper, dense",
    shares=(0.6, 0.89, 0.82),
    shares_from="not measured: memory as an A100, products our reading",
    pci_express=5,
)
_RTX3090: Final = _Chip(
    peaks={"float32": 35.6, "tf32": 35.6, "bfloat16": 71, "float16": 71},
    peaks_from="NVIDIA Ampere GA102 whitepaper, dense, float32 accumulation",
    shares=(1.0, 0.9, 0.85),
    shares_from=f"81 and 42 TFLOP/s and 856 GB/s of an RTX 3090 Ti, {_MLI}",
    pci_express=4,
)
_RTX4090: Final = _Chip(
    peaks={"float32": 82.6, "tf32": 82.6, "bfloat16": 165.2, "float16": 165.2},
    peaks_from="NVIDIA Ada whitepaper, dense, float32 accumulation",
    shares=(1.04, 0.9, 0.93),
    shares_from=f"172 and 86 TFLOP/s and 936 GB/s of an RTX 4090, {_MLI}",
    pci_express=4,
    both_ways=(0.55, "14.4 of 26.3 GB/s in a box of eight RTX 4090s, NVIDIA/nvbandwidth issue 15"),
)
_RTX5090: Final = _Chip(
    peaks={"float32": 104.8, "tf32": 104.8, "bfloat16": 209.5, "float16": 209.5},
    peaks_from="NVIDIA RTX Blackwell whitepaper, dense, float32 accumulation",
    shares=(1.0, 0.9, 0.89),
    shares_from="not measured: between an RTX 3090 Ti and an RTX 4090, our reading",
    pci_express=5,
    both_ways=(0.9, "50.9 of 56.3 GB/s, tinygrad/open-gpu-kernel-modules issue 29"),
)

_DESKTOP: Final = "a desktop's, a common size"
# Name, chip, description, GiB as torch reports them, GB/s of its memory, GiB of host memory and whose that is.
_CARDS: Final = (
    ("t4", _T4, "NVIDIA T4, 16 GB", 14.75, 320, 48, "192 GB of a cloud machine with 4 GPUs"),
    ("v100-16g", _V100, "NVIDIA V100 SXM2, 16 GB", 15.78, 900, 64, "512 GB of a DGX-1 for 8 GPUs"),
    ("v100-32g", _V100, "NVIDIA V100 SXM2, 32 GB", 31.75, 900, 64, "512 GB of a DGX-1 for 8 GPUs"),
    ("a100-40g", _A100, "NVIDIA A100 SXM4, 40 GB", 39.49, 1555, 128, "1 TB of a DGX A100 320GB for 8 GPUs"),
    ("a100-80g", _A100, "NVIDIA A100 SXM4, 80 GB", 79.15, 2039, 256, "2 TB of a DGX A100 640GB for 8 GPUs"),
    ("h100-80g", _H100, "NVIDIA H100 SXM5, 80 GB", 79.11, 3350, 256, "2 TB of a DGX H100 for 8 GPUs"),
    ("h200-141g", _H100, "NVIDIA H200 SXM5, 141 GB", 139.8, 4800, 256, "2 TB of a DGX H200 for 8 GPUs"),
    ("rtx3090", _RTX3090, "NVIDIA GeForce RTX 3090, 24 GB", 23.68, 936, 64, _DESKTOP),
    ("rtx4090", _RTX4090, "NVIDIA GeForce RTX 4090, 24 GB", 23.64, 1008, 64, _DESKTOP),
    ("rtx5090", _RTX5090, "NVIDIA GeForce RTX 5090, 32 GB", 31.36, 1792, 64, _DESKTOP),
)


def _machine(
    name: str, chip: _Chip, description: str, gib: float, gb_per_s: float, host_gib: int, host_of: str
) -> Machine:
    """Build an accelerator from a row of the table."""
    tensor, vector, memory = chip.shares
    out, into = (_WIDTH * lane for lane in LANE_BYTES_PER_S[chip.pci_express])
    printed = ", ".join(f"{dtype} {peak:g}" for dtype, peak in chip.peaks.items())
    link_source = f"PCI Express {chip.pci_express} x16, large pinned copies"
    return Machine(
        name=name,
        description=description,
        memory_bytes=round(gib * _GIB),
        flops_per_s={
            dtype: peak * 1e12 * (vector if dtype == "float32" else tensor) for dtype, peak in chip.peaks.items()
        },
        memory_bytes_per_s=gb_per_s * 1e9 * memory,
        kernels="cuda",
        host_out_bytes_per_s=out,
        host_in_bytes_per_s=into,
        both_ways_factor=chip.both_ways[0],
        link_latency_s=_LINK_LATENCY_S,
        host_memory_bytes=host_gib * _GIB,
        sources={
            "host_memory_bytes": f"{host_gib} GiB: {host_of}",
            "memory_bytes": f"{gib:g} GiB as torch reports it",
            "flops_per_s": (
                f"peaks in TFLOP/s: {printed} ({chip.peaks_from}); times {vector} (float32) and {tensor} "
                f"(tensor cores): {chip.shares_from}"
            ),
            "memory_bytes_per_s": f"{gb_per_s:g} GB/s ({chip.peaks_from}) times {memory}: {chip.shares_from}",
            "both_ways_factor": chip.both_ways[1],
            "host_out_bytes_per_s": link_source,
            "host_in_bytes_per_s": link_source,
            "link_latency_s": "order of a copy's launch and completion (Zhang et al. 2019 measured 10 to 47 us)",
        },
    )


_CPU: Final = Machine(
    name="cpu",
    description="a generic CPU: 8 cores with AVX2 at 3 GHz, two channels of DDR4-3200, an NVMe disk",
    memory_bytes=32 * _GIB,
    # 8 cores x 3e9 Hz x 2 units x 8 lanes x 2 operations = 768 GFLOP/s.
    flops_per_s={"float32": 768e9 * 0.7, "float64": 384e9 * 0.7, "bfloat16": 768e9 * 0.35, "float16": 768e9 * 0.35},
    memory_bytes_per_s=51.2e9 * 0.7,
    # See [Note: where swaps go] in model.py.
    swaps_to="disk",
    host_out_bytes_per_s=1.5e9,
    host_in_bytes_per_s=2.5e9,
    both_ways_factor=0.5,
    link_latency_s=1e-4,
    sources={
        "memory_bytes": "a common size",
        "flops_per_s": "8 cores x 3 GHz x 2 FMA units x 8 lanes x 2 = 768 GFLOP/s float32, times 0.7; our arithmetic",
        "memory_bytes_per_s": "2 channels x 8 bytes x 3.2 GT/s = 51.2 GB/s, times 0.7; our arithmetic",
        "host_out_bytes_per_s": "a PCI Express 3 NVMe disk under sustained writes, round figure",
        "host_in_bytes_per_s": "a PCI Express 3 NVMe disk, round figure",
        "both_ways_factor": "both directions share one disk",
    },
)

CATALOG: Final = {machine.name: machine for machine in (*(_machine(*card) for card in _CARDS), _CPU)}
"""All machines by name."""

_LOCAL: Final = {"local": ("cuda", "cpu"), "localcuda": ("cuda",), "localcpu": ("cpu",)}
_ALIASES: Final = {"v100": "v100-32g", "a100": "a100-80g", "h100": "h100-80g", "h200": "h200-141g"}


def names() -> tuple[str, ...]:
    """Return the names of all machines, smallest accelerators first."""
    return tuple(CATALOG)


def find(name: str) -> Machine:
    """Return a machine by name: case, blanks, dashes and a final "b" do not matter ("A100 80GB" is a100-80g).

    "local" is the machine that `torchdelta probe` measured, its CUDA device before its CPU; "local-cuda" and
    "local-cpu" name one of the two.

    Raises:
        MachineError: No such machine (the message names the nearest ones), or "local" was not measured.
    """
    key = _key(name)
    cached = measured(name)
    if cached is not None:
        return cached.machine
    if key in _LOCAL:
        raise MachineError(f"machine {name!r} was not measured yet: run `torchdelta probe`")
    keys = {_key(known): known for known in CATALOG} | {_key(alias): known for alias, known in _ALIASES.items()}
    if key in keys:
        return CATALOG[keys[key]]
    matches = difflib.get_close_matches(key, keys, n=3, cutoff=0.5)
    near = " or ".join(dict.fromkeys(keys[match] for match in matches))
    raise MachineError(unknown_name("machine", name, ("local", *CATALOG), near=near))


def measured(name: str) -> CachedMachine | None:
    """Return the measurement that a name stands for ("local" and its like), None if it is another or was not made."""
    found = (read_cached(device) for device in _LOCAL.get(_key(name), ()))
    return next((cached for cached in found if cached is not None), None)


def _key(name: str) -> str:
    letters = "".join(character for character in name.lower() if character.isalnum())
    return letters.removeprefix("nvidia").removeprefix("geforce").removesuffix("b")
