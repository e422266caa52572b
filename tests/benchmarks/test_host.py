"""The host benchmark runs every way of training, and times the training thread alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks.host import command, contest
from benchmarks.host.subjects import SUBJECTS, Subject
from benchmarks.outcome import Outcome
from benchmarks.turns import BESIDE, PLAIN


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.rest) for name in SUBJECTS if name != "lstm"] + ["lstm"]
)
def test_each_subject_trains(name: str) -> None:
    """A step of it runs and gives a gradient, twice in a row."""
    torch.manual_seed(0)
    subject = SUBJECTS[name]()
    subject.step()
    subject.step()
    assert subject.num_steps > 0


def test_every_contender_has_its_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """A round has one median for each way; a budget that does not fit is reported and not timed."""
    layer = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))

    def step() -> None:
        layer(torch.ones(512, 64)).square().mean().backward()
        layer.zero_grad()

    monkeypatch.setitem(SUBJECTS, "lstm", lambda: Subject(step=step, num_steps=2))
    found = contest.contest("lstm", 1)
    (blocks,) = found["rounds"]
    assert {*blocks, *found["refused"]} == {*contest.CONTENDERS}
    assert all(time_s > 0 for block in blocks.values() for time_s in block["thread_s"])
    assert all((BESIDE in block) == (name != PLAIN) for name, block in blocks.items())
    assert all(time_s > 0 for name in {*blocks} - {PLAIN} for time_s in blocks[name][BESIDE]["thread_s"])


@pytest.mark.parametrize(
    ("fits", "no_op", "follows", "is_kept"),
    [
        (1.2, 2.0, 1.5, True),
        (1.3, 2.0, 1.5, False),  # more than 1.25
        (1.2, 1.1, 1.05, False),  # more than a mode and hooks that do nothing
        (1.2, 2.0, 1.7, False),  # more than 1.6
        (1.2, 2.0, None, False),  # not followed at all
    ],
)
def test_a_goal_that_is_missed_fails_the_run(
    fits: float, no_op: float, follows: float | None, *, is_kept: bool
) -> None:
    """Whether a step that fits, or one that follows a plan, takes too much of the thread's time, or was refused."""
    times = {PLAIN: 1.0, contest.NO_OP: no_op, contest.FITTING: fits, contest.RECORDING: 3.0, contest.TRACING: 4.0}
    pressed = {PLAIN: 1.0, contest.NO_OP: no_op, contest.REACTING: 2.0, contest.FOLLOWING: follows}
    outcome = Outcome()
    for judge, found in ((command.judge, times), (command.judge_pressed, pressed)):
        blocks: dict[str, Any] = {name: {"thread_s": [time_s]} for name, time_s in found.items() if time_s is not None}
        for block in blocks.values():  # the machine became twice as slow before these
            block["thread_s"] = [2 * time_s for time_s in block["thread_s"]]
            block[BESIDE] = {"thread_s": [2.0]}
        blocks[PLAIN] = {"thread_s": [1.0]}
        judge(outcome, "a model", {"rounds": [blocks], "refused": {}})
    assert len(outcome.checks) == 3
    assert outcome.passed == is_kept
