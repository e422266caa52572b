"""Followed steps give the plain bits inside the budget; steps that differ fall back to the policy."""

from __future__ import annotations

import itertools
import os
import time
from typing import TYPE_CHECKING
from unittest import mock

import msgspec
import pytest
import torch
from torch import nn

from tests.following import planned_here
from tests.runtime.programs import UNLIMITED, running
from tests.sampling import sample
from torchdelta.config import PLANNERS, Config
from torchdelta.errors import ConfigError, NativeError
from torchdelta.native.gate import load_gate
from torchdelta.planners import classes_of, names
from torchdelta.runtime.errors import BudgetError
from torchdelta.runtime.follow import measured_machine, predictions, programs
from torchdelta.runtime.follow.follower import Follower
from torchdelta.runtime.follow.measured_machine import MeasuredMachine
from torchdelta.runtime.follow.schedule import Due
from torchdelta.runtime.memory.costs import resident
from torchdelta.runtime.memory.transfers import Transfers

if TYPE_CHECKING:
    from collections.abc import Callable

    from torchdelta.machine.model import Machine
    from torchdelta.runtime.follow.program import Program
    from torchdelta.runtime.session import Session

pytestmark = pytest.mark.usefixtures("needs_counter")

WIDTH, NUM_ROWS, DEPTH = 64, 1024, 12
WAIT_S = 240.0


def _network() -> nn.Module:
    torch.manual_seed(0)
    layers = [part for _ in range(DEPTH) for part in (nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.LayerNorm(WIDTH))]
    return nn.Sequential(*layers, nn.Dropout(0.1))


def _train(
    budget: int,
    rows: list[int],
    planner: str | None = None,
    tier: str = "memory",
    after_step: Callable[[int, Session], None] | None = None,
) -> tuple[list[torch.Tensor], list[int], Session]:
    """Train steps of these numbers of rows. Return the parameters, the peaks, and the session."""
    model = _network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    torch.manual_seed(1)
    with running(budget, planner=planner, tier=tier) as (memory_budget, session):
        for step, num_rows in enumerate(rows):
            optimizer.zero_grad()
            model(torch.randn(num_rows, WIDTH)).square().mean().backward()
            optimizer.step()
            if after_step is not None:
                after_step(step, session)
    peaks = [one.peak_bytes for one in memory_budget.summary().steps]
    return [parameter.detach().clone() for parameter in model.parameters()], peaks, session


def _wait(step: int, session: Session) -> None:
    if step == 1:  # the second step was traced
        assert session.programs.wait(WAIT_S)


@pytest.mark.parametrize(
    ("planner", "tier"), sample([("torchdelta", "disk"), ("torchdelta", "memory"), ("delta-2024", "disk")], 1)
)
def test_followed_steps_have_the_plain_bits_inside_the_budget(planner: str, tier: str) -> None:
    """From the third step on the program acts alone: no eviction beyond it, backward unwatched once it has held."""
    rows = [NUM_ROWS] * 7
    expected, plain_peaks, _ = _train(UNLIMITED, rows)
    budget = int(0.6 * max(plain_peaks[1:]))
    with mock.patch.object(predictions, "_MAX_CORRECTIONS", 0):  # on a busy machine a step is planned again
        found, peaks, session = _train(budget, rows, planner, tier, _wait)
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
    assert max(peaks) <= budget
    assert session.follower.num_followed_steps == 5
    assert session.follower.num_diverged_steps == 0
    assert session.counters.num_unplanned == 0
    assert session.programs.latest.proofs
    follow = session.summary().follow
    assert follow is not None
    assert follow.predicted_time_s
    assert follow.plain_time_s
    (own, *larger), overheads = zip(*follow.overheads_by_budget.items(), strict=True)
    assert own == budget
    assert follow.outside_s
    of_ops_s = follow.predicted_time_s - follow.outside_s
    assert overheads[0] == pytest.approx(of_ops_s / follow.plain_time_s - 1)
    assert len(larger) == 2
    assert all(budget < size_bytes < max(plain_peaks[1:]) for size_bytes in larger)
    if planner == "torchdelta":  # a rule of the literature may be slower in a larger budget
        assert all(overhead <= overheads[0] + 0.01 for overhead in overheads)


