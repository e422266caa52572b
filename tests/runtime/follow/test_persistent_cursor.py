"""What a plan does with persistent tensors: at which moments of a step its moves are asked for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.runtime.follow.test_schedule import _drop, _log, _plan, _swap
from torchdelta.runtime.follow.persistent_cursor import PersistentCursor
from torchdelta.runtime.follow.persistent_schedule import make_persistent_schedule
from torchdelta.runtime.follow.schedule import make_schedule
from torchdelta.runtime.follow.step_log import Departure
from torchdelta.runtime.memory.planned_moves import Move

if TYPE_CHECKING:
    from collections.abc import Iterable

NUM_OPS = 20
WEIGHT, STATE = 1, 2
# The weight is used by two ops of forward and one of backward, and with its state by the optimizer.
USES = (
    (WEIGHT, "forward", 1),
    (WEIGHT, "forward", 4),
    (WEIGHT, "backward", 11),
    (STATE, "optimizer", 16),
    (WEIGHT, "optimizer", 17),
)
PERSISTENTS = {20: WEIGHT, 21: WEIGHT, 22: STATE, 23: STATE}  # two versions of each


def schedule_of(*absences: Any, **changes: Any) -> Any:
    """Return what a plan of these absences does with persistent tensors."""
    log = _log(uses=USES, persistents=PERSISTENTS, num_ops=NUM_OPS, **changes)
    return make_persistent_schedule(_plan(*absences), log)


class Asked:
    """Stands in for the persistent tensors of a session. Mutable; notes what is asked for.

    Args:
        steps: Counts ops.
    """

    def __init__(self, steps: SimpleNamespace) -> None:
        self.steps = steps
        self.known = {WEIGHT, STATE}
        self.asked: list[tuple[Move, int]] = []
        self.is_active = False
        self.candidates = SimpleNamespace(on_use=None)
        self.planned = SimpleNamespace(
            is_on=False,
            on_moment=None,
            ask=self.asked.extend,
            forget=self.asked.clear,
            end_step=lambda: None,
            knows=self.holds,
        )

    def holds(self, keys: Iterable[int]) -> bool:
        """Return whether all keys are known."""
        return self.known.issuperset(keys)

    def move_planned(self) -> None:
        """Do nothing."""

    def take(self) -> list[tuple[Move, int]]:
        """Return what was asked for since the last time."""
        asked = list(self.asked)
        self.asked.clear()
        return asked

    def use(self, key: int) -> None:
        """Use a tensor, as the first argument of an op."""
        if self.candidates.on_use is not None:
            self.candidates.on_use(key)
        self.run_op()

    def run_op(self) -> None:
        """Run an op, after its uses."""
        if self.planned.on_moment is not None:
            self.planned.on_moment()
        self.steps.counters.num_ops += 1


def _steps() -> SimpleNamespace:
    return SimpleNamespace(phase="forward", counters=SimpleNamespace(num_ops=0))


@pytest.fixture
def step() -> SimpleNamespace:
    """Return a cursor, the tensors that it moves, and the phase of the step."""
    steps = _steps()
    asked = Asked(steps)
    return SimpleNamespace(cursor=PersistentCursor(asked, steps), asked=asked, steps=steps)  # pyright: ignore[reportArgumentType]


def test_moves_are_in_the_order_of_the_plan():
    """What is away over the end of the step comes back at the beginning of the next one."""
    schedule = schedule_of(_swap(23, 16, 36, leave=18, back=33), _swap(20, 4, 11, leave=6, back=9, out=5))
    assert schedule.moves == (
        (6, Move.LEAVE, WEIGHT),
        (6, Move.COPY_OUT, WEIGHT),
        (9, Move.COPY_IN, WEIGHT),
        (13, Move.COPY_IN, STATE),
        (17, Move.COPY_OUT, STATE),
        (18, Move.LEAVE, STATE),
    )


def test_what_is_never_free_is_not_moved():
    """A copy that frees no memory is left out; so are replays, and buffers that no persistent tensor holds."""
    assert schedule_of(_swap(20, 4, 11, leave=11, back=11)).moves == ()
    assert schedule_of(_drop(20, 4, 11)) is None
    assert schedule_of(_swap(10, 0, 15, leave=7, back=11)) is None


def test_absences_that_are_carried_out_are_counted():
    """Saved and persistent ones are; others are not."""
    log = _log(uses=USES, persistents=PERSISTENTS, num_ops=NUM_OPS)
    plan = _plan(_swap(10, 0, 15, leave=7, back=11), _swap(20, 4, 11, leave=6, back=9), _drop(19, 1, 12))
    schedule = make_schedule(plan, log)
    assert schedule.num_not_carried_out == 1
    assert schedule.persistent is not None
    assert make_schedule(plan, _log()).num_not_carried_out == 2  # there, no persistent tensor may leave


def test_a_buffer_that_is_saved_and_persists_moves_as_what_persists():
    """A frozen weight: its saved tensor is not copied out as well."""
    log = _log(uses=USES, persistents={10: WEIGHT}, num_ops=NUM_OPS)
    schedule = make_schedule(_plan(_swap(10, 0, 15, leave=7, back=11)), log)
    assert not schedule.evictions
    assert schedule.persistent is not None
    assert schedule.persistent.moves
    assert schedule.num_not_carried_out == 0


def test_moves_are_asked_for_at_saves_uses_and_unpacks(step: Any) -> None:
    """Each moment asks for what is due by then, once."""
    step.cursor.follow(schedule_of(_swap(20, 4, 11, leave=6, back=9), _swap(23, 16, 36, leave=18, back=33)), 0)
    assert step.asked.take() == []
    assert step.asked.is_active
    step.asked.use(WEIGHT)
    step.cursor.reach_save(3)  # four ops ran before it
    assert step.asked.take() == []
    step.asked.use(WEIGHT)  # op 4
    step.asked.run_op()  # op 5
    assert step.asked.take() == [(Move.COPY_OUT, WEIGHT)]
    step.cursor.reach_save(4)
    assert step.asked.take() == [(Move.LEAVE, WEIGHT)]
    step.steps.phase = "backward"
    step.cursor.reach_unpack(4)
    assert step.asked.take() == []
    step.cursor.reach_unpack(3)
    assert step.asked.take() == [(Move.COPY_IN, WEIGHT)]
    step.asked.use(WEIGHT)  # op 11
    assert step.asked.take() == []
    step.steps.phase = "optimizer"
    step.asked.use(STATE)
    step.asked.use(WEIGHT)
    assert step.asked.take() == [(Move.COPY_IN, STATE), (Move.COPY_OUT, STATE)]
    step.cursor.end_step()
    assert step.asked.take() == [(Move.LEAVE, STATE)]


def test_ops_are_counted_up_to_the_next_use(step: Any) -> None:
    """A step with more ops than the traced one does not run ahead of it."""
    step.cursor.follow(schedule_of(_swap(23, 16, 36, leave=18, back=28)), 0)
    for _ in range(30):
        step.asked.run_op()
    assert step.asked.take() == []  # the next use is that of the weight, at op 1
    step.steps.phase = "backward"
    step.asked.use(WEIGHT)  # op 11; the state is due at op 8
    assert step.asked.take() == [(Move.COPY_IN, STATE)]


def test_a_step_that_is_alike_begins_before_its_first_save(step: Any) -> None:
    """The next step is taken to follow the same schedule; an evaluation in between changes nothing."""
    schedule = schedule_of(_swap(23, 16, 36, leave=18, back=21))
    step.cursor.follow(schedule, 0)
    step.cursor.end_step()
    step.asked.take()
    step.asked.use(WEIGHT)
    assert step.asked.take() == [(Move.COPY_IN, STATE)]
    step.asked.use(WEIGHT)
    step.cursor.follow(schedule, 0)  # the first save: no op ran before it
    step.asked.use(WEIGHT)
    assert step.asked.take() == [(Move.COPY_IN, STATE)]


@pytest.mark.parametrize(("phase", "is_freed"), [("optimizer", True), ("backward", False)])
def test_departures_that_a_step_has_left_out(step: Any, phase: Any, *, is_freed: bool) -> None:
    """A gradient that the optimizer has read is freed: the next step's is another. Others are the same tensors."""
    departure = Departure(copy_op=12, leave_op=NUM_OPS - 1, key=-WEIGHT, size_bytes=16)
    log = _log(uses=(*USES, (-WEIGHT, phase, 18)), persistents=PERSISTENTS, num_ops=NUM_OPS, departures=(departure,))
    schedule = make_persistent_schedule(_plan(_swap(23, 16, 36, leave=18, back=21)), log)
    step.cursor.follow(schedule, 0)
    step.cursor.end_step()
    departed = [(move, key) for move, key in step.asked.take() if key == -WEIGHT]
    assert departed == ([] if is_freed else [(Move.COPY_OUT, -WEIGHT), (Move.LEAVE, -WEIGHT)])


