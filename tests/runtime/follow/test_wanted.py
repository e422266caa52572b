"""How long a step without a program is looked for."""

from __future__ import annotations

from typing import Any

from torchdelta.runtime.follow.follower import EndedStep
from torchdelta.runtime.follow.wanted import MOST_FRUITLESS_TRACES, WantedSteps

FIRST = 9
USUAL: Any = (5, 1)
ODD: Any = (1, 77)


def ended(key: Any) -> EndedStep:
    """Return a step that has ended."""
    return EndedStep(
        key=key, first=FIRST, start_bytes=100, program=None, is_exact=False, was_watched=True, had_abandoned=False
    )


def num_fruitless_traces(wanted: WantedSteps) -> int:
    """Meet the odd step once, and then the usual one, until no trace is wanted. Return how many were traced."""
    wanted.on_step_end(ended(ODD), lambda key, _start: key == USUAL, is_fruitless=False)
    num_traces = 0
    while wanted.wants_trace:
        num_traces += 1
        wanted.on_step_end(ended(USUAL), lambda key, _start: key == USUAL, is_fruitless=True)
    return num_traces


def test_a_step_that_never_comes_again_is_looked_for_less_and_less() -> None:
    """Each time half as long: what left its outline once is not known as a whole."""
    wanted = WantedSteps()
    assert [num_fruitless_traces(wanted) for _ in range(5)] == [MOST_FRUITLESS_TRACES, 3, 1, 1, 1]


def test_a_step_that_gets_its_program_is_looked_for_as_long_as_at_first() -> None:
    """It did come again."""
    wanted = WantedSteps()
    num_fruitless_traces(wanted)
    wanted.on_step_end(ended(ODD), lambda key, _start: key == USUAL, is_fruitless=False)
    wanted.on_step_end(ended(ODD), lambda _key, _start: True, is_fruitless=False)
    assert not wanted.wants_trace
    assert num_fruitless_traces(wanted) == MOST_FRUITLESS_TRACES


def test_a_step_that_is_served_by_another_program_is_not_looked_for() -> None:
    """Where there is no room for one more program, tracing and planning it would be in vain."""
    wanted = WantedSteps()
    wanted.on_step_end(ended(ODD), lambda _key, _start: False, is_fruitless=False, is_served=True)
    assert not wanted.wants_trace
    wanted.on_step_end(ended(ODD), lambda _key, _start: False, is_fruitless=False)
    assert wanted.wants_trace


def test_usual_steps_change_nothing() -> None:
    """A step that has its program is not one that was looked for."""
    wanted = WantedSteps()
    assert num_fruitless_traces(wanted) == MOST_FRUITLESS_TRACES
    for _ in range(10):
        wanted.on_step_end(ended(USUAL), lambda key, _start: key == USUAL, is_fruitless=False)
    assert num_fruitless_traces(wanted) < MOST_FRUITLESS_TRACES
