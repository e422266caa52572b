"""The switches of the negative controls."""

from __future__ import annotations

import pytest

from tests.faults.switches import SWITCHES, disabled


def switched_off() -> list[str]:
    """Return the names of the safeties that are off."""
    return [name for name, switch in SWITCHES.items() if getattr(switch.owner, switch.function) is switch.replacement]


@pytest.mark.parametrize("name", SWITCHES)
def test_switch_lasts_as_long_as_its_scope(name: str) -> None:
    """One safety is off inside; all are on before, and again after an exception."""
    switch = SWITCHES[name]
    function = getattr(switch.owner, switch.function)
    assert switched_off() == []
    with disabled(name):
        assert switched_off() == [name]
    with pytest.raises(KeyError), disabled(name):
        raise KeyError
    assert getattr(switch.owner, switch.function) is function


def test_unknown_safety_is_refused() -> None:
    """A misspelt name would turn a negative control into a silent pass: the message names those that exist."""
    with pytest.raises(ValueError, match="rng-replay"), disabled("gravity"):
        pytest.fail("it has no such switch")
