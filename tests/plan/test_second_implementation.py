"""A second implementation, written from the two format documents alone, prices plans as `execute` does."""

import ast
import functools
import sys
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from tests.plan import second_implementation
from tests.planners import steps
from tests.planners.chains import MIB, chain
from tests.planners.test_every_planner import PLANNERS, planner_named
from tests.sampling import keep
from tests.simulate.test_against_validator import some_codes
from tests.simulate.test_execute import problems
from torchdelta.errors import InfeasibleError
from torchdelta.plan.file import write_plan
from torchdelta.plan.model import Keep
from torchdelta.plan.validate import find_fault
from torchdelta.pool.bounds import max_load_bytes
from torchdelta.pool.planned import lives_of_plan
from torchdelta.simulate import execute
from torchdelta.simulate.problem import PlanningProblem
from torchdelta.trace.file import write_trace
from torchdelta.trace.model import peak

BLOCKS = [(8 * MIB, 2e-3, 1e-4), (4 * MIB, 8e-3, 5e-4)] * 4


@functools.cache
def step(name):
    """One of the real steps, or one made by hand with an optimizer whose states outlive it."""
    return chain(BLOCKS, optimizer=True) if name == "chain" else steps.real_step(name)


def price(trace, plan):
    """Return peak and time as the second implementation has them, from files."""
    with tempfile.TemporaryDirectory() as folder:
        write_trace(trace, Path(folder) / "step.trace")
        write_plan(plan, Path(folder) / "step.plan")
        return second_implementation.simulate(Path(folder) / "step.trace", Path(folder) / "step.plan")


@pytest.mark.parametrize("model", ["chain", *steps.STEPS])
@pytest.mark.parametrize("planner", keep(PLANNERS, PLANNERS[::6]))
def test_it_prices_the_plans_of_every_planner(planner, model):
    """The same peak to the byte and the same time to a billionth, at budgets from roomy to tight."""
    trace = step(model)
    plain_bytes = peak(trace, with_workspace=True).size_bytes
    num_plans = 0
    for percent in (100, 80, 60, 45):
        budget_bytes = plain_bytes * percent // 100
        try:
            plan = planner_named(planner)(trace, steps.MACHINE, budget_bytes, "fast")
        except InfeasibleError:
            continue
        num_plans += 1
        found = execute(trace, steps.MACHINE, plan)
        peak_bytes, time_s = price(trace, plan)
        assert peak_bytes == found.peak.size_bytes
        assert time_s == pytest.approx(found.time_s, rel=1e-9)
    assert num_plans, "a step fits at its own peak"


@settings(max_examples=50, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(st.data(), problems())
def test_it_prices_random_plans(data, problem):
    """Of every class, on every kind of link, over the end of the step, synchronous or not."""
    codes = some_codes(data.draw, problem)
    budget_bytes = data.draw(st.integers(0, max(problem.plain_peak_bytes, 1)))
    assume(problem.score(codes, budget_bytes).time_s < float("inf"))
    plan = problem.program(codes, budget_bytes)
    found = execute(problem.trace, problem.machine, plan)
    assert price(problem.trace, plan) == (found.peak.size_bytes, pytest.approx(found.time_s, rel=1e-9))


@st.composite
def moved(draw, plan, ops):
    """Draw a plan whose moments nobody chose: late copies out, other ranks, replays that keep what they make."""
    num_ops, absences = len(ops), []
    for absence in plan.absences:
        if absence.action == "swap" and draw(st.booleans()):
            return_op = draw(st.integers(absence.return_op, absence.next_use_op))
            leave_op = draw(st.integers(absence.leave_op, return_op))
            out_op = draw(st.integers(absence.last_use_op, min(leave_op, num_ops) - 1))
            changed = replace(absence, out_op=out_op, leave_op=leave_op, return_op=return_op)
            absences.append(replace(changed, return_rank=draw(st.integers(0, 2))))
            if absence.next_use_op >= num_ops and draw(st.booleans()):
                absences[-1] = replace(absences[-1], carried_s=draw(st.sampled_from([0.0, 1e-4, 1.0])))
            if absence.next_use_op >= num_ops > leave_op and draw(st.booleans()):  # back before the end of the step
                absences[-1] = replace(absences[-1], return_op=draw(st.integers(leave_op, num_ops)))
        else:
            absences.append(absence)
    replays = []
    for replay in plan.replays:
        made = sorted({id_ for index in replay.ops for id_ in ops[index].writes})
        kept = draw(st.lists(st.sampled_from(made), unique=True, max_size=2)) if made else []
        until = st.integers(replay.at_op + 1, len(ops))
        replays.append(replace(replay, keeps=tuple(Keep(buffer_id=id_, until_op=draw(until)) for id_ in kept)))
    return replace(plan, absences=tuple(absences), replays=tuple(replays))


@settings(max_examples=50, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(st.data(), problems())
def test_it_prices_plans_with_any_moments(data, problem):
    """Written by nobody: what the page says of late copies, ranks, keeps and carried copies is what `execute` does."""
    codes = some_codes(data.draw, problem)
    budget_bytes = data.draw(st.integers(0, max(problem.plain_peak_bytes, 1)))
    assume(problem.score(codes, budget_bytes).time_s < float("inf"))
    plan = data.draw(moved(problem.program(codes, budget_bytes), problem.trace.ops))
    found = execute(problem.trace, problem.machine, plan)
    assert price(problem.trace, plan) == (found.peak.size_bytes, pytest.approx(found.time_s, rel=1e-9))
    tight = replace(plan, header=replace(plan.header, budget_bytes=found.peak.size_bytes))
    assert "is passed by" not in (find_fault(problem.trace, tight) or "")
    fault = find_fault(problem.trace, tight)
    if fault is None:
        assert max_load_bytes(lives_of_plan(problem.trace, plan)) >= found.peak.size_bytes


def test_it_sees_a_moment_that_is_moved():
    """The comparison can fail: a plan whose copies in are all late takes longer, and both say so."""
    trace = step("chain")
    problem = PlanningProblem.of(trace, steps.MACHINE, min_size_bytes=1)
    codes = problem.keep_all()
    codes[:] = 1
    plan = problem.program(codes, problem.plain_peak_bytes)
    late = tuple(replace(absence, return_op=absence.next_use_op) for absence in plan.absences)
    later = replace(plan, absences=late)
    assert find_fault(trace, later) is None
    assert price(trace, later)[1] > price(trace, plan)[1] * (1 + 1e-6)
    assert price(trace, later)[1] == pytest.approx(execute(trace, steps.MACHINE, later).time_s, rel=1e-9)


def test_it_imports_nothing_but_the_standard_library():
    """Nothing of torchdelta can be inside it."""
    tree = ast.parse(Path(second_implementation.__file__).read_text(encoding="utf-8"))
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    imported |= {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert imported <= set(sys.stdlib_module_names)
