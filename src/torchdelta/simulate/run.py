"""From decisions to a plan with moments, and to what it costs: the front doors."""

from collections.abc import Iterable

from torchdelta.machine.model import Machine
from torchdelta.plan.model import DecisionClass, Plan
from torchdelta.simulate.model import Decision, Options, Simulation
from torchdelta.simulate.problem import PlanningProblem
from torchdelta.trace.model import Trace

__all__ = ["schedule", "simulate"]


def simulate(
    trace: Trace,
    machine: Machine,
    decisions: Iterable[Decision] = (),
    *,
    budget_bytes: int | None = None,
    decision_class: DecisionClass = "saved",
    min_size_bytes: int = 1,
    options: Options | None = None,
) -> Simulation:
    """Return what a step costs when the given buffers leave, and everything else stays.

    Copies out follow on the last use, compute waits for one only where the budget would be passed, copies in are queued
    as early as memory surely permits, and dropped buffers are made again right before their use
    (`docs/design/0008-the-simulator.md`).

    Args:
        trace: A valid trace whose ops carry their times on the machine (`machine.roofline.price`).
        machine: Whose links and memories are used.
        decisions: Who leaves, and how.
        budget_bytes: The most bytes on the device; None for the machine's memory. A step that does not fit is
            simulated all the same: `score.is_feasible` tells.
        decision_class: The class that the decisions are from.
        min_size_bytes: Smaller buffers have no gaps.
        options: How the runtime behaves.

    Raises:
        PlanError: The trace is empty, or a decision names a buffer that cannot leave.
    """
    problem = PlanningProblem.of(
        trace, machine, decision_class=decision_class, min_size_bytes=min_size_bytes, options=options
    )
    budget_bytes = machine.memory_bytes if budget_bytes is None else budget_bytes
    return problem.simulation(problem.codes(decisions), budget_bytes)


def schedule(
    trace: Trace,
    machine: Machine,
    decisions: Iterable[Decision] = (),
    *,
    budget_bytes: int | None = None,
    decision_class: DecisionClass = "saved",
    options: Options | None = None,
) -> Plan:
    """Return the plan that `simulate` executes: the moments are decided. `plan.validate` tells whether it fits."""
    found = simulate(
        trace, machine, decisions, budget_bytes=budget_bytes, decision_class=decision_class, options=options
    )
    return found.plan
