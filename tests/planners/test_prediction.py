"""`plan_step`: one call from a step and a budget to a plan and what it costs."""

import subprocess
import sys

import pytest
from msgspec.structs import replace

import torchdelta
from tests.planners.chains import MACHINE, MIB, chain
from torchdelta.errors import InfeasibleError, PlanError, SizeError
from torchdelta.machine.catalog import find
from torchdelta.machine.roofline import price
from torchdelta.plan.file import write_plan
from torchdelta.planners import get, plan_step, predict
from torchdelta.simulate import execute
from torchdelta.trace.file import write_trace
from torchdelta.trace.model import peak

STEP = chain([(8 * MIB, 2e-3, 1e-4), (4 * MIB, 8e-3, 5e-4)] * 4)
WITH_FLOPS = replace(STEP, ops=tuple(replace(op, flops=10**9, dtype="float32") for op in STEP.ops))
BUDGET_BYTES = peak(STEP, with_workspace=True).size_bytes * 6 // 10


def test_it_is_the_planner_and_the_execution_of_its_plan():
    """Times that a trace has are kept where its ops have no FLOPs to price."""
    found = torchdelta.plan_step(STEP, MACHINE, BUDGET_BYTES)
    plan = get("torchdelta")(STEP, MACHINE, BUDGET_BYTES, "fast")
    assert isinstance(found, torchdelta.Prediction)
    assert (found.trace, found.plan) == (STEP, plan)
    simulation = execute(STEP, MACHINE, plan)
    assert found.uses_recorded_times
    assert found.time_s == simulation.time_s
    assert found.plain_time_s == pytest.approx(sum(op.time_s for op in STEP.ops))
    assert found.overhead == simulation.overhead
    assert found.peak_bytes == simulation.peak.size_bytes <= BUDGET_BYTES < found.plain_peak_bytes
    assert found.pinned_host_bytes == simulation.host_peak_bytes > 0
    assert found.planning_s > 0
    assert found.bound is found.pooled is None


def test_files_names_and_text_are_as_good_as_objects(tmp_path):
    """A trace by its path, a machine by its name, a budget as text; what has FLOPs is priced for the machine."""
    path, machine = tmp_path / "step.trace", find("t4")
    write_trace(WITH_FLOPS, path)
    found = plan_step(path, "t4", f"{BUDGET_BYTES // 2**20}MiB")
    priced = price(WITH_FLOPS, machine)
    assert found.trace == priced != WITH_FLOPS
    assert not found.uses_recorded_times
    assert found.plan == plan_step(priced, machine, BUDGET_BYTES // 2**20 * 2**20).plan
    half = plan_step(str(path), machine, "50%")
    assert half.plan.header.budget_bytes == machine.memory_bytes // 2
    assert half.overhead == 0
    plan = tmp_path / "step.plan"
    write_plan(found.plan, plan)
    again = predict(path, "t4", plan)
    assert (again.plan, again.time_s, again.peak_bytes) == (found.plan, found.time_s, found.peak_bytes)
    assert predict(path, "t4").plan.absences == ()


def test_a_class_an_effort_and_another_planner():
    """What is asked for stands in the plan; the bound is of the class saved, and below its plans."""
    freer = plan_step(STEP, MACHINE, BUDGET_BYTES, decision_class="all", with_bound=True)
    assert freer.plan.header.decision_class == "all"
    assert freer.bound is not None
    assert freer.bound.time_s <= plan_step(STEP, MACHINE, BUDGET_BYTES, effort="best").time_s * (1 + 1e-9)
    dropping = plan_step(STEP, MACHINE, BUDGET_BYTES, planner="dtr")
    assert (dropping.plan.header.planner, dropping.plan.header.decision_class) == ("dtr", "extended")
    assert dropping.pinned_host_bytes == 0


def test_the_footprint_can_be_held_too():
    """Every address of the plan's tensors is within the budget."""
    found = plan_step(STEP, MACHINE, BUDGET_BYTES, within_footprint=True)
    assert found.pooled is not None
    assert found.peak_bytes <= found.pooled.placement.footprint_bytes <= BUDGET_BYTES


def test_swaps_to_a_disk_take_no_pinned_memory():
    """A CPU's host memory is the device's own."""
    cpu = replace(MACHINE, swaps_to="disk")
    found = plan_step(STEP, cpu, BUDGET_BYTES, planner="swap-all")
    assert found.simulation.host_peak_bytes > 0
    assert found.pinned_host_bytes == 0


@pytest.mark.parametrize(
    ("options", "kind", "said"),
    [
        ({"budget": 0.8}, SizeError, "ambiguous"),
        ({"budget": 1000}, InfeasibleError, "the least budget found is"),
        ({"effort": "most"}, PlanError, "unknown effort 'most': use fast or best"),
        ({"planner": "torchdelt"}, PlanError, "did you mean torchdelta"),
        ({"decision_class": "most"}, PlanError, "does not plan in the class 'most'"),
        ({"trace": replace(STEP, buffers=(), ops=(), saved_tensors=())}, PlanError, "the trace has no ops"),
        (
            {"trace": replace(STEP, ops=tuple(replace(op, time_s=0.0) for op in STEP.ops))},
            PlanError,
            "neither op times nor FLOPs",
        ),
    ],
)
def test_what_cannot_be_planned_is_one_clear_error(options, kind, said):
    """Before anything is planned, where that is possible."""
    with pytest.raises(kind, match=said):
        plan_step(**({"trace": STEP, "machine": MACHINE, "budget": BUDGET_BYTES} | options))


def test_the_names_load_without_what_planning_needs():
    """As before there were any: neither numba nor scipy nor torch come with the package or its public names."""
    code = (
        "import sys, torchdelta; torchdelta.plan_step, torchdelta.Prediction;"
        "print(sorted({'numba', 'numpy', 'scipy', 'torch', 'highspy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
