"""The independent validator agrees with the simulator to the byte."""

import msgspec
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.planners.chains import MACHINE, MIB, blocks, chain
from tests.trace.strategies import traces
from torchdelta.plan.model import Absence, Replay
from torchdelta.plan.validate import find_fault
from torchdelta.pool.bounds import max_load_bytes
from torchdelta.pool.planned import lives_of_plan
from torchdelta.simulate.model import Code
from torchdelta.simulate.problem import PlanningProblem
from torchdelta.trace.model import Buffer, Header, Op, SavedTensor, Trace

STEP = chain([(8 * MIB, 2e-3, 1e-4), (4 * MIB, 8e-3, 5e-4)] * 3)
DISKY = msgspec.structs.replace(MACHINE, disk_write_bytes_per_s=3e8, disk_read_bytes_per_s=5e8)


def some_codes(draw, problem):
    """Draw any codes that the class knows, whatever they do to the budget."""
    codes = problem.keep_all()
    for index, gap in enumerate(problem.gaps):
        allowed = [Code.KEEP, Code.SWAP, Code.DISK]
        if gap.can_recompute:
            allowed += [Code.RECOMPUTE] if problem.decision_class == "saved" else [Code.RECOMPUTE, Code.AGAIN]
        codes[index] = draw(st.sampled_from(allowed))
    return codes


def step_by_hand(buffers, ops, saved, name="aten.mm.default"):
    """A step of buffers of a MiB: `(storage, kind, birth, death)` each, and ops `(phase, reads, writes)` of one name.

    `saved` is the buffer that autograd saves, and the op that does.
    """
    id_saved, op_saved = saved
    return Trace(
        header=Header(torch_version="2.13.0", device="cpu", created_by="tests"),
        buffers=tuple(
            Buffer(
                id=id_,
                storage_id=storage_id,
                size_bytes=MIB,
                kind=kind,
                birth_op=birth_op,
                death_op=death_op,
                saved=id_ == id_saved,
            )
            for id_, (storage_id, kind, birth_op, death_op) in enumerate(buffers)
        ),
        ops=tuple(
            Op(index=index, name=name, phase=phase, reads=reads, writes=writes, recomputable=True)
            for index, (phase, reads, writes) in enumerate(ops)
        ),
        saved_tensors=(
            SavedTensor(op=op_saved, buffer_id=id_saved, shape=(1,), stride=(1,), offset=0, dtype="float32"),
        ),
    )


@settings(max_examples=60, deadline=None)
@given(st.data(), blocks() | st.none(), st.sampled_from(["saved", "extended", "all"]))
def test_what_the_simulator_says_of_memory_is_so(data, drawn, decision_class):
    """Under any decisions the plan is in order, and it holds a budget exactly if the simulator says so."""
    is_all = decision_class == "all"
    trace = data.draw(traces(lasting=is_all)) if drawn is None else chain(drawn, optimizer=is_all)
    problem = PlanningProblem.of(trace, DISKY, decision_class=decision_class, min_size_bytes=1)
    codes = some_codes(data.draw, problem)
    budget_bytes = data.draw(st.integers(0, max(problem.plain_peak_bytes, 1)))
    found = problem.simulation(codes, budget_bytes)
    if found.time_s == float("inf"):
        return
    fault = find_fault(trace, found.plan)
    if found.score.is_feasible:
        assert fault is None
    else:
        assert fault is not None
    # At exactly the peak that it tells the plan fits, and at one byte less it does not.
    header = found.plan.header
    tight = msgspec.structs.replace(header, budget_bytes=found.peak.size_bytes)
    assert find_fault(trace, msgspec.structs.replace(found.plan, header=tight)) is None
    less = msgspec.structs.replace(header, budget_bytes=found.peak.size_bytes - 1)
    assert find_fault(trace, msgspec.structs.replace(found.plan, header=less)) is not None


def test_a_replay_finds_what_the_op_after_it_writes_over():
    """A version that an op overwrites without reading it is there until that op runs, for both."""
    trace = step_by_hand(
        [(0, "activation", 0, 3), (1, "activation", 1, 4), (0, "activation", 3, 4)],
        [("forward", (), (0,)), ("forward", (0,), (1,)), ("forward", (), ()), ("backward", (1,), (2,))],
        saved=(1, 1),
    )
    problem = PlanningProblem.of(trace, MACHINE)
    found = problem.simulation(np.array([Code.RECOMPUTE], np.int8), 2 * MIB)
    assert found.score.is_feasible
    assert find_fault(trace, found.plan) is None


def test_a_replay_of_densely_connected_ops_is_possible():
    """Each op reads all before it, and all were dropped: what a replay has to look at is far more than it runs."""
    num = 16
    made = [(id_, "activation", id_ - 1, 2 * num + 1 - id_) for id_ in range(1, num + 1)]
    forward = [("forward", tuple(range(id_)), (id_,)) for id_ in range(1, num + 1)]
    backward = [("backward", (id_,), ()) for id_ in range(num, 0, -1)]
    trace = step_by_hand([(0, "input", -1, 2 * num), *made], [*forward, *backward], saved=(1, 1))
    problem = PlanningProblem.of(trace, MACHINE, decision_class="extended")
    assert len(problem.gaps) == num - 1
    found = problem.simulation(np.full(num - 1, Code.RECOMPUTE, np.int8), problem.plain_peak_bytes)
    assert found.score.is_feasible
    assert find_fault(trace, found.plan) is None
    (replay,) = found.plan.replays
    assert replay.ops == tuple(range(num - 1))


