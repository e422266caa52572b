"""A finished plan in the simulator, whoever made it."""

from bisect import bisect_right

from torchdelta.machine.model import Machine
from torchdelta.plan.model import Plan
from torchdelta.simulate.execute import check_header, execute
from torchdelta.simulate.model import Decision, Options, Simulation
from torchdelta.simulate.problem import PlanningProblem
from torchdelta.trace.model import Trace, uses_of

__all__ = ["decisions_of", "simulate_plan"]


def simulate_plan(trace: Trace, machine: Machine, plan: Plan, *, options: Options | None = None) -> Simulation:
    """Return what a plan costs on a machine.

    Args:
        trace: A priced trace.
        machine: Where it runs.
        plan: A valid plan of that trace.
        options: None to execute the plan as it is written. Else its decisions alone are taken, and their moments are
            chosen anew for a runtime that behaves like this.

    Raises:
        PlanError: The plan belongs to another trace, or uses a gap that its class does not have.
    """
    if options is None:
        return execute(trace, machine, plan)
    check_header(trace, plan)
    header = plan.header
    problem = PlanningProblem.of(
        trace, machine, decision_class=header.decision_class, min_size_bytes=1, options=options
    )
    codes = problem.codes(decisions_of(trace, plan))
    return problem.simulation(codes, header.budget_bytes, planner=header.planner, effort=header.effort)


def decisions_of(trace: Trace, plan: Plan) -> tuple[Decision, ...]:
    """Return a plan's decisions: one for each gap in which it has absences, as if they took up the whole gap.

    A dropped buffer that a replay makes while it is away, and does not leave there, is one that frees itself again; so
    is one that leaves once more in the same gap. Where the absences of a gap differ the first one's action counts.
    """
    made_at: dict[int, list[int]] = {}
    for replay in plan.replays:
        for op in replay.ops:
            for id_ in trace.ops[op].writes:
                made_at.setdefault(id_, []).append(replay.at_op)
    uses = uses_of(trace)
    decisions: dict[tuple[int, int], Decision] = {}
    for absence in plan.absences:
        id_ = absence.buffer_id
        last_use_op = uses[id_][bisect_right(uses[id_], absence.last_use_op) - 1]
        decision = decisions.get((id_, last_use_op))
        decisions[id_, last_use_op] = Decision(
            buffer_id=id_,
            action=absence.action if decision is None else decision.action,
            tier=absence.tier if decision is None else decision.tier,
            last_use_op=last_use_op,
            stays_when_met=decision is None
            and not any(absence.leave_op <= at_op < absence.return_op for at_op in made_at.get(id_, ())),
        )
    return tuple(decisions.values())
