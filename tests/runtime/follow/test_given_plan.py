"""A plan that the user gives is followed if it is one of the traced step, else the session says why not."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import torch
from torch import nn

from tests.runtime.parts import running_session
from tests.runtime.programs import UNLIMITED
from torchdelta import Config, MemoryBudget
from torchdelta.errors import ConfigError, PlanError
from torchdelta.notices import warn_once
from torchdelta.plan.file import write_plan
from torchdelta.plan.model import Absence, Plan, PlanHeader
from torchdelta.planners import plan_step
from torchdelta.trace.file import read_trace
from torchdelta.trace.model import BEFORE_STEP

if TYPE_CHECKING:
    from pathlib import Path

    from torchdelta.runtime.session import Session
    from torchdelta.trace.model import Trace

WIDTH, NUM_ROWS, NUM_STEPS = 64, 1024, 6
MEMORY = Config(tier="memory")
EMPTY = Plan(header=PlanHeader(planner="keep", machine="cpu", budget_bytes=1, num_ops=1, num_buffers=1))


@pytest.fixture(autouse=True)
def _warns_anew(needs_counter: None) -> None:
    del needs_counter
    warn_once.cache_clear()


def _train(
    budget: int | str,
    *,
    depth: int = 6,
    num_steps: int = NUM_STEPS,
    num_rows: int = NUM_ROWS,
    config: Config = MEMORY,
    **options: Any,
) -> tuple[list[torch.Tensor], list[int], Session]:
    """Train with AdamW. Return the parameters, the peaks, and the session."""
    torch.manual_seed(0)
    layers = [part for _ in range(depth) for part in (nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.LayerNorm(WIDTH))]
    model = nn.Sequential(*layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    with MemoryBudget(budget, config, **options) as memory_budget:
        session = running_session()
        for _ in range(num_steps):
            optimizer.zero_grad()
            model(torch.randn(num_rows, WIDTH)).square().mean().backward()
            optimizer.step()
    peaks = [one.peak_bytes for one in memory_budget.summary().steps]
    return [parameter.detach().clone() for parameter in model.parameters()], peaks, session


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[torch.Tensor], int, Trace]:
    """Train within any budget: the parameters, the peak from the second step on, the trace of the second step."""
    path = tmp_path_factory.mktemp("plain") / "step.trace"
    parameters, peaks, _ = _train(UNLIMITED, trace_out=path)
    return parameters, max(peaks[1:]), read_trace(path)


def _planned(trace: Trace, budget: int, decision_class: Any = "saved") -> Plan:
    return plan_step(trace, "cpu", budget, decision_class=decision_class).plan


@pytest.mark.parametrize("decision_class", ["saved", "extended", "all"])
def test_a_given_plan_is_followed_from_the_third_step_on(
    plain: tuple[list[torch.Tensor], int, Trace], tmp_path: Path, decision_class: str
) -> None:
    """From a file, in every class: the plain bits inside the budget, without a helper process."""
    expected, peak_bytes, trace = plain
    budget = int(0.75 * peak_bytes)
    write_plan(_planned(trace, int(0.98 * budget), decision_class), tmp_path / "step.plan")
    found, peaks, session = _train(budget, plan=tmp_path / "step.plan")
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
    assert max(peaks) <= budget
    assert session.follower.num_followed_steps == NUM_STEPS - 2
    assert session.programs.latest is not None
    assert session.programs.latest.schedule.evictions
    if decision_class == "saved":
        assert session.counters.num_unplanned == 0
        assert session.programs.latest.proofs


def test_a_given_plan_moves_what_persists(tmp_path: Path) -> None:
    """Where parameters and states take the most, states are away in forward and backward, as the plan says."""
    few: dict[str, Any] = {"num_rows": 64}
    expected, peaks, _ = _train(UNLIMITED, trace_out=tmp_path / "step.trace", **few)
    trace, share = read_trace(tmp_path / "step.trace"), int(0.6 * max(peaks))
    made = _planned(trace, int(0.97 * share), "persistent")
    budget = share + sum(parameter.nbytes for parameter in expected)
    states = {buffer.id for buffer in trace.buffers if buffer.kind == "optimizer_state"}
    assert any(absence.buffer_id in states for absence in made.absences)
    config = Config(tier="memory", decision_class="all", planner=None)
    found, peaks, session = _train(budget, config=config, plan=made, **few)
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
    assert max(peaks[1:]) <= budget
    assert session.follower.num_followed_steps >= NUM_STEPS - 3
    assert session.programs.latest is not None
    assert session.programs.latest.schedule.num_not_carried_out == 0


def test_a_plan_that_cannot_be_carried_out_as_a_whole_is_said_once(
    plain: tuple[list[torch.Tensor], int, Trace], caplog: pytest.LogCaptureFixture
) -> None:
    """What an optimizer's state does in a plan of the class all has no moment in the runtime."""
    _, peak_bytes, trace = plain
    made = _planned(trace, int(0.7 * peak_bytes), "all")
    state = next(b.id for b in trace.buffers if b.kind == "optimizer_state" and b.birth_op == BEFORE_STEP)
    use = next(op.index for op in trace.ops if state in op.reads)
    swap = Absence(buffer_id=state, last_use_op=0, next_use_op=use, action="swap", leave_op=2, return_op=use)
    absences = sorted((*made.absences, swap), key=lambda one: (one.last_use_op, one.buffer_id))
    made = msgspec.structs.replace(made, absences=tuple(absences))
    with caplog.at_level(logging.WARNING, "torchdelta"):
        _, _, session = _train(peak_bytes, plan=made)
    assert session.programs.latest is not None
    num_left_out = session.programs.latest.schedule.num_not_carried_out
    assert 0 < num_left_out < len(made.absences)
    said = [one for one in caplog.messages if "not carried out" in one]
    assert len(said) == 1
    assert f"a plan of torchdelta: {num_left_out} of {len(made.absences)} absences are not carried out" in said[0]


