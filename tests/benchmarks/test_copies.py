"""What copies take from steps beside them can be measured."""

from benchmarks.copies import SHIFTS_BYTES, WAYS, measure


def test_every_kind_of_copy_is_measured() -> None:
    """Each moves bytes during steps, and the tier knows the processor time of that."""
    found = measure("tiny", num_rounds=1)
    assert found["medians"].keys() == {f"{kind}, {way}" for kind in SHIFTS_BYTES for way in WAYS}
    assert all(median["gb_per_step"] > 0 and median["cpu_s_per_gb"] > 0 for median in found["medians"].values())