def test_nothing_is_asked_for_once_no_schedule_is_followed(step: Any) -> None:
    """What was due and is not done yet is forgotten."""
    step.cursor.follow(schedule_of(_swap(20, 4, 11, leave=6, back=9)), 0)
    step.cursor.stop()
    assert not step.asked.planned.is_on
    step.asked.use(WEIGHT)
    step.cursor.reach_save(4)
    step.cursor.end_step()
    assert step.asked.take() == []
    step.cursor.follow(None, 0)
    assert not step.asked.planned.is_on


@given(st.data())
def test_every_move_is_asked_for_once_a_step(data: st.DataObject) -> None:
    """Whatever moments a step has, and in whatever order: none is left out, none is done twice."""
    steps = _steps()
    asked = Asked(steps)
    cursor = PersistentCursor(asked, steps)  # pyright: ignore[reportArgumentType]
    schedule = schedule_of(
        _swap(20, 4, 11, leave=6, back=9), _swap(22, 0, 16, leave=2, back=12), _swap(23, 16, 36, leave=18, back=33)
    )
    cursor.follow(schedule, 0)
    for _ in range(data.draw(st.integers(0, 12))):
        steps.phase = data.draw(st.sampled_from(("forward", "backward", "optimizer")))
        moment = data.draw(st.sampled_from((asked.use, cursor.reach_save, cursor.reach_unpack)))
        moment(data.draw(st.sampled_from((WEIGHT, STATE) if moment == asked.use else range(5))))
    cursor.end_step()
    assert asked.take() == [(move, key) for _, move, key in schedule.moves]


