"""The link between a device and its host by generation and width, for a machine that is in another slot than usual.

[Note: what a PCI Express link carries]
Rates are those of large pinned copies, a lane: what x16 links were measured at, divided by 16. Generation 5: 56.3 GB/s
in and 57.3 out (an RTX 5090, tinygrad/open-gpu-kernel-modules issue 29). Generation 4: 26.3 and 26.9 (RTX 4090s,
NVIDIA/nvbandwidth issue 15). Generation 3: 12.2 and 13.2 (Zhang et al. 2019). Narrower links carry their share of
lanes, which is our reading: cards in x8 and x4 slots were not among the published figures.

A copy from or to pageable memory goes through a pinned buffer of the driver, a piece at a time, copied by one thread of
the host: 9.9 GB/s in were measured (a DGX Station V100, pytorch/kineto), and no link makes that thread faster. It is
taken to do one direction at a time (`both_ways_factor` 0.5). torchdelta's own tier is always pinned.
"""

import re
from typing import Final

from msgspec.structs import replace

from torchdelta.errors import MachineError
from torchdelta.machine.model import Machine
from torchdelta.names import unknown_name

__all__ = ["LANE_BYTES_PER_S", "LINKS", "PAGEABLE_BYTES_PER_S", "with_link"]

LANE_BYTES_PER_S: Final = {
    3: (13.2e9 / 16, 12.2e9 / 16),
    4: (26.9e9 / 16, 26.3e9 / 16),
    5: (57.3e9 / 16, 56.3e9 / 16),
}
"""A lane's rate to the host and from it, by generation."""

PAGEABLE_BYTES_PER_S: Final = 9.9e9
"""What the thread that copies pageable memory reaches at most."""

LINKS: Final = tuple(f"pcie{generation}-x{width}" for generation in LANE_BYTES_PER_S for width in (4, 8, 16))
"""The names of pinned links; each may be followed by "-pageable"."""

_NAME: Final = re.compile(r"(pcie\d-x\d+)(-pageable|-pinned)?")


def with_link(machine: Machine, name: str) -> Machine:
    """Return a machine with another link to its host.

    Args:
        machine: One that swaps to its host.
        name: Generation and width, `"pcie4-x8"`; `"pcie4-x8-pageable"` for host memory that is not pinned.

    Raises:
        MachineError: There is no such link, or the machine swaps to its disk.
    """
    found = _NAME.fullmatch(name.lower())
    if found is None or found[1] not in LINKS:
        raise MachineError(unknown_name("link", name, LINKS))
    if machine.swaps_to == "disk":
        raise MachineError(f"machine {machine.name} swaps to its disk: it has no link to choose")
    generation, width = (int(number) for number in found[1].removeprefix("pcie").split("-x"))
    out, into = (width * lane for lane in LANE_BYTES_PER_S[generation])
    factor = machine.both_ways_factor
    how = "large pinned copies, scaled from x16"
    if found[2] == "-pageable":
        out, into, factor = min(out, PAGEABLE_BYTES_PER_S), min(into, PAGEABLE_BYTES_PER_S), 0.5
        how = "copies through a pinned buffer of the driver, by one thread"
    source = f"--link {name}: PCI Express {generation} x{width}, {how}"
    fields = ("host_out_bytes_per_s", "host_in_bytes_per_s")
    # A disk behind the device's own link is no faster than the link.
    disk = {
        field: min(rate, limit)
        for field, rate, limit in (
            ("disk_write_bytes_per_s", machine.disk_write_bytes_per_s, out),
            ("disk_read_bytes_per_s", machine.disk_read_bytes_per_s, into),
        )
    }
    return replace(
        machine,
        host_out_bytes_per_s=out,
        host_in_bytes_per_s=into,
        both_ways_factor=factor,
        sources=machine.sources | dict.fromkeys(fields, source),
        **disk,
    )
