"""What one decision does to a step that can be reckoned by hand."""

import numpy as np
import pytest
from msgspec.structs import replace

from tests.planners.chains import MACHINE, MIB, chain
from torchdelta.errors import PlanError
from torchdelta.simulate import Decision, Options, simulate
from torchdelta.simulate.model import Code
from torchdelta.simulate.problem import PlanningProblem

TRACE = chain([(8 * MIB, 2e-3, 1e-4)] * 4)
WIDE = TRACE.ops[0].writes[0]  # the first block's wide buffer: born at op 0, read by op 1, then late in backward
LAST_USE = 1
NEXT_USE = max(op.index for op in TRACE.ops if WIDE in op.reads)


def test_without_decisions_the_step_is_plain():
    """Nothing leaves, so time and peak are those of the trace."""
    found = simulate(TRACE, MACHINE)
    assert found.time_s == found.plain_time_s == pytest.approx(sum(op.time_s for op in TRACE.ops))
    assert found.peak.size_bytes == found.plain_peak_bytes == max(found.load_bytes)
    assert sum(TRACE.buffers[id_].size_bytes for id_ in found.peak.tensors) == found.peak.size_bytes
    assert found.plan.absences == found.plan.replays == found.stalls == ()


def test_a_dropped_buffer_is_replayed_right_before_its_use():
    """Its producer runs once more, its memory is free in between, and the step takes just that much longer."""
    found = simulate(TRACE, MACHINE, [Decision(buffer_id=WIDE, action="recompute")])
    (absence,) = found.plan.absences
    (replay,) = found.plan.replays
    assert (absence.leave_op, absence.return_op, absence.next_use_op) == (LAST_USE + 1, NEXT_USE, NEXT_USE)
    assert (replay.at_op, replay.ops) == (NEXT_USE, (0,))
    assert found.recompute_s == TRACE.ops[0].time_s
    assert found.time_s == pytest.approx(found.plain_time_s + TRACE.ops[0].time_s)
    plain = simulate(TRACE, MACHINE)
    assert plain.load_bytes[LAST_USE + 1] - found.load_bytes[LAST_USE + 1] == 8 * MIB


def test_a_swap_that_is_not_hurried_costs_nothing():
    """8 MiB take 8.4 ms each way, and the buffer is not needed for longer than both."""
    found = simulate(TRACE, MACHINE, [Decision(buffer_id=WIDE, action="swap")])
    assert found.time_s == pytest.approx(found.plain_time_s)
    assert found.swapped_out_bytes == found.swapped_in_bytes == found.host_peak_bytes == 8 * MIB
    assert {span.lane for span in found.timeline} == {"compute", "device_to_host", "host_to_device"}


def test_without_prefetch_compute_waits_for_each_swap_in():
    """A swap-in that is issued at its use is a stall as long as the transfer."""
    found = simulate(TRACE, MACHINE, [Decision(buffer_id=WIDE, action="swap")], options=Options(prefetch=False))
    (stall,) = found.stalls
    assert (stall.buffer_id, stall.op, stall.waited_for) == (WIDE, NEXT_USE, "in")
    assert stall.time_s == found.stall_s == pytest.approx(8 * MIB / MACHINE.host_in_bytes_per_s)


def test_a_swap_is_waited_for_where_the_budget_is_passed_otherwise():
    """Right after its last use the memory is needed, so compute waits until the copy has ended."""
    plain = simulate(TRACE, MACHINE)
    budget_bytes = plain.load_bytes[LAST_USE + 1] - 1
    found = simulate(TRACE, MACHINE, [Decision(buffer_id=WIDE, action="swap")], budget_bytes=budget_bytes)
    first = found.stalls[0]
    assert (first.buffer_id, first.op, first.waited_for) == (WIDE, LAST_USE + 1, "out")
    assert found.load_bytes[LAST_USE + 1] == plain.load_bytes[LAST_USE + 1] - 8 * MIB


def test_a_step_that_does_not_fit_says_by_how_much():
    """The simulation goes on, and its score tells the excess."""
    found = simulate(TRACE, MACHINE, budget_bytes=10)
    assert not found.score.is_feasible
    assert found.score.excess_bytes == found.plain_peak_bytes - 10


def test_an_excess_beyond_64_bits_is_an_excess():
    """Added up over the ops it ends at 2**62, on the device and on the host: what is far too large never fits."""
    huge = chain([(2**55, 2e-3, 1e-4)] * 10)
    score = simulate(huge, MACHINE, budget_bytes=MIB).score
    assert not score.is_feasible
    assert score.excess_bytes == PlanningProblem.of(huge, MACHINE).plain_peak_bytes - MIB
    assert score.excess_sum_bytes == 2**62
    problem = PlanningProblem.of(huge, replace(MACHINE, host_memory_bytes=MIB))
    codes = np.full(len(problem.gaps), Code.SWAP, np.int8)
    score = problem.score(codes, 2**62)
    assert score.excess_bytes == 0
    assert score.host_excess_bytes > 0
    assert score.excess_sum_bytes == pytest.approx(2**62)


def test_a_plan_that_passes_the_budget_is_not_scored_as_one_that_holds_it(monkeypatch):
    """Whatever the evaluation of its decisions has said: what counts is the plan as it is written."""
    problem = PlanningProblem.of(TRACE, MACHINE)
    plain = PlanningProblem.score
    monkeypatch.setattr(
        PlanningProblem, "score", lambda *arguments: replace(plain(*arguments), excess_bytes=0, excess_sum_bytes=0)
    )
    found = problem.simulation(problem.keep_all(), problem.plain_peak_bytes - 1)
    assert not found.score.is_feasible
    assert found.score.excess_bytes == 1


def test_a_buffer_without_a_gap_cannot_leave():
    """A decision about a buffer that is used without a break is an error that names it."""
    with pytest.raises(PlanError, match="buffer 0 cannot leave"):
        simulate(TRACE, MACHINE, [Decision(buffer_id=0, action="swap")])