def test_a_run_of_uses_goes_on_counting(step: Any) -> None:
    """A weight that is used in a loop, of which the traced step notes the first use alone."""
    uses = ((WEIGHT, "forward", 0), (STATE, "forward", 12))
    log = _log(uses=uses, persistents=PERSISTENTS, num_ops=NUM_OPS)
    schedule = make_persistent_schedule(_plan(_swap(23, 12, 32, leave=18, back=28)), log)
    assert schedule is not None
    step.cursor.follow(schedule, 0)
    for _ in range(9):
        step.asked.use(WEIGHT)
    assert step.asked.take() == [(Move.COPY_IN, STATE)]  # it is due at op 8


def test_tensors_that_were_replaced_end_a_schedule(step: Any) -> None:
    """As by `load_state_dict` of an optimizer: what the moves name is not there any more. Gradients need not be."""
    schedule = schedule_of(_swap(23, 16, 36, leave=18, back=33))
    step.cursor.follow(schedule, 0)
    step.asked.known = {WEIGHT}
    assert not step.cursor.end_step()
    assert not step.asked.planned.is_on
    log = _log(uses=USES, persistents=PERSISTENTS | {23: -STATE}, num_ops=NUM_OPS)
    of_gradient = make_persistent_schedule(_plan(_swap(23, 16, 36, leave=18, back=33)), log)
    step.cursor.follow(of_gradient, 0)
    assert step.cursor.end_step()


def test_an_evaluation_of_several_batches_follows_nothing(step: Any) -> None:
    """From its second batch on: what it needs next is read ahead as without a plan. The next step is followed again."""
    uses = ((WEIGHT, "forward", 1), (STATE, "forward", 4), (WEIGHT, "optimizer", 16))
    log = _log(uses=uses, persistents=PERSISTENTS, num_ops=NUM_OPS)
    schedule = make_persistent_schedule(_plan(_swap(21, 16, 21, leave=18, back=20)), log)
    step.cursor.follow(schedule, 0)
    assert step.cursor.end_step()
    for key in (WEIGHT, STATE):
        step.asked.use(key)
    assert step.asked.planned.is_on
    step.asked.use(WEIGHT)
    assert not step.asked.planned.is_on
    step.cursor.follow(schedule, 0)
    assert step.asked.planned.is_on
