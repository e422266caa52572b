"""The benchmark of counting reaches into the recorder: it has to go on doing what the recorder does."""

import pytest

from benchmarks.overheads import unit_times_s
from torchdelta.errors import NativeError
from torchdelta.native.counting import new_counter


def test_units_of_counting_can_be_timed() -> None:
    """What it does to the recorder is still what the recorder offers."""
    counter = new_counter()
    if isinstance(counter, NativeError):
        pytest.skip(str(counter))
    times_s = unit_times_s(counter, num_calls=10)
    assert times_s.keys() == {"allocation_s", "op_s"}
