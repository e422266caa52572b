"""A kind of step whose plan was given up by the planner "auto" reacts for good: nothing is borrowed or planned anew."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn

from tests.following import planned_soon
from tests.runtime.programs import UNLIMITED, running
from torchdelta.runtime.follow.automatic import Automatic, Verdict
from torchdelta.runtime.follow.predictions import Predictions

if TYPE_CHECKING:
    from torchdelta.runtime.follow.automatic import Kind
    from torchdelta.runtime.follow.program import Key, Program
    from torchdelta.runtime.session import Session

pytestmark = pytest.mark.usefixtures("needs_counter")

WIDTH, DEPTH = 64, 6
ROWS = (512, 384)
NUM_STEPS = 32


def _train(
    budget: int | str, planner: str | None, followed: list[Key] | None = None
) -> tuple[list[torch.Tensor], int, Session]:
    """Train with two lengths in turn. Return the parameters, the highest peak after the first steps and the session.

    The kinds of the steps that are followed are added to `followed`.
    """
    torch.manual_seed(0)
    layers = [part for _ in range(DEPTH) for part in (nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.LayerNorm(WIDTH))]
    model = nn.Sequential(*layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with running(budget, planner=planner) as (memory_budget, session):
        for index in range(NUM_STEPS):
            optimizer.zero_grad()
            model(torch.randn(ROWS[index % 2], WIDTH)).square().mean().backward()
            optimizer.step()
            ended = session.follower.ended
            if followed is not None and ended is not None and ended.program is not None:
                followed.append(ended.key)
    peaks = [step.peak_bytes for step in memory_budget.summary().steps]
    return [parameter.detach() for parameter in model.parameters()], max(peaks[2:]), session


def test_a_kind_that_is_slower_is_followed_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither by a program of its own nor by that of the other length, which goes on."""
    expected, plain_bytes, _ = _train(UNLIMITED, None)
    judged: list[Key] = []
    followed: list[Key] = []

    def judge(_automatic: Automatic, kind: Kind, _time_s: float, *, may_react: bool) -> Verdict:
        del may_react
        judged.append(kind[0])
        is_last = kind[0] == judged[0] and judged.count(kind[0]) == 4
        return Verdict.GIVE_UP if is_last else Verdict.GO_ON

    monkeypatch.setattr(Automatic, "on_followed_step", judge)
    with planned_soon():
        found, peak_bytes, session = _train(plain_bytes * 6 // 10, "auto", followed)
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
    assert peak_bytes <= plain_bytes * 6 // 10
    assert judged.count(judged[0]) == 4
    last = [index for index, key in enumerate(followed) if key == judged[0]][-1]
    assert followed[: last + 1].count(judged[0]) <= 5  # the first one is not judged
    assert len(followed) - last > 8  # of the other length
    assert session.programs.num_programs == 2
    assert len(session.programs.cache) == 1


def test_a_kind_whose_program_is_doubted_reacts_for_some_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other length goes on following, and so does this one, once its steps were timed."""
    expected, plain_bytes, _ = _train(UNLIMITED, None)
    judged: list[Key] = []
    followed: list[Key] = []
    num_reacted = [0]
    original = Automatic.on_reacting_step

    def judge(_automatic: Automatic, kind: Kind, _time_s: float, *, may_react: bool) -> Verdict:
        judged.append(kind[0])
        return Verdict.REACT if may_react and kind[0] == judged[0] and judged.count(kind[0]) == 2 else Verdict.GO_ON

    def time_reacting(automatic: Automatic, kind: Kind, time_s: float) -> bool:
        original(automatic, kind, time_s)
        if judged.count(kind[0]) < 2 or kind[0] != judged[0]:
            return True
        num_reacted[0] += 1
        return num_reacted[0] == 3

    monkeypatch.setattr(Automatic, "on_followed_step", judge)
    monkeypatch.setattr(Automatic, "on_reacting_step", time_reacting)
    with planned_soon():
        found, peak_bytes, session = _train(plain_bytes * 6 // 10, "auto", followed)
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
    assert peak_bytes <= plain_bytes * 6 // 10
    assert num_reacted == [3]
    assert judged.count(judged[0]) > 4  # it is followed again
    assert session.programs.num_programs == 2


def test_a_kind_is_not_given_up_before_its_time_was_compared_with_the_prediction(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A step whose time was predicted wrongly may only need another plan."""
    _, plain_bytes, _ = _train(UNLIMITED, None)
    monkeypatch.setattr(Automatic, "on_followed_step", lambda *_, **__: Verdict.GIVE_UP)
    monkeypatch.setattr(Predictions, "may_correct", lambda *_: True)
    with planned_soon():
        *_, session = _train(plain_bytes * 6 // 10, "auto")
    assert len(session.programs.cache) == 2
    assert session.programs.why_no_plan == ""


def test_times_of_a_program_that_is_not_followed_any_more_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """The earlier one, which is followed again, is not given up for them."""
    _, plain_bytes, _ = _train(UNLIMITED, None)
    forgotten: list[Key] = []
    replaced: list[Key] = []

    def is_wrong(predictions: Predictions, program: Program, _time_s: float, _peak_bytes: int) -> bool:
        if not replaced:
            replaced.append(program.key)
            predictions._cache.remove(program)  # noqa: SLF001 - as if an earlier one took its place
        return False

    def forget_followed(_automatic: Automatic, key: Key) -> None:
        if replaced:
            forgotten.append(key)

    monkeypatch.setattr(Predictions, "is_wrong", is_wrong)
    monkeypatch.setattr(Automatic, "forget_followed", forget_followed)
    with planned_soon():
        _train(plain_bytes * 6 // 10, "auto")
    assert replaced
    assert forgotten[0] == replaced[0]
