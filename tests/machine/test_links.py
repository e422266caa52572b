"""The link by generation and width."""

import pytest

from torchdelta.errors import MachineError
from torchdelta.machine.catalog import find
from torchdelta.machine.links import LINKS, PAGEABLE_BYTES_PER_S, with_link
from torchdelta.machine.model import validate_machine

RTX4090 = find("rtx4090")


@pytest.mark.parametrize("name", LINKS)
def test_every_link_makes_a_valid_machine(name):
    """Each name gives a machine whose rates say where they are from, and nothing else of it changes."""
    machine = with_link(RTX4090, name)
    validate_machine(machine)
    assert name in machine.sources["host_out_bytes_per_s"]
    assert machine.flops_per_s == RTX4090.flops_per_s
    assert machine.both_ways_factor == RTX4090.both_ways_factor


def test_half_the_lanes_carry_half():
    """Width is proportional; the machine's own slot is one of the names."""
    whole, half = with_link(RTX4090, "pcie4-x16"), with_link(RTX4090, "PCIe4-x8")
    assert half.host_in_bytes_per_s == whole.host_in_bytes_per_s / 2
    assert whole.host_out_bytes_per_s == RTX4090.host_out_bytes_per_s
    assert with_link(RTX4090, "pcie4-x8-pinned") == with_link(RTX4090, "pcie4-x8-pinned")


def test_pageable_memory_is_as_fast_as_one_thread():
    """A fast link does not help it, a slow one limits it, and both directions share the thread."""
    fast, slow = with_link(RTX4090, "pcie5-x16-pageable"), with_link(RTX4090, "pcie3-x4-pageable")
    assert fast.host_in_bytes_per_s == fast.host_out_bytes_per_s == PAGEABLE_BYTES_PER_S
    assert slow.host_in_bytes_per_s == with_link(RTX4090, "pcie3-x4").host_in_bytes_per_s
    assert fast.both_ways_factor == 0.5


@pytest.mark.parametrize(
    ("machine", "name", "message"),
    [
        ("rtx4090", "pcie4-x9", "unknown link 'pcie4-x9': did you mean pcie4-x8"),
        ("rtx4090", "pcie4", "unknown link 'pcie4': did you mean pcie"),
        ("rtx4090", "nvlink", "unknown link 'nvlink': "),
        ("rtx4090", "pcie4-x8-paged", "unknown link 'pcie4-x8-paged': did you mean pcie4-x8"),
        ("cpu", "pcie4-x8", "machine cpu swaps to its disk: it has no link to choose"),
    ],
)
def test_what_is_no_link(machine, name, message):
    """A wrong name gets the nearest one, in one line; a machine without a link says so."""
    with pytest.raises(MachineError) as caught:
        with_link(find(machine), name)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
