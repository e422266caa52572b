"""The planner "auto": plans once that pays, and gives a plan up whose steps take longer than reacting."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest
import torch
from torch import nn

from tests.following import planned_here
from tests.pages import ROOT
from tests.runtime.parts import running_session
from torchdelta import Config, MemoryBudget
from torchdelta.errors import ConfigError, TorchdeltaError
from torchdelta.host import HostMemory
from torchdelta.runtime.follow import automatic
from torchdelta.runtime.follow.automatic import FEWEST_TIMED, Automatic, Verdict, may_plan
from torchdelta.runtime.state.counters import Counters

if TYPE_CHECKING:
    from torchdelta.runtime.follow.automatic import Kind
    from torchdelta.runtime.follow.program import Key
    from torchdelta.runtime.memory.room import Room
    from torchdelta.runtime.session import Session
    from torchdelta.summary import Summary

pytestmark = pytest.mark.usefixtures("needs_counter")

WIDTH, NUM_ROWS, DEPTH = 64, 1024, 12
NUM_STEPS = FEWEST_TIMED + 7
KEY: Key = (1, 1)
KIND: Kind = (KEY, True)


def _train(
    budget: int | str, config: Config, num_steps: int = NUM_STEPS
) -> tuple[list[torch.Tensor], Summary, Session]:
    """Train a few steps. Return the parameters, the summary and the session."""
    torch.manual_seed(0)
    layers = [part for _ in range(DEPTH) for part in (nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.LayerNorm(WIDTH))]
    model = nn.Sequential(*layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with MemoryBudget(budget, config) as memory_budget:
        session = running_session()
        for _ in range(num_steps):
            optimizer.zero_grad()
            model(torch.randn(NUM_ROWS, WIDTH)).square().mean().backward()
            optimizer.step()
    return [parameter.detach() for parameter in model.parameters()], memory_budget.summary(), session


@functools.cache
def _plain() -> tuple[list[torch.Tensor], int]:
    """Return the parameters of an unlimited training, and 60 % of its peak."""
    expected, summary, _ = _train("1TiB", Config())
    return expected, int(0.6 * max(step.peak_bytes for step in summary.steps[1:]))


def test_steps_are_followed_once_the_budget_has_cost_what_a_plan_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some steps are timed first, then one is traced and planned; bits and budget are held all the time."""
    expected, budget_bytes = _plain()
    monkeypatch.setattr(automatic, "PLAN_COST_S", 1e-9)
    monkeypatch.setattr(automatic, "_SLOWER", 1e9)  # so small a network may well be faster without a plan
    with planned_here():
        found, summary, session = _train(budget_bytes, Config(tier="memory"))
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
    assert summary.peak_bytes <= budget_bytes
    assert summary.follow is not None
    assert summary.follow.planner == "torchdelta"
    assert summary.follow.num_followed_steps >= 3
    assert session.programs.automatic is not None
    assert summary.follow.num_reactive_steps >= FEWEST_TIMED


def test_a_short_training_is_not_planned() -> None:
    """What it loses is far less than what a plan costs: no helper, no numbering of saves, no line in the summary."""
    _, budget_bytes = _plain()
    _, summary, session = _train(budget_bytes, Config(tier="memory"))
    assert summary.evicted
    assert summary.follow is None
    assert not session.follower.is_on
    assert not session.programs.name


def test_steps_that_fit_are_never_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    """They lose nothing to leaving and returning, however long they go on."""
    monkeypatch.setattr(automatic, "PLAN_COST_S", 1e-9)
    _, summary, session = _train("1TiB", Config())
    assert summary.follow is None
    assert not session.follower.is_on


