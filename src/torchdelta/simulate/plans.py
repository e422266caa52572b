"""A finished plan in the simulator, whoever made it."""

from torchdelta.errors import PlanError
from torchdelta.machine.model import Machine
from torchdelta.plan.model import Plan
from torchdelta.simulate.model import Decision, Options, Simulation
from torchdelta.simulate.problem import Problem
from torchdelta.trace.model import Trace

__all__ = ["decisions_of", "simulate_plan"]


def simulate_plan(trace: Trace, machine: Machine, plan: Plan, *, options: Options | None = None) -> Simulation:
    """Return what a plan costs on a machine.

    The simulator takes from the plan who leaves in which gap, and how, and finds the moments itself: on the machine
    that the plan was made for, and with the options of then, they are the plan's.

    Args:
        trace: A priced trace.
        machine: Where it runs.
        plan: A valid plan of that trace.
        options: How the runtime behaves.

    Raises:
        PlanError: The plan belongs to another trace, or uses a gap that its class does not have.
    """
    header = plan.header
    if (header.num_ops, header.num_buffers) != (len(trace.ops), len(trace.buffers)):
        raise PlanError(
            f"the plan belongs to another trace: it has {header.num_ops} ops and {header.num_buffers} buffers, this "
            f"one {len(trace.ops)} and {len(trace.buffers)}"
        )
    problem = Problem.of(
        trace, machine, decision_class=header.decision_class, min_size_bytes=1, options=options or Options()
    )
    codes = problem.codes(decisions_of(trace, plan))
    return problem.simulation(codes, header.budget_bytes, planner=header.planner, effort=header.effort)


def decisions_of(trace: Trace, plan: Plan) -> tuple[Decision, ...]:
    """Return a plan's decisions: one an absence.

    A dropped buffer that a replay makes while it is away, and does not leave there, is one that frees itself again.
    """
    made_at: dict[int, list[int]] = {}
    for replay in plan.replays:
        for op in replay.ops:
            for id_ in trace.ops[op].writes:
                made_at.setdefault(id_, []).append(replay.at_op)
    return tuple(
        Decision(
            buffer_id=absence.buffer_id,
            action=absence.action,
            tier=absence.tier,
            last_use_op=absence.last_use_op,
            stays_when_met=not any(
                absence.leave_op <= at_op < absence.return_op for at_op in made_at.get(absence.buffer_id, ())
            ),
        )
        for absence in plan.absences
    )
