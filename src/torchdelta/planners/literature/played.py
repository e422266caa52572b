"""The plan that a play ends with: under which limit it is played, and the error where no limit helps."""

from collections.abc import Callable

import msgspec

from torchdelta.errors import PlanError
from torchdelta.machine.model import Machine
from torchdelta.plan.model import Plan
from torchdelta.planners.feasible_plan import accepted
from torchdelta.planners.literature.online import NoCandidateError, Play
from torchdelta.planners.literature.online_policy import Policy
from torchdelta.planners.literature.played_step import PlayedStep
from torchdelta.planners.registry import Effort
from torchdelta.simulate.execute import execute
from torchdelta.simulate.model import Simulation
from torchdelta.trace.model import Trace, peak

__all__ = ["PlayedPlanner"]

_ROUNDS = 10
_ROUNDS_FOR_ERROR = 4


class PlayedPlanner(msgspec.Struct, frozen=True, kw_only=True):
    """A planner that is an online policy, played.

    Attributes:
        name: The planner's.
        policy: Makes the policy of one play.
        soft: Whether it evicts after each op and not before it.
        synchronous: Whether compute waits for every copy as soon as it is queued.
    """

    name: str
    policy: Callable[[PlayedStep, Machine], Policy]
    soft: bool = False
    synchronous: bool = False

    def plan(self, trace: Trace, machine: Machine, budget_bytes: int, effort: Effort = "fast") -> Plan:  # noqa: ARG002
        """Return what was played.

        Raises:
            InfeasibleError: Nothing was left to evict, or no limit was found at which the peak is within the budget.
            PlanError: The trace has no ops.
        """
        if not trace.ops:
            raise PlanError("the trace has no ops, so there is nothing to plan")
        step = PlayedStep(trace)

        def play(limit_bytes: int) -> Simulation | None:
            policy = self.policy(step, machine)
            played = Play(step, machine, limit_bytes, policy, soft=self.soft, synchronous=self.synchronous)
            try:
                program = played.run()
            except NoCandidateError:
                return None
            plan = program.plan(machine, budget_bytes, self.name, synchronous=self.synchronous)
            return execute(trace, machine, plan)

        plain_bytes = peak(trace, with_workspace=True).size_bytes
        if plain_bytes <= budget_bytes:
            found = play(plain_bytes)
        elif self.soft:
            found = _largest_limit(play, budget_bytes)
        else:
            found = play(budget_bytes) or _least_limit(play, budget_bytes, plain_bytes)
        if found is None:
            raise AssertionError("a play under the plain peak has nothing to evict")
        return accepted(found, trace, self.name)


_PlayUnder = Callable[[int], Simulation | None]


def _least_limit(play: _PlayUnder, low_bytes: int, high_bytes: int) -> Simulation | None:
    """Play under the least limit at which something is always left to evict, for the error to name it."""
    found = play(high_bytes)
    for _ in range(_ROUNDS_FOR_ERROR):
        middle_bytes = (low_bytes + high_bytes) // 2
        played = play(middle_bytes)
        if played is None:
            low_bytes = middle_bytes
        else:
            found, high_bytes = played, middle_bytes
    return found


def _largest_limit(play: _PlayUnder, budget_bytes: int) -> Simulation | None:
    """Play under the largest limit at which the peak, which passes the limit, is within the budget."""
    low_bytes, high_bytes = 0, budget_bytes
    best: Simulation | None = None
    limit_bytes = budget_bytes
    for _ in range(_ROUNDS):
        played = play(limit_bytes)
        if played is None:
            break
        if best is None or played.score.excess_bytes <= best.score.excess_bytes:
            best = played
        if played.score.excess_bytes == 0:
            low_bytes = limit_bytes
        else:
            high_bytes = limit_bytes
        limit_bytes = (low_bytes + high_bytes) // 2
    return best
