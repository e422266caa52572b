"""What must hold of a machine."""

import csv
import re
from pathlib import Path

import msgspec
import pytest

from torchdelta.errors import MachineError
from torchdelta.machine.catalog import find
from torchdelta.machine.model import Machine, reserve_bytes, validate_machine

PUBLISHED = Path("../shared/data/gpu/published.csv")
"""What others published of their runs; may be absent."""


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("name", "", "no name"),
        ("memory_bytes", 0, "memory_bytes is 0"),
        ("memory_bytes_per_s", float("nan"), "memory_bytes_per_s is nan"),
        ("flops_per_s", {"bfloat16": 1.0}, "no rate for float32"),
        ("flops_per_s", {"float32": -1.0}, r"flops_per_s\['float32'\] is -1.0"),
        ("link_latency_s", -1e-6, "link_latency_s is -1e-06"),
        ("both_ways_factor", 1.5, "both_ways_factor is 1.5"),
        ("disk_read_bytes_per_s", 1e9, "one direction only"),
    ],
)
def test_a_machine_that_makes_no_sense_is_refused(field, value, message):
    """One line names the machine, the field and the value."""
    machine = msgspec.structs.replace(find("a100-80g"), **{field: value})
    with pytest.raises(MachineError, match=message) as caught:
        validate_machine(machine)
    assert "\n" not in str(caught.value)


def test_a_machine_survives_its_file_form():
    """JSON and back gives the same machine; an unknown field is refused."""
    machine = find("cpu")
    text = msgspec.json.encode(machine)
    assert msgspec.json.decode(text, type=Machine) == machine
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(text[:-1] + b',"speed":1}', type=Machine)


@pytest.mark.skipif(not PUBLISHED.is_file(), reason="the published cases are not here")
def test_the_reserve_separates_what_ran():
    """Published batches of an RTX 3090 that ran fit beside the reserve, the next larger ones do not, but for one."""
    rtx3090 = find("rtx3090")
    budget_gib = (rtx3090.memory_bytes - reserve_bytes(rtx3090)) / 2**30
    with PUBLISHED.open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["quantity"] == "largest_batch_of_ladder_that_ran"]
    ran = [float(row["predicted"]) for row in rows]
    failed = [float(found[1]) for row in rows if (found := re.search(r"out of memory: ([0-9.]+) GiB", row["note"]))]
    assert (len(ran), len(failed)) == (62, 49)

    def num_wrong(limit_gib: float) -> int:
        return sum(peak > limit_gib for peak in ran) + sum(peak <= limit_gib for peak in failed)

    assert budget_gib == pytest.approx(21.6, abs=0.01)
    assert num_wrong(budget_gib) == 1
    assert num_wrong(rtx3090.memory_bytes / 2**30) == 15
