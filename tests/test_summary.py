"""The picture of what a budget did, without torch."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys

import pytest

from torchdelta.summary import FollowSummary, StepSummary, Summary

STEP = StepSummary(
    index=0,
    time_s=1.5,
    peak_bytes=3 * 2**20,
    kept_bytes=2**20,
    swapped_out_bytes=2**21,
    recomputed_bytes=2**10,
    stall_s=0.25,
    recompute_s=0.125,
)
SUMMARY = Summary(
    budget_bytes=2**30,
    peak_bytes=3 * 2**20,
    kept_bytes=2**20,
    swapped_out_bytes=2**21,
    swapped_in_bytes=2**21,
    recomputed_bytes=2**10,
    num_recomputed_ops=7,
    stall_s=0.25,
    recompute_s=0.125,
    steps=(STEP,),
)

FOLLOW = FollowSummary(
    planner="delta-2024",
    num_programs=1,
    num_followed_steps=7,
    num_diverged_steps=0,
    num_reactive_steps=2,
    num_not_carried_out=3,
    num_unplanned=4,
    divergences={},
    latest_divergence="",
    why_no_plan="",
    predicted_time_s=0.012,
    time_s=0.0132,
    predicted_peak_bytes=2**20,
    peak_bytes=2**21,
    plain_time_s=0.011,
    slowdown=1.2,
)


def test_text_says_how_a_plan_was_followed() -> None:
    """Predicted beside measured, and why steps were not followed, in at most three lines."""
    without = str(SUMMARY).splitlines()
    lines = str(dataclasses.replace(SUMMARY, follow=FOLLOW)).splitlines()
    assert lines[3:5] == [
        "following delta-2024: 1 plan; 7 steps followed, 0 diverged, 2 reactive; room made beyond the plan 4 times",
        (
            "a followed step: 13.2 ms (predicted 12.0 ms), peak 2.00 MiB (predicted 1.00 MiB); "
            "x1.20 of the plain step's ops"
        ),
    ]
    assert [*lines[:3], *lines[5:]] == without
    from_file = dataclasses.replace(FOLLOW, predicted_time_s=None, latest_divergence="save 3")
    assert str(from_file).splitlines()[1:] == [
        "a followed step: 13.2 ms, peak 2.00 MiB (predicted 1.00 MiB); x1.20 of the plain step's ops",
        "latest divergence: save 3",
    ]
    none = dataclasses.replace(FOLLOW, num_programs=0, time_s=None, peak_bytes=None, why_no_plan="too little")
    assert str(none).splitlines()[1:] == ["no plan: too little"]


def test_following_is_plain_data_too() -> None:
    """It goes through JSON with the summary."""
    data = json.loads(json.dumps(dataclasses.replace(SUMMARY, follow=FOLLOW).as_dict()))
    assert FollowSummary(**data["follow"]) == FOLLOW
    assert SUMMARY.as_dict()["follow"] is None


def test_text_names_every_total() -> None:
    """A reader sees budget, peak, what was kept, swapped and recomputed, and what it cost."""
    text = str(SUMMARY)
    for part in (
        "3.00 MiB",
        "1.00 GiB",
        "1 steps",
        "kept 1.00 MiB",
        "swapped out 2.00 MiB",
        "recomputed 1.00 KiB in 7 ops",
        "stalled 0.250 s",
        "recomputing 0.125 s",
    ):
        assert part in text
    assert "the steps fit" not in text


def test_text_says_when_nothing_was_needed() -> None:
    """Recording is then the only cost."""
    assert "the steps fit" in str(dataclasses.replace(SUMMARY, swapped_out_bytes=0, num_recomputed_ops=0))


def test_first_line_says_when_the_budget_was_passed() -> None:
    """By how much, and nothing below it claims that the steps fit."""
    passed = dataclasses.replace(SUMMARY, budget_bytes=2**21, swapped_out_bytes=0, num_recomputed_ops=0)
    assert str(passed).splitlines()[0] == "peak 3.00 MiB PASSED the budget of 2.00 MiB by 1.00 MiB; 1 steps"
    assert "the steps fit" not in str(passed)
    assert "PASSED" not in str(dataclasses.replace(passed, budget_bytes=passed.peak_bytes))
    assert "PASSED" not in str(dataclasses.replace(passed, budget_bytes=None))


def test_text_says_when_no_step_was_seen() -> None:
    """A loop that ran on another thread or in another process would look like one that fits."""
    text = str(dataclasses.replace(SUMMARY, steps=(), swapped_out_bytes=0, num_recomputed_ops=0))
    assert "no training step was seen on this thread" in text
    assert "the steps fit" not in text
    assert "no training step" not in str(SUMMARY)


def test_text_says_when_no_budget_was_consulted() -> None:
    """Forced decisions have no budget."""
    assert "decisions are forced" in str(dataclasses.replace(SUMMARY, budget_bytes=None))


@pytest.mark.parametrize(
    ("num_steps", "shown"), [(1, [0]), (4, [0, 1, 2, 3]), (5, [0, 1, 2, 4]), (900, [0, 1, 2, 899])]
)
def test_table_of_steps_stays_short(num_steps: int, shown: list[int]) -> None:
    """The first three and the last; columns stand under their heads."""
    steps = tuple(dataclasses.replace(STEP, index=index) for index in range(num_steps))
    lines = str(dataclasses.replace(SUMMARY, steps=steps)).splitlines()[3:]
    assert [int(line.split()[0]) for line in lines[1:]] == shown
    assert len({len(line) for line in lines}) <= 1


def test_as_dict_is_plain_data() -> None:
    """It goes through JSON and back, steps included."""
    data = json.loads(json.dumps(SUMMARY.as_dict()))
    assert data["num_recomputed_ops"] == 7
    assert data["steps"][0]["peak_bytes"] == STEP.peak_bytes
    assert Summary(**{**data, "steps": tuple(StepSummary(**step) for step in data["steps"])}) == SUMMARY


def test_summary_does_not_change() -> None:
    """It is a picture, not a view."""
    with pytest.raises(dataclasses.FrozenInstanceError):
        SUMMARY.peak_bytes = 0  # pyright: ignore[reportAttributeAccessIssue]


def test_summary_needs_no_torch() -> None:
    """Files and reports read it on machines without torch."""
    code = "import sys, torchdelta.summary; print('torch' in sys.modules)"
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
        == "False"
    )
