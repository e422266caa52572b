"""The switches of the negative controls."""

from __future__ import annotations

import pytest

from torchdelta.runtime import faults


def test_nothing_is_switched_off_by_itself() -> None:
    """All safeties are on outside of tests."""
    assert not any(faults.is_disabled(name) for name in faults.NAMES)


@pytest.mark.parametrize("name", faults.NAMES)
def test_switch_lasts_as_long_as_its_scope(name: str) -> None:
    """One safety is off inside, all are on after an exception too."""
    with faults.disabled(name):
        assert [other for other in faults.NAMES if faults.is_disabled(other)] == [name]
    with pytest.raises(KeyError), faults.disabled(name):
        raise KeyError
    assert not faults.is_disabled(name)


def test_unknown_safety_is_refused() -> None:
    """The message names those that exist."""
    with pytest.raises(ValueError, match="rng-replay"), faults.disabled("gravity"):
        pytest.fail("it has no such switch")
