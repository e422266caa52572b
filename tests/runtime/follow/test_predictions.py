"""Which step times lead to a new plan, and when the program before is followed again."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest

from torchdelta.machine.model import Machine
from torchdelta.plan.request import Answer
from torchdelta.runtime.follow.predictions import Predictions
from torchdelta.runtime.follow.program import Program, ProgramCache
from torchdelta.runtime.follow.schedule import Schedule

if TYPE_CHECKING:
    from torchdelta.runtime.follow.measured_machine import MeasuredMachine
    from torchdelta.runtime.follow.step_log import StepLog
    from torchdelta.trace.model import Trace

GB = 10**9
MACHINE = Machine(
    name="measured",
    memory_bytes=GB,
    flops_per_s={"float32": 1e12},
    memory_bytes_per_s=1e10,
    host_out_bytes_per_s=1e9,
    host_in_bytes_per_s=1e9,
)
STEP = cast("tuple[Trace, StepLog]", (SimpleNamespace(), SimpleNamespace()))


class Learned:
    """Stands in for the measured machine: keeps what it is told."""

    def __init__(self) -> None:
        self.misses: list[tuple[float, int]] = []
        self.can_explain = True
        self.has_forgotten = False

    def learn(self, _planned: Machine, more_s: float, swapped_bytes: int) -> bool:
        """Keep what a step took more than predicted."""
        self.misses.append((more_s, swapped_bytes))
        return self.can_explain

    def forget(self) -> None:
        """Note that what was learned is forgotten."""
        self.has_forgotten = True


def _program(**changes: Any) -> Program:
    """Return a program that was predicted to take a second a step."""
    fields: dict[str, Any] = {
        "schedule": Schedule(
            exact_hashes=(1,), shape_free_hashes=(1,), saved_bytes=(1,), first_saves={}, evictions={}, due={}
        ),
        "key": (1, 1),
        "start_bytes": 0,
        "answer": Answer(time_s=1.0, plain_time_s=0.8),
        "step": STEP,
        "margin_bytes": 0,
        "machine": MACHINE,
        "swapped_bytes": GB,
        "is_settled": True,
    }
    return Program(**fields | changes)


@pytest.fixture
def learned() -> Learned:
    """Return a machine that has learned nothing."""
    return Learned()


@pytest.fixture
def cache() -> ProgramCache:
    """Return an empty cache."""
    return ProgramCache(GB)


@pytest.fixture
def predictions(learned: Learned, cache: ProgramCache) -> Predictions:
    """Return what judges step times."""
    return Predictions(cast("MeasuredMachine", learned), cache)


def _steps(predictions: Predictions, program: Program, time_s: float, peak_bytes: int = 0) -> bool:
    """Run seven steps, of which one in the middle took very long."""
    answers = [predictions.is_wrong(program, each_s, peak_bytes) for each_s in (*[time_s] * 3, 99.0, *[time_s] * 3)]
    assert not any(answers[:-1])
    return answers[-1]


@pytest.mark.parametrize("time_s", [0.92, 1.0, 1.1])
def test_a_time_near_the_prediction_changes_nothing(predictions: Predictions, learned: Learned, time_s: float) -> None:
    """The limit is a tenth of the measured time."""
    program = _program()
    assert not _steps(predictions, program, time_s)
    assert learned.misses == []
    assert program.step is STEP
    assert program.num_corrections == 0


@pytest.mark.parametrize(("peak_bytes", "is_wrong"), [(850, True), (1000, False), (1200, False), (1300, True)])
def test_a_peak_far_from_the_prediction(
    predictions: Predictions, learned: Learned, peak_bytes: int, is_wrong: bool
) -> None:
    """The step is traced again where sizes must be wrong, and the times of the new plan are compared with these."""
    program = _program(answer=Answer(time_s=1.0, plain_time_s=0.8, peak_bytes=1000), unseen_bytes=100)
    assert _steps(predictions, program, 1.0, peak_bytes) is is_wrong
    assert (program.step is None) is is_wrong
    assert program.num_corrections == is_wrong
    assert program.wrong_s == (1.0 if is_wrong else 0.0)
    assert learned.misses == []


def test_two_new_plans_are_the_most(predictions: Predictions) -> None:
    """A peak that stays wrong ends in no endless planning."""
    program = _program(answer=Answer(time_s=1.0, plain_time_s=0.8, peak_bytes=1000), num_corrections=2)
    assert not _steps(predictions, program, 1.0, 2000)


@pytest.mark.parametrize("time_s", [0.8, 1.2])
def test_a_miss_is_the_price_of_copies(predictions: Predictions, learned: Learned, time_s: float) -> None:
    """The step is planned again from its trace."""
    program = _program()
    assert _steps(predictions, program, time_s)
    assert learned.misses == [(pytest.approx(time_s - 1.0), GB)]
    assert program.step is STEP


def test_time_outside_of_ops_is_no_miss(predictions: Predictions, learned: Learned) -> None:
    """A step that reads data for a second takes a second more; only what is beyond that is missed."""
    assert not _steps(predictions, _program(outside_s=1.0), 2.1)
    assert _steps(predictions, _program(outside_s=1.0), 2.5)
    assert learned.misses == [(pytest.approx(0.5), GB)]


def test_a_step_whose_copies_cannot_explain_its_time_is_traced_again(
    predictions: Predictions, learned: Learned
) -> None:
    """Its op times must be wrong."""
    learned.can_explain = False
    program = _program()
    assert _steps(predictions, program, 1.5)
    assert program.step is None


def test_steps_that_are_recorded_as_a_whole_say_nothing_of_copies(predictions: Predictions, learned: Learned) -> None:
    """Recording takes time, too."""
    assert not _steps(predictions, _program(is_settled=False), 1.5)
    assert learned.misses == []


def test_a_program_waits_for_its_time_only_so_long(predictions: Predictions) -> None:
    """Until then it keeps its trace, and is not given up."""
    assert predictions.may_correct(_program())
    assert not predictions.may_correct(_program(num_followed=100))
    assert not predictions.may_correct(_program(answer=Answer(plain_time_s=0.8)))
    program = _program()
    assert not _steps(predictions, program, 1.0)
    assert not predictions.may_correct(program)


def test_a_given_plan_has_no_prediction(predictions: Predictions) -> None:
    """Nothing is planned in its place."""
    assert not _steps(predictions, _program(answer=Answer(plain_time_s=0.8), machine=None), 9.0)


def test_a_time_that_changes_later_leads_to_a_new_trace(predictions: Predictions) -> None:
    """The step itself has changed, or the machine."""
    program = _program()
    assert not _steps(predictions, program, 1.0)
    assert not _steps(predictions, program, 1.05)
    assert _steps(predictions, program, 1.2)
    assert program.step is None
    program.wants_trace = True
    assert not _steps(predictions, program, 1.5)
    assert program.num_corrections == 1


def test_a_step_is_corrected_twice_at_most(predictions: Predictions, learned: Learned) -> None:
    """Each new program takes over the count of the one before."""
    program = _program()
    for _ in range(2):
        program.is_settled = True
        assert _steps(predictions, program, 1.5)
        earlier, program = program, _program()
        program.take_over(earlier)
        earlier.wrong_s = 9.0  # so it is not followed again
    assert not _steps(predictions, program, 1.5)
    assert len(learned.misses) == 2


def test_the_faster_program_is_followed_again(predictions: Predictions, cache: ProgramCache, learned: Learned) -> None:
    """For good: no time leads to a further plan. What was learned of copies was wrong."""
    earlier, later = _program(), _program()
    cache.add(earlier)
    assert _steps(predictions, earlier, 1.5)
    later.take_over(earlier)
    cache.add(later)
    assert not _steps(predictions, later, 1.6)
    assert list(cache) == [earlier]
    assert learned.has_forgotten
    assert not earlier.wants_trace
    assert not _steps(predictions, earlier, 1.5)
    assert not _steps(predictions, earlier, 3.0)


def test_a_new_program_that_is_faster_stays(predictions: Predictions, cache: ProgramCache) -> None:
    """The one before is forgotten, also if another plan came in between for want of room."""
    earlier, between, later = _program(), _program(), _program()
    assert _steps(predictions, earlier, 1.5)
    between.take_over(earlier)
    later.take_over(between)
    cache.add(later)
    assert between.replaces is None
    assert later.replaces is earlier
    assert not _steps(predictions, later, 1.05)
    assert later.replaces is None
    assert list(cache) == [later]


def test_the_time_of_an_earlier_program_is_its_latest_one(predictions: Predictions, cache: ProgramCache) -> None:
    """While a plan is made, steps may become slower for another reason."""
    earlier, later = _program(num_corrections=1), _program()
    assert _steps(predictions, earlier, 1.5)
    assert not _steps(predictions, earlier, 2.0)
    later.take_over(earlier)
    cache.add(later)
    assert not _steps(predictions, later, 1.8)
    assert list(cache) == [later]