def test_statistics_that_are_brought_up_to_date_twice_need_not_be_found():
    """A batch norm that a step calls twice: the second call may run again although the first statistics went."""
    trace = step_by_hand(
        [
            (0, "constant", -1, 0),
            (0, "constant", 0, 1),
            (0, "constant", 1, 4),
            (1, "input", -1, 4),
            (2, "activation", 1, 4),
        ],
        [("forward", (0, 3), (1,)), ("forward", (1, 3), (2, 4)), ("forward", (), ()), ("backward", (4,), ())],
        saved=(4, 2),
        name="aten.native_batch_norm.default",
    )
    problem = PlanningProblem.of(trace, MACHINE)
    found = problem.simulation(np.array([Code.RECOMPUTE], np.int8), 3 * MIB + MIB)
    assert found.score.is_feasible
    assert find_fault(trace, found.plan) is None


def test_a_replay_makes_no_statistics():
    """An op that reads the statistics after the first call cannot run again once the second call has gone over them."""
    trace = step_by_hand(
        [
            (0, "constant", -1, 0),
            (0, "constant", 0, 2),
            (0, "constant", 2, 5),
            (1, "activation", 0, 1),
            (2, "activation", 1, 5),
        ],
        [
            ("forward", (0,), (1, 3)),
            ("forward", (1,), (4,)),
            ("forward", (1,), (2,)),
            ("forward", (), ()),
            ("backward", (4,), ()),
        ],
        saved=(4, 2),
        name="aten.native_batch_norm.default",
    )
    found = PlanningProblem.of(trace, MACHINE).simulation(np.array([Code.RECOMPUTE], np.int8), 5 * MIB)
    assert found.time_s == float("inf")
    absence = Absence(buffer_id=4, last_use_op=1, next_use_op=4, action="recompute", leave_op=2, return_op=4)
    plan = msgspec.structs.replace(found.plan, absences=(absence,), replays=(Replay(at_op=4, ops=(0, 1)),))
    assert "reads buffer 1" in (find_fault(trace, plan) or "")


def test_what_a_replay_writes_over_in_place_is_one_allocation():
    """An addition in place between what is read and what is wanted: the replay holds it once, for all three of them."""
    trace = step_by_hand(
        [(0, "input", -1, 4), (1, "activation", 0, 1), (1, "activation", 1, 4), (2, "activation", 2, 3)],
        [("forward", (0,), (1,)), ("forward", (1,), (2,)), ("forward", (0,), (3,)), ("backward", (2,), ())],
        saved=(2, 2),
    )
    found = PlanningProblem.of(trace, MACHINE).simulation(np.array([Code.RECOMPUTE], np.int8), 2 * MIB)
    assert found.score.is_feasible
    assert found.plan.replays[0].ops == (0, 1)
    assert find_fault(trace, found.plan) is None
    assert max_load_bytes(lives_of_plan(trace, found.plan)) == 2 * MIB


def test_a_buffer_that_is_wanted_back_before_it_has_left_counts_once():
    """Its copy out ends before its copy in begins, so it is never there twice."""
    trace = chain([(MIB, 1e-4, 1e-4)] * 2)
    problem = PlanningProblem.of(trace, DISKY, min_size_bytes=1)
    codes = problem.keep_all()
    codes[[1, 3]] = Code.SWAP
    found = problem.simulation(codes, problem.plain_peak_bytes)
    less = msgspec.structs.replace(found.plan.header, budget_bytes=found.peak.size_bytes - 1)
    assert find_fault(trace, msgspec.structs.replace(found.plan, header=less)) is not None


def test_a_host_that_is_too_small_is_named():
    """The limits of the tiers are checked like the device's, by the simulator and by the validator."""
    problem = PlanningProblem.of(STEP, MACHINE)
    codes = np.full(len(problem.gaps), Code.SWAP, np.int8)
    found = problem.simulation(codes, problem.plain_peak_bytes)
    assert (
        find_fault(STEP, found.plan, msgspec.structs.replace(MACHINE, host_memory_bytes=found.host_peak_bytes)) is None
    )
    small = msgspec.structs.replace(MACHINE, host_memory_bytes=found.host_peak_bytes - 1)
    assert "the host would hold" in (find_fault(STEP, found.plan, small) or "")
    assert PlanningProblem.of(STEP, small).score(codes, problem.plain_peak_bytes).host_excess_bytes == 1
    codes[0] = Code.DISK
    found = PlanningProblem.of(STEP, DISKY).simulation(codes, problem.plain_peak_bytes)
    assert found.disk_written_bytes == found.disk_read_bytes == problem.gaps[0].size_bytes
    assert "has none" in (find_fault(STEP, found.plan, MACHINE) or "")
