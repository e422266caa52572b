"""A schedule says what is due at each save and unpack; moments of the plan are reached at the first one after them."""

from __future__ import annotations

import torch

from torchdelta.plan.model import Absence, Plan, PlanHeader, Replay
from torchdelta.runtime.follow.schedule import Due, make_schedule
from torchdelta.runtime.follow.step_log import StepLog
from torchdelta.runtime.policies.base import Action

SHAPE = (torch.Size([4]), torch.float32, "aten.sin.default")


def _log(**changes: object) -> StepLog:
    """Return the saves of a step of four saved buffers (10, 11, 12, 13), one of them saved twice."""
    fields: dict[str, object] = {
        "signatures": (SHAPE,) * 5,
        "sizes_bytes": (16, 32, 32, 64, 128),
        "pack_ops": (0, 2, 3, 4, 6),
        "buffer_ids": (10, 11, 11, 12, 13),
        "unpacks": ((4, 8), (3, 10), (2, 12), (1, 12), (0, 15)),
        "num_backwards": 1,
        "saves_in_backward": False,
    }
    return StepLog(**(fields | changes))  # pyright: ignore[reportArgumentType]


def _plan(*absences: Absence, replays: tuple[Replay, ...] = ()) -> Plan:
    header = PlanHeader(planner="test", machine="test", budget_bytes=1, num_ops=20, num_buffers=20)
    return Plan(header=header, absences=absences, replays=replays)


def _swap(buffer_id: int, last: int, following: int, *, leave: int, back: int, out: int | None = None) -> Absence:
    return Absence(
        buffer_id=buffer_id,
        last_use_op=last,
        next_use_op=following,
        action="swap",
        out_op=out,
        leave_op=leave,
        return_op=back,
    )


def _drop(buffer_id: int, last: int, back: int) -> Absence:
    return Absence(
        buffer_id=buffer_id, last_use_op=last, next_use_op=back, action="recompute", leave_op=last + 1, return_op=back
    )


def test_a_dropped_buffer_goes_at_each_of_its_saves_and_returns_at_its_first_unpack():
    """Buffer 11 is saved twice; its replay stands before op 12, at which both of its tensors are unpacked."""
    schedule = make_schedule(_plan(_drop(11, 3, 12)), _log())
    assert schedule.evictions == {1: ((11, Action.RECOMPUTE),), 2: ((11, Action.RECOMPUTE),)}
    assert schedule.due == {2: Due(replays=[(11,)])}
    assert schedule.first_saves == {11: 1}
    assert schedule.saved_bytes == (16, 48, 80, 144, 272)


def test_buffers_that_return_together_are_one_group_at_the_earliest_need():
    """Two buffers return before op 15, but one of them is unpacked before, at op 10: both return there."""
    schedule = make_schedule(_plan(_drop(10, 0, 15), _drop(12, 4, 15)), _log())
    assert schedule.due == {3: Due(replays=[(10, 12)])}


def test_a_swap_leaves_at_its_last_save_and_returns_ahead_of_its_use():
    """The copy in of buffer 10 begins before op 11, which is reached at the unpack before op 12."""
    schedule = make_schedule(_plan(_swap(10, 0, 15, leave=7, back=11)), _log())
    assert schedule.evictions == {0: ((10, Action.SWAP),)}
    assert schedule.due == {4: Due(num_released=1), 2: Due(fetches=[10])}


def test_a_copy_out_that_is_queued_late_waits_for_the_first_save_after_its_moment():
    """The copy out of buffer 10 is queued after op 3: the first save with as many ops before it is the third."""
    schedule = make_schedule(_plan(_swap(10, 0, 15, leave=7, back=15, out=3)), _log())
    assert schedule.evictions == {2: ((10, Action.SWAP),)}


def test_copies_in_begin_in_the_order_of_the_plan():
    """Two copies in that are due at one unpack keep the order of their moments."""
    plan = _plan(_swap(10, 0, 15, leave=7, back=10), _swap(11, 3, 12, leave=7, back=9))
    assert make_schedule(plan, _log()).due[3].fetches == [11, 10]


def test_absences_without_a_moment_are_counted():
    """A buffer that nobody saves, and a gap that ends in forward, have no moment in the runtime."""
    schedule = make_schedule(_plan(_drop(19, 1, 12), _drop(11, 3, 5)), _log())
    assert schedule.num_not_carried_out == 2
    assert not schedule.evictions


def test_steps_that_cannot_be_followed_say_why():
    """No backward, saves inside of backward, and no saves at all."""
    assert _log().why_not_followed() == ""
    assert "no backward pass" in _log(num_backwards=0).why_not_followed()
    assert "while backward runs" in _log(saves_in_backward=True).why_not_followed()
    assert "no tensor" in _log(signatures=()).why_not_followed()
