"""Which part of a program goes to the native tape."""

from __future__ import annotations

from torchdelta.native.gate import Recorded
from torchdelta.native.saved_hooks import OnTape
from torchdelta.runtime.follow.lane import Lane, LearnedOp, make_lane
from torchdelta.runtime.follow.schedule import Due, Schedule
from torchdelta.runtime.policies.base import Action

_SIMPLE = Recorded.ON_TAPE
# In all tests the trace's buffer n is saved at number n, as the runtime's buffer 100 + n, and made by op n.
_SAVED = {number: 100 + number for number in range(6)}


def _op(number: int, *reads: int, on_tape: Recorded = _SIMPLE) -> LearnedOp:
    return LearnedOp(reads=reads, makes=(100 + number,), on_tape=on_tape)


def _schedule(actions: dict[int, Action], due: dict[int, Due] | None = None) -> Schedule:
    """Return a schedule in which buffers leave at their own saves."""
    evictions = {number: ((number, action),) for number, action in actions.items()}
    return Schedule(
        exact_hashes=tuple(_SAVED),
        shape_free_hashes=tuple(_SAVED),
        saved_bytes=tuple(_SAVED),
        first_saves={number: number for number in actions},
        evictions=evictions,
        due=due or {},
        planned_saves=frozenset(actions).union(due or {}),
    )


def _lane(
    schedule: Schedule,
    ops: dict[int, LearnedOp],
    *,
    replayed: set[int] | None = None,
    in_python: set[int] | None = None,
) -> Lane | None:
    return make_lane(schedule, _SAVED, ops, set(ops) if replayed is None else replayed, in_python or set())


def test_buffers_that_are_dropped() -> None:
    """Nothing is left for Python, not even in a group."""
    drops = {1: Action.RECOMPUTE, 2: Action.RECOMPUTE}
    due = {4: Due(replays=[(1, 2)])}
    lane = _lane(_schedule(drops, due), {1: _op(1, 50), 2: _op(2, 101)})
    assert lane is not None
    assert lane.ops == {1, 2}
    assert lane.drops == {1: [1], 2: [2]}
    assert lane.replays == {4: [[1, 2]]}
    assert lane.saves == {1: OnTape.DROPPED, 2: OnTape.DROPPED, 4: OnTape.KEPT}
    assert not lane.rest.evictions
    assert not lane.rest.due


def test_a_swapped_buffer_keeps_in_python_what_its_bytes_are_needed_for() -> None:
    """And nothing else. Where both parts have something to do, Python is called as well."""
    actions = {1: Action.SWAP, 2: Action.RECOMPUTE, 3: Action.RECOMPUTE}
    due = {3: Due(fetches=[1], replays=[(2, 3)])}
    lane = _lane(_schedule(actions, due), {2: _op(2, 101), 3: _op(3, 50)})
    assert lane is not None
    assert lane.ops == {3}
    assert lane.drops == {3: [3]}
    assert lane.replays == {3: [[3]]}
    assert lane.saves == {3: OnTape.DROPPED | OnTape.UNPACKED_IN_PYTHON}
    assert set(lane.rest.evictions) == {1, 2}
    assert lane.rest.due == {3: Due(fetches=[1], replays=[(2,)])}


def test_what_the_tape_cannot_record_stays_in_python_with_its_group() -> None:
    """Of two groups, the other one goes to the tape."""
    drops = dict.fromkeys((1, 2, 3), Action.RECOMPUTE)
    ops = {1: _op(1, 50), 2: _op(2, 101, on_tape=Recorded(0)), 3: _op(3, 50)}
    lane = _lane(_schedule(drops), ops)
    assert lane is not None
    assert set(lane.drops) == {3}
    assert _lane(_schedule({1: Action.RECOMPUTE}), {1: _op(1, 50)}, in_python={50}) is None
    assert _lane(_schedule({1: Action.RECOMPUTE}), {1: _op(1, 50)}, in_python={101}) is None


def test_the_first_buffer_and_what_no_op_makes_stay_in_python() -> None:
    """The recorder has packed the one; the other one can only be swapped."""
    assert _lane(_schedule({0: Action.RECOMPUTE}), {0: _op(0, 50)}) is None
    assert _lane(_schedule({1: Action.RECOMPUTE}), {}) is None
    assert _lane(_schedule({1: Action.RECOMPUTE}), {1: _op(1, 50)}, replayed=set()) is None


def test_ops_between_two_buffers_connect_them() -> None:
    """Also where what they make is not saved."""
    actions = {1: Action.SWAP, 3: Action.RECOMPUTE}
    between = LearnedOp(reads=(101,), makes=(70,), on_tape=_SIMPLE)
    assert _lane(_schedule(actions), {2: between, 3: _op(3, 70)}) is None
    lane = _lane(_schedule(actions | {4: Action.RECOMPUTE}), {2: between, 3: _op(3, 70), 4: _op(4, 50)})
    assert lane is not None
    assert lane.ops == {4}
