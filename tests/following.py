"""Following a plan without waiting for it: steps are planned in this process, or get a drawn program that nobody needs.

The helper process takes seconds to start, and a small step would never be followed, because nothing of it has to leave.
Inside `planned_here` a session plans at once, in this process; `follow_anyway` asks for a program though nothing has
left yet. A drawn program (`drawn_plan`) says of every saved buffer that it leaves, in one way or the other, at moments
that no planner would choose: following promises the plain bits whatever the program is.
"""

from __future__ import annotations

import contextlib
import functools
import random
import threading
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from unittest import mock

from tests.runtime.parts import running_session
from tests.same_bits.judge import differences, leaks, plain_outcome, run, tracked_bytes
from torchdelta import Config, MemoryBudget
from torchdelta.errors import TorchdeltaError
from torchdelta.plan.model import Absence, Plan, PlanHeader
from torchdelta.plan.request import Answer
from torchdelta.planners.registry import get
from torchdelta.runtime.follow.planning import Planned
from torchdelta.runtime.state.contents import WRAPPED_NUMBER_BYTES
from torchdelta.simulate.gaps import find_gaps
from torchdelta.simulate.problem import PlanningProblem

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from tests.same_bits.judge import Outcome, Step
    from torchdelta.machine.model import Machine
    from torchdelta.plan.model import DecisionClass
    from torchdelta.runtime.session import Session
    from torchdelta.simulate.gaps import Gap
    from torchdelta.trace.model import Trace

    Choose = Callable[[Trace, Machine, int], Plan]

UNLIMITED_BYTES = 2**40
UNLIMITED = f"{UNLIMITED_BYTES // 2**40}TiB"
# Reactive, traced, followed and watched, followed, one that teaches the outline, recorded in part, and once more
# without being watched, and then on the native tape.
NUM_STEPS = 8
_LEAVING_SHARE = 0.8


class PlanningHere:
    """Stands in for `follow.planning.Planning`: answers at once, in this process. Mutable.

    Args:
        config: Names the planner.
        choose: What plans instead of it.
    """

    def __init__(self, config: Config, choose: Choose | None = None) -> None:
        self.config = config
        self.choose = choose
        self.is_given_up = False
        self.errors: list[str] = []
        self._answers: list[Planned] = []

    def __len__(self) -> int:
        """Return how many answers were not fetched yet."""
        return len(self._answers)

    def ask(self, key: Any, trace: Trace, machine: Machine, budget_bytes: int) -> None:
        """Plan a step."""
        try:
            if self.choose is not None:
                plan = self.choose(trace, machine, budget_bytes)
            else:
                assert self.config.planner is not None
                decision_class = "persistent" if self.config.decision_class == "all" else "saved"
                plan = get(self.config.planner, decision_class)(trace, machine, budget_bytes, "fast")
        except TorchdeltaError as error:
            self.errors.append(str(error))
            self._answers.append(Planned(key=key, plan=None, answer=Answer(error=str(error))))
        else:
            self._answers.append(Planned(key=key, plan=plan, answer=Answer()))

    def poll(self, timeout_s: float = 0.0) -> Planned | None:
        """Return an answer if there is one."""
        del timeout_s
        return self._answers.pop(0) if self._answers else None

    def close(self) -> None:
        """Forget what was asked."""
        self._answers.clear()

    def leave_child(self) -> None:
        """Plan nothing in a forked child, as the helper does."""
        self._answers.clear()
        self.is_given_up = True


@contextlib.contextmanager
def planned_here(choose: Choose | None = None, *, least_bytes: int | None = None) -> Iterator[None]:
    """Let the sessions that are made inside plan at once.

    Args:
        choose: Plans in the place of the planner of the configuration.
        least_bytes: Buffers of so many bytes may leave already, whoever plans.
    """
    plain_of = PlanningProblem.of
    with contextlib.ExitStack() as stack:
        stack.enter_context(
            mock.patch("torchdelta.runtime.follow.programs.Planning", lambda config: PlanningHere(config, choose))
        )
        if least_bytes is not None:
            stack.enter_context(mock.patch("torchdelta.runtime.session.LEAST_EVICTION_BYTES", least_bytes))
            of = functools.partial(plain_of, min_size_bytes=least_bytes)
            stack.enter_context(mock.patch.object(PlanningProblem, "of", of))
        yield


def follow_anyway(session: Session) -> None:
    """Have the next step traced as if a buffer had left already."""
    session.counters.num_evictions += 1


