"""Swaps over the end of the step: what a step that repeats itself takes, and what it holds at both ends."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from tests.planners.chains import MACHINE, MIB, blocks, chain
from torchdelta.errors import PlanError
from torchdelta.plan.validate import find_fault
from torchdelta.simulate import Decision, Options, simulate, simulate_plan
from torchdelta.simulate.gaps import find_gaps
from torchdelta.simulate.model import Code
from torchdelta.simulate.problem import PlanningProblem
from torchdelta.trace.model import BEFORE_STEP, load_curve

STEP = chain([(8 * MIB, 8e-3, 1e-4)] * 4, optimizer=True)
NUM_OPS = len(STEP.ops)
OVER_END = [gap for gap in find_gaps(STEP, decision_class="all") if gap.next_use_op >= NUM_OPS]
STATES = [gap for gap in OVER_END if STEP.buffers[gap.buffer_id].kind == "optimizer_state"]


def swapped(gaps, **options):
    """The step with these gaps swapped."""
    decisions = [Decision(buffer_id=gap.buffer_id, action="swap", last_use_op=gap.last_use_op) for gap in gaps]
    return simulate(STEP, MACHINE, decisions, decision_class="all", **options)


def test_the_class_persistent_has_the_gaps_of_saved_and_of_what_persists():
    """None of a temporary, and of an activation only the one from forward to backward."""
    saved, persistent, everything = (
        set(find_gaps(STEP, decision_class=name, min_size_bytes=1)) for name in ("saved", "persistent", "all")
    )
    kinds = {"parameter", "gradient", "optimizer_state"}
    assert persistent == saved | {gap for gap in everything if STEP.buffers[gap.buffer_id].kind in kinds}
    assert persistent < everything
    assert saved < persistent


def test_only_classes_of_what_persists_have_gaps_over_the_end():
    """For each momentum and parameter, but for the one that the last op writes and the first op reads next."""
    for name in ("saved", "extended"):
        assert all(gap.next_use_op < NUM_OPS for gap in find_gaps(STEP, decision_class=name))
    assert len(OVER_END) == 2 * 4 - 1
    for gap in OVER_END:
        last = STEP.buffers[gap.buffer_id]
        (first,) = (b for b in STEP.buffers if b.storage_id == last.storage_id and b.birth_op == BEFORE_STEP)
        assert last.death_op == NUM_OPS
        assert first.id in STEP.ops[gap.next_use_op - NUM_OPS].reads
        assert not gap.can_recompute
        assert gap.last_use_op == max([last.birth_op] + [op.index for op in STEP.ops if last.id in op.reads])


def test_states_that_wait_for_their_step_on_the_host_cost_nothing_where_the_link_is_idle():
    """All of forward and backward runs without them; the host holds them at both ends."""
    found = swapped(STATES)
    assert found.time_s == pytest.approx(found.plain_time_s)
    assert found.host_peak_bytes == found.swapped_out_bytes == found.swapped_in_bytes == 4 * MIB
    assert found.peak.size_bytes == found.plain_peak_bytes  # where nothing has to leave they come back at once
    budget_bytes = found.plain_peak_bytes - 4 * MIB
    tight = swapped(STATES, budget_bytes=budget_bytes)
    assert tight.score.is_feasible
    assert tight.load_bytes[0] <= load_curve(STEP)[0]
    assert find_fault(STEP, tight.plan) is None
    assert simulate_plan(STEP, MACHINE, tight.plan).plan.absences == tight.plan.absences


def test_a_copy_that_has_not_ended_with_the_step_goes_on_in_the_next_one():
    """The last op's state is still there when the next step begins, and leaves when its copy has ended."""
    last = max(OVER_END, key=lambda gap: gap.last_use_op)
    found = swapped([last])
    (absence,) = found.plan.absences
    assert absence.leave_op > NUM_OPS
    assert absence.leave_op <= absence.return_op <= absence.next_use_op == last.next_use_op
    assert find_fault(STEP, found.plan) is None


def test_a_step_that_may_not_hold_its_copies_waits_for_them():
    """At the least budget nothing is on its way while another needs the room: slower, and still in the budget."""
    problem = PlanningProblem.of(STEP, MACHINE, decision_class="all", min_size_bytes=1)
    codes = np.full(len(problem.gaps), Code.SWAP, np.int8)
    least_bytes = problem.score(codes, 0).peak_bytes
    found = problem.simulation(codes, least_bytes)
    assert found.score.is_feasible
    assert found.peak.size_bytes == least_bytes
    assert found.time_s > found.plain_time_s
    assert find_fault(STEP, found.plan, MACHINE) is None


@settings(max_examples=60, deadline=None)
@given(st.data(), blocks(), st.sampled_from([1e8, 1e9, 1e10]), st.sampled_from([1.0, 0.5]), st.booleans())
def test_a_step_takes_at_least_as_long_as_its_copies(data, drawn, rate, both_ways, synchronous):
    """A step that repeats itself cannot send more in its time than the link carries, whatever its decisions are."""
    trace = chain(drawn, optimizer=True)
    machine = replace(
        MACHINE, host_out_bytes_per_s=rate, host_in_bytes_per_s=rate, both_ways_factor=both_ways, link_latency_s=1e-5
    )
    options = Options(synchronous=synchronous)
    problem = PlanningProblem.of(trace, machine, decision_class="all", min_size_bytes=1, options=options)
    codes = np.array(data.draw(st.lists(st.integers(0, 1), min_size=len(problem.gaps), max_size=len(problem.gaps))))
    found = problem.simulation(codes.astype(np.int8), data.draw(st.integers(0, problem.plain_peak_bytes)))
    copies = sum(absence.action == "swap" for absence in found.plan.absences)
    one_way_s = found.swapped_out_bytes / rate + copies * machine.link_latency_s
    assert found.time_s >= one_way_s * (1 - 1e-6)
    if both_ways == 0.5:  # the ways take turns
        assert found.time_s >= 2 * one_way_s * (1 - 1e-6)
    assert found.time_s == pytest.approx(found.plain_time_s + found.stall_s)


def test_only_a_swap_reaches_over_the_end():
    """What the optimizer wrote is not made again."""
    decision = Decision(buffer_id=STATES[0].buffer_id, action="recompute", last_use_op=STATES[0].last_use_op)
    with pytest.raises(PlanError, match="only a swap brings it back"):
        simulate(STEP, MACHINE, [decision], decision_class="all")
