"""The sweep says no where it has to: a judge that finds everything equal would prove nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from tests.faults.switches import disabled
from tests.same_bits.judge import Scope, comparable_conditions, state_of
from tools.sweep import judging, report
from tools.sweep.journal import Journal
from tools.sweep.subjects import AUTOCAST, PLAIN, Subject

if TYPE_CHECKING:
    from collections.abc import Iterator

MODES = ("recompute", "swap", "mixed", "bf16")
kept: list[torch.Tensor] = []


@pytest.fixture(autouse=True)
def _comparable() -> Iterator[None]:
    """Give every test the conditions under which bits can be compared."""
    with comparable_conditions():
        yield
    kept.clear()


def dropout_step(scope: Scope) -> dict[str, Any]:
    """Train through dropout, whose mask only the generator's old state gives again."""
    model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.5), nn.Tanh(), nn.Linear(16, 16), nn.Dropout(0.5))
    with scope():
        model(torch.randn(6, 8)).pow(2).sum().backward()
    return state_of(model)


def leaking_step(scope: Scope) -> dict[str, Any]:
    """Leave a tensor behind, but only inside a budget."""
    with scope() as budget:
        if budget is not None:
            kept.append(torch.zeros(100))
    return dropout_step(scope)


def caching_step(scope: Scope) -> dict[str, Any]:
    """Leave a tensor behind with and without a budget, as a cache of the model's class does."""
    kept.append(torch.zeros(100))
    return dropout_step(scope)


def raising_step(scope: Scope) -> dict[str, Any]:
    """Fail, but only inside a budget."""
    with scope() as budget:
        if budget is not None:
            raise RuntimeError("no such luck")
    return {}


def drifting_step(_scope: Scope) -> dict[str, Any]:
    """Never do the same twice."""
    kept.append(torch.zeros(1))
    return {"loss": len(kept)}


def seldom_drifting_step(_scope: Scope) -> dict[str, Any]:
    """Do the same twice, and something else every third time."""
    kept.append(torch.zeros(1))
    return {"loss": len(kept) % 3 == 0}


def impossible_step(_scope: Scope) -> dict[str, Any]:
    """Fail always."""
    raise RuntimeError("not even plainly")


def judge(step: Any, autocast: Any = dropout_step) -> dict[str, Any]:
    """Judge a step in every mode and make its record."""
    found = judging.judge_modes({PLAIN: step, AUTOCAST: autocast}, MODES, lambda *_: None)
    return {"family": "family", "name": "A", "group": "a", "task": "", "status": "judged", "modes": found}


def summed_up(record: dict[str, Any]) -> Any:
    """Sum up a sweep of one class."""
    journal = Journal(None, {"conditions": {}})
    journal.add(record)
    return report.sum_up(journal, [Subject(family="family", name="A", group="a")], MODES, is_whole=True)


def test_a_right_step_is_equal_in_every_mode() -> None:
    """The steps below fail for what was done to them, not by themselves."""
    record = judge(dropout_step)
    assert {mode: found["verdict"] for mode, found in record["modes"].items()} == dict.fromkeys(MODES, "equal")
    assert not report.is_failed(record)
    assert summed_up(record).passed


def test_wrong_bits_are_unequal_and_fail_the_sweep(capsys: pytest.CaptureFixture[str]) -> None:
    """With the generator's replay switched off, what recomputes differs, what swaps does not, and the name is told."""
    with disabled("rng-replay"):
        record = judge(dropout_step)
    verdicts = {mode: found["verdict"] for mode, found in record["modes"].items()}
    assert (verdicts["recompute"], verdicts["swap"], verdicts["bf16"]) == ("unequal", "equal", "unequal")
    assert any("grad" in difference for difference in record["modes"]["recompute"]["detail"])
    assert report.is_failed(record)
    assert not summed_up(record).passed
    assert "recompute, unequal: A" in capsys.readouterr().out


def test_a_plain_step_that_seldom_differs_is_listed_apart() -> None:
    """Twice the same by chance: the difference is plain's own, and the record says in which run it showed."""
    kept.clear()
    record = judge(seldom_drifting_step)
    found = record["modes"]["recompute"]
    assert found["verdict"] == "not reproducible"
    assert "plain itself differs" in found["detail"][0]
    assert not report.is_failed(record)


@pytest.mark.parametrize(("step", "words"), [(leaking_step, "leaks"), (raising_step, "raised")])
def test_leaks_and_errors_fail_the_sweep(step: Any, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Right bits are not enough: nothing may stay, and nothing may raise that plain does not."""
    record = judge(step)
    assert report.is_failed(record)
    assert not summed_up(record).passed
    assert f"swap, {words}: A" in capsys.readouterr().out


def test_what_grows_without_a_budget_too_is_no_leak() -> None:
    """The model's own growth is not ours."""
    assert not report.is_failed(judge(caching_step))


@pytest.mark.parametrize(("step", "verdict"), [(drifting_step, "not reproducible"), (impossible_step, "plain fails")])
def test_what_plain_does_not_do_is_listed_apart(step: Any, verdict: str, capsys: pytest.CaptureFixture[str]) -> None:
    """No fault of ours, no success either: the class is named and counts as neither."""
    record = judge(dropout_step, autocast=step)
    assert record["modes"]["bf16"]["verdict"] == verdict
    assert record["modes"]["swap"]["verdict"] == "equal"
    outcome = summed_up(record)
    assert outcome.passed
    assert outcome.data["families"]["family"]["modes"]["bf16"]["num_equal"] == 0
    assert f"bf16, {verdict}: A" in capsys.readouterr().out