@contextlib.contextmanager
def following_drawn(seed: int = 0, budget: int | str = UNLIMITED, **options: Any) -> Iterator[MemoryBudget]:
    """Open a budget that carries a drawn program out from the third step on. Swapped bytes stay in memory by default.

    Args:
        seed: Of the draw.
        budget: The budget; by default no limit, so that nothing leaves but by the program.
        options: Of the configuration.
    """
    options = {"tier": "memory", "planner": "torchdelta"} | options
    decision_class: DecisionClass = "persistent" if options.get("decision_class") == "all" else "saved"
    with (
        planned_here(lambda trace, _machine, _budget_bytes: drawn_plan(trace, seed, decision_class), least_bytes=0),
        mock.patch("torchdelta.runtime.memory.candidates.LEAST_BYTES", WRAPPED_NUMBER_BYTES + 1),
        MemoryBudget(budget, Config(**options)) as memory_budget,
    ):
        follow_anyway(running_session())
        running_session().pause.forbid()  # in such a budget, steps would not be recorded at all
        yield memory_budget


def drawn_plan(trace: Trace, seed: int, decision_class: DecisionClass = "saved") -> Plan:
    """Return a program of a step in which nearly every buffer leaves that may, at drawn moments.

    It is not a valid plan: dropped buffers may be impossible to make again, and their replays are not in it. Following
    asks for neither.
    """
    rng = random.Random(seed)
    header = PlanHeader(
        planner="drawn", machine="", budget_bytes=0, num_ops=len(trace.ops), num_buffers=len(trace.buffers)
    )
    gaps = find_gaps(trace, decision_class=decision_class, min_size_bytes=1)
    actions = ("swap", "recompute") if seed % 2 else ("recompute",)  # without a swap more goes to the native tape
    leaving = [gap for gap in gaps if rng.random() < _LEAVING_SHARE]
    absences = (_absence(gap, rng, rng.choice(_actions_of(trace, gap, actions))) for gap in leaving)
    return Plan(header=header, absences=tuple(absences))


def _actions_of(trace: Trace, gap: Gap, actions: tuple[str, ...]) -> tuple[str, ...]:
    is_persistent = trace.buffers[gap.buffer_id].kind in {"parameter", "gradient", "optimizer_state"}
    return ("swap",) if is_persistent else actions


def _absence(gap: Gap, rng: random.Random, action: str) -> Absence:
    last_op, next_op = gap.last_use_op, gap.next_use_op
    leave_op = rng.randint(last_op + 1, max(last_op + 1, next_op))
    return Absence(
        buffer_id=gap.buffer_id,
        last_use_op=last_op,
        next_use_op=next_op,
        action=action,
        out_op=rng.choice((None, rng.randint(last_op, leave_op))),
        leave_op=leave_op,
        return_op=rng.choice((next_op, rng.randint(leave_op, max(leave_op, next_op)))),
    )


def judge_followed(step: Step, plain: Outcome, seed: int = 0) -> list[str]:
    """Name everything in which a step differs from the plain one when it is repeated inside one scope and followed.

    The scope is around all repetitions, which begin with the same seeds: a step that opens it itself is one step only.
    """
    found, after = _followed(step, plain, seed)
    if leaks(plain, after):  # a cache that fills once is no leak
        again = _followed(step, plain, seed)[1]
        found += leaks(after, again)
    return found


def judge_all_followed(named_steps: Iterable[tuple[str, Step]]) -> tuple[dict[str, list[str]], int]:
    """Judge steps that are repeated and carry a drawn program out.

    Returns:
        The first differences by name, and the number of steps that plain finished; the others are not judged.
    """
    found: dict[str, list[str]] = {}
    num_finished = 0
    for name, step in named_steps:
        plain = plain_outcome(step)
        if plain.raised is not None:
            continue
        num_finished += 1
        differences = judge_followed(step, plain, seed=num_finished)
        if differences:
            found[name] = differences[:2]
    return found, num_finished


def _followed(step: Step, plain: Outcome, seed: int) -> tuple[list[str], Outcome]:
    """Return the differences of all repetitions, and what was left after them."""
    found: list[str] = []
    with following_drawn(seed):
        for index in range(NUM_STEPS):
            outcome = run(step)
            found += [f"repetition {index}: {d}" for d in differences(plain, outcome) if not d.endswith("leaked")]
    return found, replace(outcome, tracked_bytes=tracked_bytes(), num_threads=threading.active_count())


@contextlib.contextmanager
def planned_soon(*, least_bytes: int | None = None, slower: float = 1e9) -> Iterator[None]:
    """Let the planner "auto" begin after two steps that reacted, and plan at once, in this process.

    Args:
        least_bytes: As of `planned_here`.
        slower: From which multiple of the time of reacting steps on a plan is given up; by default never.
    """
    with (
        mock.patch.multiple(
            "torchdelta.runtime.follow.automatic", PLAN_COST_S=1e-9, FEWEST_TIMED=2, _NUM_TIMES=3, _SLOWER=slower
        ),
        planned_here(least_bytes=least_bytes),
    ):
        yield
