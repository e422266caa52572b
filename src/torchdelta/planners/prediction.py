"""One call from a step and a budget to a plan and what it is predicted to cost: the command line's way, and yours.

    from torchdelta import plan_step

    prediction = plan_step("step.trace", "a100-80g", "8GiB")
    print(prediction.overhead, prediction.peak_bytes)

Loads without numba, as a public name of the package: the simulator and the planners are imported by the functions.
"""

import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, get_args

import msgspec

from torchdelta.bounds.lp_bound import Bound, bound
from torchdelta.errors import PlanError
from torchdelta.machine.catalog import find
from torchdelta.machine.interval import Interval, interval_of
from torchdelta.machine.model import Machine
from torchdelta.machine.roofline import price
from torchdelta.names import unknown_name
from torchdelta.plan.file import read_plan
from torchdelta.plan.model import DecisionClass, Plan
from torchdelta.plan.validate import validate
from torchdelta.planners.registry import DEFAULT_EFFORT, DEFAULT_PLANNER, Effort, get
from torchdelta.trace.file import read_trace
from torchdelta.trace.model import Trace, peak
from torchdelta.units import format_bytes, parse_size

if TYPE_CHECKING:
    from torchdelta.pool.planned import PooledPlan
    from torchdelta.simulate.model import Simulation

__all__ = ["Prediction", "plan_step", "predict"]

_ALIGNMENT_BYTES = 512
"""Blocks of torch's CUDA allocator begin at multiples of this."""


class Prediction(msgspec.Struct, frozen=True, kw_only=True):
    """A plan of a step, and what the step is predicted to take under it.

    Attributes:
        trace: The step, with the times that its ops take on the machine.
        machine: The machine.
        simulation: The execution of the plan in full: waits, transfers, the load at each op.
        planning_s: Wall-clock seconds that planning took; 0.0 where a given plan was executed.
        uses_recorded_times: Whether op times are those of the trace file, because its ops have no FLOPs or bytes.
        bound: A time that no plan of the class *saved* can beat; None if it was not asked for.
        pooled: The addresses of the step's tensors; None if the footprint was not asked for.
    """

    trace: Trace
    machine: Machine
    simulation: "Simulation"
    planning_s: float = 0.0
    uses_recorded_times: bool = False
    bound: Bound | None = None
    pooled: "PooledPlan | None" = None

    @property
    def plan(self) -> Plan:
        """The program: which buffers leave the device, how, and at which ops each action happens."""
        return self.simulation.plan

    @property
    def time_s(self) -> float:
        """Seconds of the step under the plan."""
        return self.simulation.time_s

    @property
    def plain_time_s(self) -> float:
        """Seconds of the step when nothing leaves."""
        return self.simulation.plain_time_s

    @property
    def interval(self) -> Interval | None:
        """How far the times may be off (`machine.interval`); None where op times are recorded or nothing is known."""
        return None if self.uses_recorded_times else interval_of(self.trace, self.machine)

    @property
    def overhead(self) -> float:
        """The slowdown as a share: 0.1 is 10 % more time than plain."""
        return self.simulation.overhead

    @property
    def peak_bytes(self) -> int:
        """Most bytes on the device under the plan."""
        return self.simulation.peak.size_bytes

    @property
    def plain_peak_bytes(self) -> int:
        """Most bytes on the device when nothing leaves."""
        return self.simulation.plain_peak_bytes

    @property
    def pinned_host_bytes(self) -> int:
        """Most bytes in pinned host memory; 0 where swaps go to a disk ([Note: where swaps go] in machine/model.py)."""
        return 0 if self.machine.swaps_to == "disk" else self.simulation.host_peak_bytes


