"""The catalog: machines by name, and figures that can be believed."""

import pytest

from torchdelta.errors import MachineError
from torchdelta.machine.catalog import CATALOG, find, names
from torchdelta.machine.model import matrix_flops_per_s, validate_machine


@pytest.mark.parametrize("name", names())
def test_every_machine_is_valid_and_says_where_its_figures_are_from(name):
    """Each machine passes validation, and each of its rates has a source."""
    machine = find(name)
    validate_machine(machine)
    assert machine.name == name
    for field in ("memory_bytes", "flops_per_s", "memory_bytes_per_s", "host_out_bytes_per_s", "host_in_bytes_per_s"):
        assert machine.sources[field], field


def test_rates_are_those_that_were_measured():
    """Where large products and streams were measured on a GPU, the catalog is within 7 % of them; links within 7 %."""
    measured = {"v100-32g": (95e12, 784e9), "a100-80g": (230e12, 1616e9), "rtx4090": (172e12, 936e9)}
    for name, (products, stream) in measured.items():
        machine = find(name)
        assert machine.flops_per_s["float16"] == pytest.approx(products, rel=0.01)
        assert machine.memory_bytes_per_s == pytest.approx(stream, rel=0.07)
    assert find("a100-80g").host_in_bytes_per_s == pytest.approx(25.13e9, rel=0.07)
    assert find("rtx5090").both_ways_factor == 0.9
    assert find("rtx4090").both_ways_factor == 0.55


def test_tf32_is_a_choice():
    """Without tensor cores float32 products run at the rate of the vector units; other dtypes have their own."""
    a100 = find("a100-80g")
    assert matrix_flops_per_s(a100, "float32", tf32=False) == pytest.approx(19.5e12 * 0.89)
    assert matrix_flops_per_s(a100, "bfloat16") == 2 * matrix_flops_per_s(a100, "float32")
    assert matrix_flops_per_s(find("v100"), "float64") == matrix_flops_per_s(find("v100"), "float32") / 2


@pytest.mark.parametrize(
    ("text", "name"),
    [("A100-80GB", "a100-80g"), ("a100 80g", "a100-80g"), ("V100", "v100-32g"), ("NVIDIA GeForce RTX 4090", "rtx4090")],
)
def test_names_as_people_write_them(text, name):
    """Case, blanks, dashes, the vendor and a final b do not matter."""
    assert find(text).name == name


def test_an_unknown_machine_names_the_nearest():
    """A typing error gets the machine that was meant, and the whole list."""
    with pytest.raises(MachineError, match=r"unknown machine 'rtx4091': did you mean rtx4090") as caught:
        find("rtx4091")
    assert "\n" not in str(caught.value)
    assert all(name in str(caught.value) for name in CATALOG)
    with pytest.raises(MachineError, match="use local, t4, "):
        find("abacus")


@pytest.mark.parametrize("name", names())
def test_where_swaps_go(name):
    """An accelerator has a host with a memory of its own; a CPU swaps to its disk, slower than its memory by far."""
    machine = find(name)
    if name == "cpu":
        assert machine.swaps_to == "disk"
        assert machine.host_out_bytes_per_s < machine.memory_bytes_per_s / 10
        assert machine.disk_write_bytes_per_s == 0
    else:
        assert machine.swaps_to == "host"
        assert machine.host_memory_bytes is not None
        assert machine.host_memory_bytes >= machine.memory_bytes
        assert machine.sources["host_memory_bytes"]