@pytest.mark.parametrize(("planner", "does"), [("delta-2024", "fetches"), ("torchdelta", "replays")])
def test_what_a_plan_brings_back_ahead_comes_back_ahead(
    planner: str, does: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copies in are begun, and replays have run, before the unpack that needs them: nothing is left to that."""
    do_due = Follower.do_due
    num_away, num_ahead, num_left = 0, 0, 0

    def watched(follower: Follower, save: int) -> None:
        nonlocal num_away, num_ahead, num_left

        def is_away(buffer_id: int) -> bool:
            buffer = follower._find(buffer_id)  # noqa: SLF001 - nothing counts what is done ahead
            return buffer is not None and buffer.num_saved > 0 and buffer.fetching is None and resident(buffer) is None

        due = follower._due.get(save, Due())  # noqa: SLF001
        away = [id_ for id_ in [*due.fetches, *itertools.chain(*due.replays)] if is_away(id_)]
        do_due(follower, save)
        num_away += len(away)
        num_left += sum(map(is_away, away))
        program = follower._running  # noqa: SLF001
        assert program is not None
        num_ahead += sum(program.schedule.first_saves[id_] != save for id_ in away)

    monkeypatch.setattr(Follower, "do_due", watched)
    monkeypatch.setattr(predictions, "_MAX_CORRECTIONS", 0)  # on a busy machine a step is planned again
    rows = [NUM_ROWS] * 7
    _, plain_peaks, _ = _train(UNLIMITED, rows)
    _, _, session = _train(int(0.6 * max(plain_peaks[1:])), rows, planner, after_step=_wait)
    schedule = next(iter(session.programs.cache)).schedule
    assert any(getattr(due, does) for due in schedule.due.values())
    assert num_away >= session.follower.num_followed_steps > 0
    assert num_ahead > 0
    assert num_left == 0


def test_what_must_have_left_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The program reserves no memory for buffers whose copies are late."""
    do_due = Follower.do_due
    num_late, num_left = 0, 0

    def watched(follower: Follower, save: int) -> None:
        nonlocal num_late, num_left
        due = follower._due.get(save, Due())  # noqa: SLF001 - nothing counts what is waited for
        must_leave = [reference() for reference in follower._swapped[: due.num_released] if reference is not None]  # noqa: SLF001
        num_late += sum(buffer in follower.transfers.leaving for buffer in must_leave)
        do_due(follower, save)
        num_left += sum(buffer in follower.transfers.leaving for buffer in must_leave)

    def wait_and_hold_copies(step: int, session: Session) -> None:
        _wait(step, session)
        if step == 1:  # from now on a copy arrives only where it is waited for
            monkeypatch.setattr(Transfers, "reap", lambda _transfers: None)

    monkeypatch.setattr(Follower, "do_due", watched)
    monkeypatch.setattr(predictions, "_MAX_CORRECTIONS", 0)  # on a busy machine a step is planned again
    rows = [NUM_ROWS] * 7
    _, plain_peaks, _ = _train(UNLIMITED, rows)
    _, _, session = _train(int(0.6 * max(plain_peaks[1:])), rows, "delta-2024", after_step=wait_and_hold_copies)
    assert session.follower.num_followed_steps > 0
    assert num_late > 0
    assert num_left == 0


def test_a_step_whose_time_was_predicted_wrongly_is_planned_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """With what its copies have then taken, from the same trace. The steps in between follow the first program."""
    if isinstance(load_gate(), NativeError):
        pytest.skip("needs the native parts: times count once steps are recorded in part")
    rows = [NUM_ROWS] * 24
    expected, plain_peaks, _ = _train(UNLIMITED, rows)
    budget = int(0.6 * max(plain_peaks[1:]))
    for name in ("_LOST_ON_ALL_CORES", "_LOST_BESIDE_FREE_CORES", "_COPY_COMPUTE_S"):
        monkeypatch.setattr(measured_machine, name, 0.0)
    monkeypatch.setattr(measured_machine, "_REPLAY_COMPUTE_S", 1e-3)  # so the first program swaps
    monkeypatch.setattr(predictions, "_MAX_CORRECTIONS", 1)
    monkeypatch.setattr(programs, "_MISSES_ALLOWED", 99)  # copies may be late on a busy machine

    def learn(machine: MeasuredMachine, planned: Machine, more_s: float, swapped_bytes: int) -> bool:
        assert more_s > 0.0
        return learn_plainly(machine, planned, swapped_bytes * 0.5 / planned.host_out_bytes_per_s, swapped_bytes)

    learn_plainly = MeasuredMachine.learn
    monkeypatch.setattr(MeasuredMachine, "learn", learn)
    made: list[Program] = []

    def after(step: int, session: Session) -> None:
        if step == 1:
            assert session.programs.wait(WAIT_S)
            (first,) = session.programs.cache
            first.answer = msgspec.structs.replace(first.answer, time_s=1e-9)
            first.outside_s = 0.0
            made.append(first)
        elif step > 1:
            session.programs.wait(WAIT_S)
            made.extend(program for program in session.programs.cache if all(program is not each for each in made))

    found, peaks, session = _train(budget, rows, "torchdelta", "memory", after)
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
    assert max(peaks) <= budget
    first = made[0]
    second = next(program for program in made if program.num_corrections and program is not first)
    assert first.swapped_bytes > 0
    assert first.machine is not None
    assert second.machine is not None
    assert first.machine.out_compute_s_per_byte == 0.0
    both_s = second.machine.out_compute_s_per_byte + second.machine.in_compute_s_per_byte
    assert both_s == pytest.approx(0.5 / first.machine.host_out_bytes_per_s)
    assert second.answer.plain_time_s == first.answer.plain_time_s
    assert session.follower.num_followed_steps >= len(rows) - 4


def test_a_step_without_room_for_the_usual_margin_is_planned_with_less(monkeypatch: pytest.MonkeyPatch) -> None:
    """No plan holds in a tenth of the budget; there is one with all of it."""
    rows = [NUM_ROWS] * 6
    expected, plain_peaks, _ = _train(UNLIMITED, rows)
    budget = int(0.6 * max(plain_peaks[1:]))
    monkeypatch.setattr(programs, "_MARGIN_SHARE", 0.9)
    found, peaks, session = _train(budget, rows, "torchdelta", "memory", _wait)
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
    assert max(peaks) <= budget
    assert session.follower.num_followed_steps == 4
    assert session.programs.why_no_plan == ""


def test_a_step_of_small_tensors_is_followed() -> None:
    """No saved tensor of it has the size from which on buffers leave where there are larger ones."""
    rows = [NUM_ROWS // 4] * 6
    expected, plain_peaks, _ = _train(UNLIMITED, rows)
    budget = int(0.7 * max(plain_peaks[1:]))
    with planned_here():
        found, peaks, session = _train(budget, rows, "torchdelta", "memory")
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
    assert max(peaks) <= budget
    assert session.follower.num_followed_steps == 4


def test_the_predicted_time_contains_what_a_script_does_between_ops() -> None:
    """A step that waits for its data is not predicted to be faster than that."""
    pause_s = 0.05
    budget = int(0.65 * max(_train(UNLIMITED, [NUM_ROWS] * 3)[1][1:]))

    def load_data(step: int, session: Session) -> None:
        time.sleep(pause_s)
        _wait(step, session)

    _, _, session = _train(budget, [NUM_ROWS] * 5, "torchdelta", "memory", load_data)
    follow = session.summary().follow
    assert follow is not None
    assert follow.num_followed_steps
    assert follow.outside_s is not None
    assert follow.predicted_time_s is not None
    assert pause_s <= follow.outside_s < follow.predicted_time_s


def test_steps_of_other_sizes_keep_bits_and_budget() -> None:
    """A larger batch borrows the program; a smaller one, whose small tensors stay, diverges."""
    rows = [NUM_ROWS, NUM_ROWS, NUM_ROWS, NUM_ROWS // 2, NUM_ROWS, NUM_ROWS + 128, NUM_ROWS, NUM_ROWS]
    expected, plain_peaks, _ = _train(UNLIMITED, rows)
    budget = int(0.65 * plain_peaks[1])
    found, peaks, session = _train(budget, rows, "torchdelta", "memory", _wait)
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
    assert max(peaks) <= budget
    assert session.follower.num_followed_steps == 5
    assert session.follower.num_diverged_steps == 1
    assert dict(session.follower.reasons) == {"it saved other tensors": 1}
    follow = session.summary().follow
    assert follow is not None
    assert (follow.planner, follow.num_programs) == ("torchdelta", len(session.programs.cache))
    assert (follow.num_followed_steps, follow.num_diverged_steps, follow.num_reactive_steps) == (5, 1, 2)
    assert follow.divergences == {"it saved other tensors": 1}
    assert follow.predicted_peak_bytes is not None
    assert follow.peak_bytes is not None
    assert abs(follow.peak_bytes - follow.predicted_peak_bytes) <= 0.02 * follow.predicted_peak_bytes
    assert follow.predicted_time_s
    assert follow.time_s
    assert follow.plain_time_s
    assert follow.slowdown == follow.time_s / follow.plain_time_s


@pytest.mark.parametrize("planner", ["torchdelta", "delta-2024"])
def test_what_the_program_itself_holds_is_planned_for(planner: str) -> None:
    """A sequence holds the output of a part until the next one has ended: what leaves before frees nothing yet.

    No trace shows that. A program that needed room beyond itself is planned again with as much less.
    """
    parts = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU()) for _ in range(4)]
    model = nn.Sequential(*parts)
    x = torch.randn(NUM_ROWS, WIDTH)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        loss = model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    step()
    with running(UNLIMITED) as (memory_budget, _):
        step()
        step()
    budget = int(0.8 * memory_budget.summary().peak_bytes)
    num_unplanned: list[int] = []
    with running(budget, planner=planner, tier="memory") as (memory_budget, session):
        for _ in range(14):
            step()
            session.programs.wait(WAIT_S)
            num_unplanned.append(session.counters.num_unplanned)
    assert session.follower.num_followed_steps >= 6
    assert num_unplanned[-1] == num_unplanned[-4]
    assert all(one.peak_bytes <= budget for one in memory_budget.summary().steps[1:])


def test_an_exception_in_mid_step_ends_the_following_of_that_step() -> None:
    """The next step saves its tensors anew; what the broken one left behind changes nothing."""
    model = _network()
    x = torch.randn(NUM_ROWS, WIDTH)

    def loss_of(model: nn.Module) -> torch.Tensor:
        return model(x).square().mean()

    with running(UNLIMITED) as (memory_budget, _):
        loss_of(model).backward()
    plain = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    budget = int(0.6 * memory_budget.summary().peak_bytes)
    del plain
    with running(budget, planner="torchdelta") as (_, session):
        for step in range(6):
            model.zero_grad()
            if step == 3:
                with pytest.raises(ZeroDivisionError):
                    _fail_after(model, x)
            torch.manual_seed(5)
            loss_of(model).backward()
            if step >= 1:
                session.programs.wait(WAIT_S)
    found = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    model.zero_grad()
    torch.manual_seed(5)
    loss_of(model).backward()
    assert all(
        torch.equal(a, parameter.grad)
        for a, parameter in zip(found, model.parameters(), strict=True)
        if parameter.grad is not None
    )
    assert session.follower.num_followed_steps >= 1


def _fail_after(model: nn.Module, x: torch.Tensor) -> None:
    half = model[: DEPTH // 2](x)  # pyright: ignore[reportIndexIssue]
    raise ZeroDivisionError(str(tuple(half.shape)))


def test_memory_that_the_program_takes_before_backward_does_not_pass_the_budget() -> None:
    """A proven program's backward is watched where more is in use at its start than when it was proven."""
    rows = [NUM_ROWS] * 8
    _, plain_peaks, _ = _train(UNLIMITED, rows)
    budget = int(0.7 * max(plain_peaks[1:]))
    model = _network()
    x = torch.randn(NUM_ROWS, WIDTH)
    with running(budget, planner="torchdelta") as (memory_budget, session):
        for step in range(8):
            model.zero_grad()
            torch.manual_seed(5)
            loss = model(x).square().mean()
            extra = torch.zeros(NUM_ROWS * WIDTH // 2) if step == 6 else None
            loss.backward()
            del extra
            if step == 2:  # a step ends where the next one saves its first tensor
                assert session.programs.wait(WAIT_S)
        assert session.follower.num_followed_steps >= 3
    assert max(step.peak_bytes for step in memory_budget.summary().steps) <= budget


def test_an_impossible_followed_backward_leaves_no_fake_gradients() -> None:
    """Where the program takes all room before a proven backward, BudgetError comes, and the next steps are right."""
    rows = [NUM_ROWS] * 8
    _, plain_peaks, _ = _train(UNLIMITED, rows)
    budget = int(0.6 * max(plain_peaks[1:]))
    model = _network()
    x = torch.randn(NUM_ROWS, WIDTH)

    def gradients() -> list[torch.Tensor]:
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    torch.manual_seed(5)
    model(x).square().mean().backward()
    expected = gradients()
    with running(budget, planner="torchdelta") as (_, session):
        for step in range(8):
            model.zero_grad()
            torch.manual_seed(5)
            loss = model(x).square().mean()
            if step == 6:
                session.room.budget_bytes = session.ledger.usage.total_bytes // 4  # not even without what may leave
                with pytest.raises(BudgetError):
                    loss.backward()
                session.room.budget_bytes = budget
                assert all(p.grad is None or not p.grad.is_meta for p in model.parameters())
                assert all(type(p.grad) in {torch.Tensor, type(None)} for p in model.parameters())
            else:
                loss.backward()
                assert all(torch.equal(a, b) for a, b in zip(expected, gradients(), strict=True))
            del loss
            if step == 2:
                assert session.programs.wait(WAIT_S)


def test_a_step_that_fits_is_not_planned() -> None:
    """Where nothing has to leave, no second trace is made and no helper runs."""
    _, _, session = _train(UNLIMITED, [NUM_ROWS] * 3, "torchdelta")
    assert len(session.programs.cache) == 0
    assert session.follower.num_followed_steps == 0
    follow = session.summary().follow
    assert follow is not None
    assert (follow.num_programs, follow.num_reactive_steps, follow.time_s, follow.slowdown) == (0, 3, None, None)
    assert _train(UNLIMITED, [NUM_ROWS])[2].summary().follow is None


def test_a_helper_that_fails_leaves_the_policy_in_charge(monkeypatch: pytest.MonkeyPatch) -> None:
    """The training goes on, with the same bits, and says once that nothing is planned."""
    monkeypatch.setattr("torchdelta.runtime.follow.planning.COMMAND", ("false",))
    rows = [NUM_ROWS] * 4
    expected, plain_peaks, _ = _train(UNLIMITED, rows)
    budget = int(0.6 * max(plain_peaks[1:]))
    found, peaks, session = _train(
        budget, rows, "torchdelta", after_step=lambda step, session: bool(step == 1 and session.programs.wait(WAIT_S))
    )
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
    assert max(peaks) <= budget
    assert session.follower.num_followed_steps == 0
    follow = session.summary().follow
    assert follow is not None
    assert "helper process ended" in follow.why_no_plan


@pytest.mark.rest
def test_nothing_is_left_in_the_temporary_directory(
    tmp_path: os.PathLike[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Traces and plans are files only while they are needed, also where the scope ends before the answer."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    rows = [NUM_ROWS] * 3
    _, plain_peaks, _ = _train(UNLIMITED, rows)
    budget = int(0.6 * max(plain_peaks[1:]))
    _train(budget, rows, "torchdelta", after_step=_wait)
    _train(budget, rows[:2], "torchdelta")
    left = os.listdir(tmp_path)  # noqa: PTH208 - names are enough
    assert [name for name in left if name.startswith("torchdelta")] == []


def test_planners_that_can_be_followed() -> None:
    """`Config` lists all planners, and refuses other names; who plans in the class saved does so by default."""
    assert names() == PLANNERS
    assert all(classes_of(name)[0] == "saved" for name in names() if "saved" in classes_of(name))
    with pytest.raises(ConfigError, match="planner='belady' is not allowed"):
        Config(planner="belady")
    with pytest.raises(ConfigError, match="exclude each other"):
        Config(planner="torchdelta", decisions="swap")
