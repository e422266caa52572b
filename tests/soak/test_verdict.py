"""The soak's judge: it sees what it should, and only that."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.outcome import Outcome
from benchmarks.soak import schedule
from benchmarks.soak.command import Tally, judge, take

FAULTS = ("", *schedule.SHARED_FAULTS, *schedule.OWN_FAULTS)


def step(index: int, **changes: Any) -> dict[str, Any]:
    """Return the record of a good step."""
    return {
        "kind": "step",
        "index": index,
        "fault": FAULTS[index % len(FAULTS)],
        "lost": [],
        "is_known": True,
        "peak_bytes": 90,
        "budget_bytes": 100,
        "metered_peak_bytes": 95,
        "num_handles": 0,
        "bits": {"losses": ["0x1p+0"], "gradients": "ab"},
    } | changes


def episode(index: int, **changes: Any) -> dict[str, Any]:
    """Return the record of a good episode."""
    return {
        "kind": "episode",
        "index": index,
        "model": schedule.MODELS[index % len(schedule.MODELS)],
        "state": "cd",
        "evicted_bytes": 1,
        "num_swap_files": 0,
        "live_bytes": 1000,
        "num_objects": 100_000,
        "num_files": 4,
        "num_threads": 1,
        "num_native_threads": 2,
        "heap_bytes": 500_000,
        "rss_bytes": 1_000_000,
        "types": {"dict": 7},
    } | changes


def failed(broken: dict[str, Any] | None = None, *, of_plain: bool = False) -> set[str]:
    """Judge a run in which one record is not as it should be. Returns the names of the checks that fail."""
    tally, outcome = Tally(), Outcome()
    for index in range(20):
        for good in (*(step(index * 30 + place) for place in range(30)), episode(index)):
            is_broken = broken is not None and (good["kind"], good["index"]) == (broken["kind"], broken["index"])
            ours = broken if is_broken and broken is not None and not of_plain else good
            plain = broken if is_broken and broken is not None and of_plain else good
            take(tally, dict(ours), dict(plain))
    judge(outcome, tally)
    return {check.name for check in outcome.checks if not check.passed and check.required}


def test_a_good_run_passes() -> None:
    """Nothing fails where nothing is wrong."""
    assert failed() == set()


@pytest.mark.parametrize(
    ("broken", "name"),
    [
        (step(7, bits={"losses": ["0x1p+0"], "gradients": "ac"}), "same bits"),
        (step(7, bits={"losses": ["0x1p+0"]}), "same bits"),
        (episode(19, state="ce"), "same bits"),
        (step(7, peak_bytes=101), "budget, by the runtime"),
        (step(7, metered_peak_bytes=101), "budget, by the profiler"),
        (step(7, unexpected="ValueError: no"), "errors"),
        (step(7, num_handles=1), "left behind by a step"),
        (episode(19, num_swap_files=1), "left behind by a step"),
        (episode(19, live_bytes=1004), "growth: live_bytes"),
        (episode(19, num_files=5), "growth: num_files"),
        (episode(19, num_native_threads=3), "growth: num_native_threads"),
    ],
)
def test_what_is_wrong_is_seen(broken: dict[str, Any], name: str) -> None:
    """One wrong record among hundreds fails the check that is about it, and no other."""
    assert failed(broken) == {name}


def test_growth_that_is_slow_is_seen() -> None:
    """Objects, heap and resident pages may waver, but not climb."""
    for key in ("num_objects", "heap_bytes", "rss_bytes"):
        tally, outcome = Tally(), Outcome()
        for index in range(20):
            take(tally, step(index), step(index))
            good = episode(index)
            take(tally, good | {key: int(good[key] * (1 + 0.005 * index))}, dict(good))
        judge(outcome, tally)
        assert f"growth: {key}" in {check.name for check in outcome.checks if not check.passed}


def test_a_first_meeting_may_be_above() -> None:
    """What ops take inside themselves is learned when their shapes are first met: stated, not promised."""
    assert failed(step(7, peak_bytes=101, is_known=False)) == set()


def test_an_error_of_the_plain_process_is_no_success() -> None:
    """A twin that fails proves nothing."""
    assert failed(step(7, unexpected="ValueError: no"), of_plain=True) == {"errors"}


def test_processes_out_of_step_are_not_compared() -> None:
    """Records of different steps are an error of the soak itself."""
    with pytest.raises(RuntimeError, match="out of step"):
        take(Tally(), step(1), step(2))


def test_growth_is_not_judged_before_every_model_is_met() -> None:
    """A model's optimizer makes its states when it is first trained."""
    tally, outcome = Tally(), Outcome()
    for index in range(20):
        take(tally, step(index), step(index))
        first = index < 10
        late = episode(index, model=schedule.MODELS[0] if first else schedule.MODELS[-1], live_bytes=1000 + index)
        take(tally, late, dict(late))
    judge(outcome, tally)
    growth = [check for check in outcome.checks if check.name.startswith("growth")]
    assert [check.name for check in growth] == ["growth"]
    assert not growth[0].required