def test_a_plan_of_another_step_is_not_followed(
    plain: tuple[list[torch.Tensor], int, Trace], caplog: pytest.LogCaptureFixture
) -> None:
    """One warning names the counts that differ; the training goes on by the policy."""
    _, peak_bytes, trace = plain
    budget = int(0.75 * peak_bytes)
    made = _planned(trace, budget)
    with caplog.at_level(logging.WARNING, "torchdelta"):
        _, peaks, session = _train(budget * 8 // 6, depth=7, plan=made)
    assert session.follower.num_followed_steps == 0
    assert max(peaks) <= budget * 8 // 6
    expected = f"it has {len(trace.ops)} ops and {len(trace.buffers)} buffers, this trace "
    assert [one for one in caplog.messages if "the plan belongs to another trace" in one and expected in one]


def test_a_plan_that_does_not_hold_the_budget_is_not_followed(
    plain: tuple[list[torch.Tensor], int, Trace], caplog: pytest.LogCaptureFixture
) -> None:
    """The warning says by how many bytes, and at which op; a plan made for less than the budget is welcome."""
    expected, peak_bytes, trace = plain
    budget = int(0.6 * peak_bytes)
    with caplog.at_level(logging.WARNING, "torchdelta"):
        found, peaks, session = _train(budget, plan=_planned(trace, int(0.8 * peak_bytes)))
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
    assert session.follower.num_followed_steps == 0
    assert max(peaks) <= budget
    assert [one for one in caplog.messages if "is passed by" in one and "KiB at op" in one]
    assert _train(peak_bytes, plan=_planned(trace, int(0.8 * peak_bytes)))[2].follower.num_followed_steps > 0


def test_a_plan_that_no_trace_could_be_compared_with_is_not_followed(
    plain: tuple[list[torch.Tensor], int, Trace], caplog: pytest.LogCaptureFixture
) -> None:
    """A forward whose loss is dropped in each of the steps that are traced: their traces are dropped. It is told."""
    _, peak_bytes, trace = plain
    made = _planned(trace, int(0.75 * peak_bytes))
    torch.manual_seed(0)
    model = nn.Linear(64, 64)
    with caplog.at_level(logging.WARNING, "torchdelta"), MemoryBudget(peak_bytes, MEMORY, plan=made) as budget:
        for index in range(6):
            if index % 2:  # in the step before there was none
                model(torch.randn(8, 64)).sum()
            model(torch.randn(8, 64)).sum().backward()
    summary = budget.summary()
    assert summary.follow is not None
    assert "none of 3 traced steps was complete" in summary.follow.why_no_plan
    assert [one for one in caplog.messages if "a plan of torchdelta is not followed: none of 3" in one]


def test_a_trace_is_written_of_a_complete_second_step_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A scope that ends before writes nothing, and says so."""
    path = tmp_path / "step.trace"
    with caplog.at_level(logging.WARNING, "torchdelta"):
        _train(UNLIMITED, num_steps=1, trace_out=path)
    assert not path.exists()
    assert [one for one in caplog.messages if "there was no complete second step" in one]
    _, _, session = _train(UNLIMITED, num_steps=2, trace_out=path)
    written = read_trace(path)
    first = session.trace()
    assert first is not None
    assert any(buffer.kind == "optimizer_state" and buffer.birth_op < 0 for buffer in written.buffers)
    assert not any(buffer.kind == "optimizer_state" and buffer.birth_op < 0 for buffer in first.buffers)


def test_what_excludes_each_other_is_said_at_once(tmp_path: Path) -> None:
    """A plan beside a planner or decisions, what is no plan, and files that cannot be read or written."""
    for other in ({"planner": "torchdelta"}, {"decisions": "swap"}):
        with pytest.raises(ConfigError, match="exclude each other"):
            MemoryBudget("1GiB", Config(**other), plan=EMPTY)
    with pytest.raises(ConfigError, match="plan=3 is not allowed"):
        MemoryBudget("1GiB", plan=3)  # pyright: ignore[reportArgumentType]
    with pytest.raises(PlanError, match=r"no\.plan"):
        MemoryBudget("1GiB", plan=tmp_path / "no.plan")
    for path in (tmp_path, tmp_path / "no" / "step.trace", 3):
        with pytest.raises(ConfigError, match="trace_out="):
            MemoryBudget("1GiB", trace_out=path)  # pyright: ignore[reportArgumentType]
    header = msgspec.structs.replace(EMPTY.header, planner="mine")
    assert "plan='a plan of mine'" in repr(MemoryBudget("1GiB", plan=msgspec.structs.replace(EMPTY, header=header)))
