"""The picture of what a budget did, without torch."""

from __future__ import annotations

import dataclasses
import html as html_module
import json
import subprocess
import sys

import pytest

from torchdelta.summary import FollowSummary, PlainPeak, StepSummary, Summary, least_slowdown, most_slowdown

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

PEAK = PlainPeak(
    size_bytes=5 * 2**29,
    op="aten._softmax.default",
    module="h.3.attn",
    phase="backward",
    node="SoftmaxBackward0",
    groups={"saved tensors": 2**31, "parameters": 2**29},
    largest_modules={"h.3.attn": 2**30},
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
    """Predicted beside measured, and why steps were not followed, in at most four lines."""
    facts = dataclasses.replace(SUMMARY, follow=FOLLOW).facts()
    assert [text for label, text in facts if label == "plan"] == [
        "following delta-2024: 1 plan; 7 steps followed, 0 diverged, 2 reactive; room made beyond the plan 4 times",
        (
            "a followed step: 13.2 ms (predicted 12.0 ms), peak 2.00 MiB (predicted 1.00 MiB); "
            "x1.20 of the plain step's ops"
        ),
    ]
    assert [fact for fact in facts if fact[0] != "plan"] == SUMMARY.facts()
    from_file = dataclasses.replace(FOLLOW, predicted_time_s=None, latest_divergence="save 3")
    assert str(from_file).splitlines()[1:] == [
        "a followed step: 13.2 ms, peak 2.00 MiB (predicted 1.00 MiB); x1.20 of the plain step's ops",
        "latest divergence: save 3",
    ]
    several = dataclasses.replace(
        FOLLOW,
        num_programs=6,
        num_diverged_steps=9,
        num_steps_by_plan={1: 2, 2: 9, 3: 9, 5: 1, 6: 1},
        divergences={"save 3 has another shape": 4, "it ended early": 1},
        latest_divergence="it ended early: 5 saves of 9",
    )
    assert str(several).splitlines()[2:] == [
        "steps by plan: no. 2 9, no. 3 9, no. 1 2, no. 5 1, ...",
        (
            "steps diverged by reason: save 3 has another shape (4), it ended early (1), ...; the latest: it ended "
            "early: 5 saves of 9"
        ),
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
        "1 step\n",
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
    assert str(passed).splitlines()[0] == "peak 3.00 MiB PASSED the budget of 2.00 MiB by 1.00 MiB; 1 step"
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


def test_text_says_why_tensors_left_and_what_would_help() -> None:
    """The op and module at the peak, what is alive there, and the budget in which nothing leaves."""
    lines = str(dataclasses.replace(SUMMARY, plain_peak=PEAK)).splitlines()
    where = "backward, SoftmaxBackward0, aten._softmax.default of h.3.attn"
    assert [line.strip() for line in lines[3:7]] == [
        f"why         without a budget the first step peaks at 2.50 GiB: {where}",
        "on the device then: saved tensors 2.00 GiB, parameters 512.00 MiB",
        "saved the most: h.3.attn (1.00 GiB)",
        "would help  with a budget of 2.50 GiB such a step evicts little or nothing",
    ]
    larger = dataclasses.replace(SUMMARY, plain_peak=PEAK, budget_bytes=2**32)
    assert "would help" not in str(larger)
    several = str(dataclasses.replace(SUMMARY, plain_peak=PEAK, had_other_optimizers=True))
    assert "would help" not in several
    assert "later steps need more: optimizer states are there too" in several
    accumulating = dataclasses.replace(SUMMARY, plain_peak=PEAK, num_steps=4, num_optimizer_steps=2)
    assert "would help" not in str(accumulating)
    assert "the first micro-batch peaks at" in str(accumulating)
    assert "later micro-batches need more" in str(accumulating)
    assert "micro-batch" not in str(SUMMARY)


def test_text_says_what_a_larger_budget_would_cost() -> None:
    """As the planner predicts it; without a plan, half of the cost for the budget halfway to the plain peak."""
    helped = dataclasses.replace(SUMMARY, plain_peak=PEAK, budget_bytes=2**31, slowdown_at_least=1.2)
    halfway = "a budget of 2.25 GiB would cost about 10 %, where this one costs 20 % or more (estimated)"
    enough = "with a budget of 2.50 GiB such a step evicts little or nothing"
    assert [text for label, text in helped.facts() if label == "would help"] == [halfway, enough]
    follow = dataclasses.replace(FOLLOW, overheads_by_budget={2**31: 0.09, 2**31 + 2**27: 0.043, 2**31 + 2**28: 0.002})
    planned = [text for label, text in dataclasses.replace(helped, follow=follow).facts() if label == "would help"]
    assert planned == [
        "a larger budget: a planned step costs 9 % in 2.00 GiB, 4 % in 2.12 GiB, under 1 % in 2.25 GiB (predicted)",
        enough,
    ]
    calm = dataclasses.replace(helped, slowdown_at_least=1.001)
    assert [text for label, text in calm.facts() if label == "would help"] == [enough]


def test_text_says_what_it_cost() -> None:
    """Between two bounds; from waits and replays alone if no op was timed; small ones are not exaggerated."""
    about = dataclasses.replace(SUMMARY, slowdown_at_least=4 / 3)
    assert "at least x1.33 of the plain time (estimated): stalled 0.250 s, recomputing 0.125 s" in str(about)
    assert "x1.33 to x1.50 of the plain time (estimated" in str(dataclasses.replace(about, slowdown_at_most=1.5))
    assert "under 1 %" in str(dataclasses.replace(SUMMARY, slowdown_at_least=1.001))


def test_slowdown_is_the_time_against_the_time_without_waits_and_replays() -> None:
    """The first step, which warms up, counts only if it is the only one."""
    assert least_slowdown(()) is None
    assert least_slowdown((STEP,)) == pytest.approx(1.5 / 1.125)
    calm = dataclasses.replace(STEP, stall_s=0.0, recompute_s=0.0)
    assert least_slowdown((STEP, calm, calm)) == 1.0
    assert least_slowdown((dataclasses.replace(calm, evict_s=0.5),)) == pytest.approx(1.5)


def test_slowdown_is_at_most_the_time_against_that_of_the_ops() -> None:
    """What the program does between its ops counts there; the first step only if it is the only one."""
    timed = dataclasses.replace(STEP, op_time_s=1.0)
    assert most_slowdown(()) is most_slowdown((STEP,)) is None
    assert most_slowdown((timed,)) == pytest.approx(1.5)
    assert most_slowdown((STEP, timed, dataclasses.replace(timed, op_time_s=2.0))) == pytest.approx(1.0)
    followed = dataclasses.replace(timed, op_time_s=0.01, plan=1)  # most of its ops were not timed
    assert most_slowdown((STEP, timed, followed)) == most_slowdown((STEP, timed))


def test_micro_batches_are_told_from_steps() -> None:
    """Under accumulation the first line counts both, and the table says which step a micro-batch belongs to."""
    steps = tuple(
        dataclasses.replace(STEP, index=index, optimizer_step=index // 2, had_optimizer=index % 2 == 1)
        for index in range(4)
    )
    summary = dataclasses.replace(SUMMARY, steps=steps, num_steps=4, num_optimizer_steps=2)
    lines = str(summary).splitlines()
    assert lines[0].endswith("2 steps in 4 micro-batches")
    assert lines[-5].split()[:2] == ["micro", "step"]
    assert [line.split()[:2] for line in lines[-4:]] == [["0", "0"], ["1", "0"], ["2", "1"], ["3", "1"]]
    assert "micro" not in str(dataclasses.replace(summary, num_optimizer_steps=4))
    assert "micro" not in str(dataclasses.replace(summary, num_optimizer_steps=0))


@pytest.mark.parametrize("skipped", [0, 1])
def test_a_skipped_optimizer_step_is_no_accumulation(skipped: int) -> None:
    """A GradScaler skips the optimizer on overflow, most often in the first step: its peak has no states then."""
    steps = tuple(dataclasses.replace(STEP, index=index, had_optimizer=index != skipped) for index in range(6))
    summary = dataclasses.replace(SUMMARY, steps=steps, num_steps=6, num_optimizer_steps=5, plain_peak=PEAK)
    text = str(dataclasses.replace(summary, first_had_optimizer=skipped != 0))
    assert "; 6 steps" in text
    assert "micro" not in text
    assert "the first step peaks at 2.50 GiB" in text
    assert ("later steps need more: optimizer states are there too" in text) == (skipped == 0)
    assert ("with a budget of 2.50 GiB such a step evicts little or nothing" in text) == (skipped != 0)


def test_long_runs_count_all_their_steps() -> None:
    """The latest 10,000 have a summary of their own; the first line counts the others, too."""
    assert "; 12345 steps" in str(dataclasses.replace(SUMMARY, num_steps=12345))


def test_start_of_the_script_is_said_apart() -> None:
    """A second or more before the first step is no part of it."""
    assert "2.5 s passed before the first step" in str(dataclasses.replace(SUMMARY, startup_s=2.5))
    assert "before the first step" not in str(SUMMARY)


def test_notebook_shows_the_same_in_html() -> None:
    """Every fact and number of the text, with what could be markup escaped."""
    odd = dataclasses.replace(PEAK, module="<b>&")
    summary = dataclasses.replace(SUMMARY, plain_peak=odd, follow=FOLLOW)
    html = summary._repr_html_()
    assert "<b>&" not in html.replace("<b>torchdelta", "")
    assert "&lt;b&gt;&amp;" in html
    for text in (summary.headline(), *(text for _, text in summary.facts())):
        assert html_module.escape(text) in html
    for cell in summary.step_table()[1][0]:
        assert f">{cell}</td>" in html
    assert [label for label, _ in summary.facts()].count("why") > 1
    assert html.count(">why</th>") == 1


@pytest.mark.parametrize(
    ("num_steps", "shown"), [(1, [0]), (4, [0, 1, 2, 3]), (5, [0, 1, 2, 4]), (900, [0, 1, 2, 899])]
)
def test_table_of_steps_stays_short(num_steps: int, shown: list[int]) -> None:
    """The first three and the last; columns stand under their heads."""
    steps = tuple(dataclasses.replace(STEP, index=index) for index in range(num_steps))
    lines = str(dataclasses.replace(SUMMARY, steps=steps)).splitlines()[-len(shown) - 1 :]
    assert lines[0].split()[0] == "step"
    assert [int(line.split()[0]) for line in lines[1:]] == shown
    assert len({len(line) for line in lines}) == 1


def test_as_dict_is_plain_data() -> None:
    """It goes through JSON and back, steps included."""
    data = json.loads(json.dumps(SUMMARY.as_dict()))
    assert data["num_recomputed_ops"] == 7
    assert data["steps"][0]["peak_bytes"] == STEP.peak_bytes
    assert Summary(**{**data, "steps": tuple(StepSummary(**step) for step in data["steps"])}) == SUMMARY
    data = json.loads(json.dumps(dataclasses.replace(SUMMARY, plain_peak=PEAK).as_dict()))
    assert PlainPeak(**data["plain_peak"]) == PEAK


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