def plan_step(
    trace: Trace | str | os.PathLike[str],
    machine: Machine | str,
    budget: int | str,
    *,
    planner: str = DEFAULT_PLANNER,
    decision_class: DecisionClass | None = None,
    effort: Effort = DEFAULT_EFFORT,
    with_bound: bool = False,
    within_footprint: bool = False,
    say: Callable[[str], Any] | None = None,
) -> Prediction:
    """Plan a training step inside a budget, execute the plan in the simulator, and return what it costs.

    Needs numpy and numba (`pip install torchdelta[plan]`), and no torch.

    Args:
        trace: A step, or the path of its file (`torchdelta trace` writes one). Its ops are priced for the machine.
        machine: Where the step would run: a machine, or its name in the catalog, such as `"a100-80g"`.
        budget: The most bytes on the device at any moment: an int, or text such as `"8GiB"` or `"80%"` of its memory.
        planner: Registered name of the planner; `torchdelta plan --planner list` lists them.
        decision_class: What may leave the device: `"saved"`, `"extended"`, `"persistent"` or `"all"`
            (`plan.model.DecisionClass`); None for the planner's own, which is `"saved"` for the default planner.
        effort: How long the planner may think: `"fast"` or `"best"`.
        with_bound: Whether to prove how much faster another plan of the class *saved* could be (extra `solver`).
        within_footprint: Whether the budget is for the footprint, fragmentation included, and not for the bytes alone.
        say: Called with a few words when something begins that can take seconds, first of all with what is planned.

    Raises:
        SizeError: The budget cannot be parsed.
        MachineError: There is no such machine.
        TraceFileError: The trace cannot be read.
        PlanError: There is no such planner, class or effort, or the trace has no ops or no times.
        InfeasibleError: No plan within the budget was found; it names the least budget that was, but for a footprint.
    """
    from torchdelta.simulate.execute import execute

    hardware = find(machine) if isinstance(machine, str) else machine
    if effort not in get_args(Effort):
        raise PlanError(unknown_name("effort", str(effort), get_args(Effort)))
    choose = get(planner, decision_class)
    budget_bytes = parse_size(budget, total_bytes=hardware.memory_bytes, name="memory budget")
    step, uses_recorded_times = _priced(trace, hardware)
    say = say or (lambda _: None)
    say(f"planning within {format_bytes(budget_bytes)}: {_summary(step, hardware)}")
    start_s = time.monotonic()
    pooled = None
    if within_footprint:
        from torchdelta.pool.planned import plan_within_footprint

        pooled = plan_within_footprint(
            step,
            budget_bytes,
            lambda size_bytes: choose(step, hardware, size_bytes, effort),
            alignment_bytes=_ALIGNMENT_BYTES,
        )
    plan = choose(step, hardware, budget_bytes, effort) if pooled is None else pooled.plan
    planning_s = time.monotonic() - start_s
    if with_bound:
        say("bounding")
    return Prediction(
        trace=step,
        machine=hardware,
        simulation=execute(step, hardware, plan),
        planning_s=planning_s,
        uses_recorded_times=uses_recorded_times,
        bound=bound(step, hardware, budget_bytes) if with_bound else None,
        pooled=pooled,
    )


def predict(
    trace: Trace | str | os.PathLike[str],
    machine: Machine | str,
    plan: Plan | str | os.PathLike[str] | None = None,
) -> Prediction:
    """Return what a step is predicted to take under a plan, exactly as the plan is written.

    Args:
        trace: A step, or the path of its file. Its ops are priced for the machine.
        machine: Where the step would run: a machine, or its name in the catalog.
        plan: A plan of that step, or the path of its file; None for the plain step, in which nothing leaves.

    Raises:
        MachineError: There is no such machine.
        TraceFileError: The trace cannot be read.
        PlanError: The plan cannot be read, belongs to another trace or exceeds its budget, or the trace has no ops or
            no times.
    """
    from torchdelta.simulate.execute import execute

    hardware = find(machine) if isinstance(machine, str) else machine
    step, uses_recorded_times = _priced(trace, hardware)
    if plan is None:
        plan = get("keep")(step, hardware, max(peak(step, with_workspace=True).size_bytes, 1))
    else:
        plan = plan if isinstance(plan, Plan) else read_plan(plan)
        validate(step, plan, hardware)
    simulation = execute(step, hardware, plan)
    return Prediction(trace=step, machine=hardware, simulation=simulation, uses_recorded_times=uses_recorded_times)


def _priced(trace: Trace | str | os.PathLike[str], machine: Machine) -> tuple[Trace, bool]:
    """Return a step with the times that its ops take on a machine, and whether they are its recorded ones.

    The roofline prices a trace whose ops have FLOPs or moved bytes; any other keeps its recorded times.
    """
    where = "" if isinstance(trace, Trace) else f"{os.fspath(trace)}: "
    step = trace if isinstance(trace, Trace) else read_trace(trace)
    if not step.ops:
        raise PlanError(f"{where}the trace has no ops: there is nothing to plan")
    if any(op.flops or op.moved_bytes for op in step.ops):
        return price(step, machine), False
    if not any(op.time_s for op in step.ops):
        raise PlanError(f"{where}the trace has neither op times nor FLOPs: its time cannot be predicted")
    return step, True


def _summary(step: Trace, machine: Machine) -> str:
    """Return what there is to plan, for who waits for it."""
    plain_s = sum(op.time_s for op in step.ops)
    plain_peak = format_bytes(peak(step, with_workspace=True).size_bytes)
    return f"{len(step.ops)} ops, peak {plain_peak}, {plain_s * 1e3:.2f} ms on {machine.name}"