def test_without_room_for_a_helper_steps_go_on_reacting(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A helper process must not take the memory that the user has named: one line, and nothing else changes."""
    expected, budget_bytes = _plain()
    little = HostMemory(ram_bytes=2**34, available_bytes=2**29, cgroup_limit_bytes=None)
    monkeypatch.setattr(automatic, "PLAN_COST_S", 1e-9)
    monkeypatch.setattr(automatic, "read_host_memory", lambda: little)
    with caplog.at_level("INFO", logger="torchdelta"):
        found, summary, session = _train(budget_bytes, Config(tier="memory"))
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
    assert summary.follow is None
    assert not session.follower.is_on
    lines = [record.getMessage() for record in caplog.records if record.getMessage().startswith("plan: none")]
    assert len(lines) == 1
    assert "512.00 MiB of host memory are free" in lines[0]


def test_a_program_whose_steps_take_longer_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its kind of step reacts from then on, and is not planned again."""
    num_steps = NUM_STEPS + 12
    expected, _, _ = _train("1TiB", Config(), num_steps)
    _, budget_bytes = _plain()
    monkeypatch.setattr(automatic, "PLAN_COST_S", 1e-9)
    monkeypatch.setattr(automatic, "_SLOWER", 0.0)  # any time is longer than none
    monkeypatch.setattr(automatic, "_NUM_TIMES", 2)
    monkeypatch.setattr(automatic, "FEWEST_TIMED", 2)
    with planned_here():
        found, summary, session = _train(budget_bytes, Config(tier="memory"), num_steps)
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
    assert summary.follow is not None
    assert 5 <= summary.follow.num_followed_steps <= 6
    assert summary.slowdown_at_most != summary.follow.slowdown  # they are a minority
    assert not len(session.programs.cache)
    assert "took longer" in summary.follow.why_no_plan


def _automatic() -> Automatic:
    room = SimpleNamespace(counters=Counters(), budget_bytes=1, usage=SimpleNamespace(total_bytes=0))
    return Automatic(cast("Room", room))


def _react(judge: Automatic, kind: Kind, *times_s: float) -> list[bool]:
    return [judge.on_reacting_step(kind, time_s) for time_s in times_s]


def _follow(judge: Automatic, kind: Kind, *times_s: float, may_react: bool = True) -> list[Verdict]:
    """Return the verdicts other than to go on."""
    verdicts = [judge.on_followed_step(kind, time_s, may_react=may_react) for time_s in times_s]
    return [verdict for verdict in verdicts if verdict is not Verdict.GO_ON]


@pytest.mark.parametrize(("following_s", "is_slower"), [(1.0, False), (1.01, False), (1.1, True), (0.5, False)])
def test_medians_are_compared(following_s: float, is_slower: bool) -> None:
    """One slow step proves nothing; the median of several does, against steps of the same kind only."""
    judge = _automatic()
    assert all(_react(judge, KIND, 1.0, 1.0, 9.0, 1.0, 1.0))
    assert all(_react(judge, ((2, 2), True), *[1e-3] * 5))
    assert all(_react(judge, (KEY, False), *[1e-3] * 5))
    assert not _follow(judge, KIND, following_s, 9.0, 9.0, *[following_s] * 3)
    assert _follow(judge, KIND, following_s) == [Verdict.REACT] * is_slower


def test_a_program_is_given_up_that_is_slower_than_steps_before_and_after_it() -> None:
    """Reacting is timed anew between two medians of followed steps."""
    judge = _automatic()
    _react(judge, KIND, *[1.0] * 7)
    assert _follow(judge, KIND, *[1.1] * 7) == [Verdict.REACT]
    assert _react(judge, KIND, *[1.0] * 7) == [False] * 6 + [True]
    assert _follow(judge, KIND, *[1.1] * 7) == [Verdict.GIVE_UP]


def test_a_machine_that_becomes_slower_costs_no_program() -> None:
    """Steps that react are slower then, too: for good, or for a moment."""
    judge = _automatic()
    _react(judge, KIND, *[1.0] * 7)
    assert _follow(judge, KIND, *[1.5] * 7) == [Verdict.REACT]
    assert _react(judge, KIND, *[1.8] * 7)[-1]
    assert not _follow(judge, KIND, *[1.5] * 70)
    assert _follow(judge, KIND, *[2.0] * 7) == [Verdict.REACT]
    assert _react(judge, KIND, *[1.8] * 7)[-1]
    assert not _follow(judge, KIND, *[1.5] * 70)


def test_a_borrowed_program_needs_two_slow_medians_in_a_row() -> None:
    """A step without a program of its own cannot be made to react."""
    judge = _automatic()
    _react(judge, KIND, *[1.0] * 7)
    assert not _follow(judge, KIND, *[1.1] * 7, *[0.9] * 7, *[1.1] * 7, may_react=False)
    assert _follow(judge, KIND, *[1.1] * 7, may_react=False) == [Verdict.GIVE_UP]


def test_micro_batches_with_one_program_wait_for_each_other() -> None:
    """Those without an optimizer's step have the same key: they do not end the timing of those with one."""
    judge, other = _automatic(), (KEY, False)
    _react(judge, KIND, *[1.0] * 7)
    _react(judge, other, *[0.5] * 7)
    assert _follow(judge, KIND, *[1.1] * 7) == [Verdict.REACT]
    answers = [_react(judge, kind, time_s)[0] for _ in range(7) for kind, time_s in ((other, 0.5), (KIND, 1.0))]
    assert answers == [False] * 13 + [True]
    assert not _follow(judge, other, *[0.5] * 7)
    assert _follow(judge, KIND, *[1.1] * 7) == [Verdict.GIVE_UP]


def test_kinds_of_steps_that_were_never_timed_are_not_judged() -> None:
    """There is nothing to compare them with."""
    assert not _follow(_automatic(), KIND, *[9.0] * 20)


@pytest.mark.parametrize(
    ("options", "device_type", "num_processes", "expected"),
    [
        ({}, "cpu", 1, True),
        ({"planner": None}, "cpu", 1, False),
        ({"planner": "torchdelta"}, "cpu", 1, False),
        ({"decisions": "swap"}, "cpu", 1, False),
        ({"decision_class": "all"}, "cpu", 1, True),
        ({"arena": True}, "cpu", 1, False),
        ({}, "cuda", 1, False),
        ({}, "cpu", 2, False),
    ],
)
def test_where_auto_may_plan(
    options: dict[str, Any], device_type: str, num_processes: int, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU, alone on the machine; options that exclude a plan are no errors beside "auto"."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(num_processes))
    assert may_plan(Config(**options), device_type) is expected


def test_a_plan_file_goes_before_auto() -> None:
    """Only a planner that the user has named excludes a given plan."""
    with pytest.raises(ConfigError, match="exclude each other"):
        MemoryBudget("1GiB", Config(planner="torchdelta"), plan="missing.plan")
    with pytest.raises(TorchdeltaError, match=r"missing\.plan"):
        MemoryBudget("1GiB", Config(), plan="missing.plan")


def test_the_numbers_are_those_of_the_page() -> None:
    """The other tests set them: what docs/following.md and the README promise are the defaults."""
    page = (ROOT / "docs" / "following.md").read_text(encoding="utf-8")
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert automatic.PLAN_COST_S == 10.0
    assert "have taken ten seconds" in page
    assert "have taken ten seconds" in readme
    assert FEWEST_TIMED == 5
    assert "until five reactive steps were" in page
    assert automatic.HELPER_BYTES == 1 << 30
    assert "1 GiB of free host memory" in page
