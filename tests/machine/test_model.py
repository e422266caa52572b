"""What must hold of a machine."""

import msgspec
import pytest

from torchdelta.errors import MachineError
from torchdelta.machine.catalog import find
from torchdelta.machine.model import Machine, validate_machine


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
