"""Trains one model in turns, as a worker: the peaks of those without a budget, then one round of all.

A followed block traces its second step, waits for its plan and runs some followed steps before its time counts, as a
run of many steps would: the first ones are watched, and recorded as a whole, and then the time of a step is compared
with its prediction. If the step is planned again, as many more steps run. The other contenders, which learn nothing,
also run some steps first: a disk, for one, is slower where a file is written for the first time. A block without
prefetch carries out the same plan, but for its swap-ins: each begins when its tensor is used. So the followed block of
the same budget runs before it, whatever order was drawn. Each measured step is followed by a plain one in a second
process.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import statistics
from typing import TYPE_CHECKING, Any

import torch

from benchmarks import models
from benchmarks.following.contenders import FOLLOWED, NO_PREFETCH, PEERS, RECORD_ONLY, in_budget, scope, split
from benchmarks.plain_process import PlainProcess
from benchmarks.settling import NUM_SETTLING_STEPS, PLAN_WAIT_S, settle
from benchmarks.turns import PLAIN, take_turns, timed_steps
from torchdelta import Config, MemoryBudget
from torchdelta.bounds.lp_bound import bound
from torchdelta.errors import PlanError
from torchdelta.planners.registry import classes_of
from torchdelta.runtime.current import current_session
from torchdelta.runtime.follow.program import Program

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.turns import Block

UNBOUNDED_BYTES = 1 << 40


def peaks(model: str, optimizer: str, contenders: Sequence[str] = (PLAIN, *PEERS)) -> dict[str, int]:
    """Return the peaks, counted at the allocator, of steps in which we let nothing leave."""
    workload = models.build(model)
    built_optimizer = models.build_optimizer(optimizer, workload.model)
    workload.train(built_optimizer)  # makes the optimizer's states
    found: dict[str, int] = {}
    for name in contenders:
        with MemoryBudget(UNBOUNDED_BYTES) as budget, scope(name, workload.model):
            for _ in range(2):
                workload.train(built_optimizer)
        found[name] = budget.summary().peak_bytes
        gc.collect()
    return found


def contest(
    model: str,
    optimizer: str,
    contenders: list[str],
    budgets: dict[str, int],
    planner: str = "torchdelta",
    seed: int = 0,
    num_steps: int = 7,
    *,
    with_bound: bool = False,
) -> dict[str, Any]:
    """Run one round: a block of steps of each contender, in an order drawn from the seed."""
    with PlainProcess(model, optimizer) as plain:
        race = Race(model, optimizer, budgets, planner, num_steps, plain)
        timed_steps(race.train, num_steps)
        (blocks,) = take_turns(contenders, 1, race.run_in_order, seed)
    return {"blocks": blocks, "refused": race.refused, "bounds": race.bounds() if with_bound else {}}


class Race:
    """One model with its budgets, by label."""

    def __init__(
        self, model: str, optimizer: str, budgets: dict[str, int], planner: str, num_steps: int, plain: PlainProcess
    ) -> None:
        self.workload = models.build(model)
        self.optimizer = models.build_optimizer(optimizer, self.workload.model)
        self.budgets = budgets
        self.planner = planner
        self.num_steps = num_steps
        self.plain = plain
        self.refused: dict[str, dict[str, Any]] = {}
        self._programs: dict[str, Program] = {}
        self._followed: set[str] = set()  # budgets whose followed block has run
        self._run_early: dict[str, Block | None] = {}  # such blocks, until their turn comes
        self._measured: dict[str, tuple[Any, Any, int]] = {}  # by label: trace, machine, bytes for known storages

    def train(self) -> None:
        """Run one step."""
        self.workload.train(self.optimizer)

    def timed_pairs(self) -> Block:
        """Run the measured steps of a block, each with a plain one after it."""
        return self.plain.timed_pairs(self.train, self.num_steps)

    def run_in_order(self, contender: str) -> Block | None:
        """Run the block of one contender, and before it the block that it needs."""
        if contender in self._run_early:
            return self._run_early.pop(contender)
        name, label = split(contender)
        if name == NO_PREFETCH and label not in self._followed:
            followed = in_budget(FOLLOWED, label)
            self._run_early[followed] = self.run_block(followed)
        return self.run_block(contender)

    def run_block(self, contender: str) -> Block | None:
        """Run the block of one contender; None if it cannot train so."""
        name, label = split(contender)
        try:
            if name == FOLLOWED:
                self._followed.add(label)
                return self._follow(label)
            if name == NO_PREFETCH:
                return self._follow_without_prefetch(label)
            if label or name == RECORD_ONLY:
                with MemoryBudget(self.budgets[label] if label else UNBOUNDED_BYTES, Config(planner=None)) as budget:
                    self._settle()
                    block = self.timed_pairs()
                return block | _done(budget, self.num_steps)
            with scope(name, self.workload.model):
                self._settle()
                return self.timed_pairs()
        except (torch.OutOfMemoryError, RuntimeError) as error:
            self.refused[contender] = {
                "type": type(error).__name__,
                "message": str(error),
                "least_budget_bytes": getattr(error, "least_budget_bytes", None),
            }
        self.optimizer.zero_grad()
        gc.collect()
        return None

    def _settle(self) -> None:
        for _ in range(NUM_SETTLING_STEPS):
            self.train()

    def _follow(self, label: str) -> Block:
        with MemoryBudget(self.budgets[label], Config(planner=self.planner)) as budget:
            self.train()
            self.train()
            session: Any = current_session()
            programs = session.programs
            if not programs.wait(PLAN_WAIT_S) and session.counters.num_evictions:
                raise RuntimeError(programs.why_no_plan or "no plan was asked for")
            settled = settle(programs, self.train)
            program, trace = settled.program, settled.trace
            block = self.timed_pairs()
            block |= _done(budget, self.num_steps, settled.num_steps)
            block |= _followed(session)
            if program is not None and trace is not None:
                block["predicted"] = {
                    "time_s": program.predicted_time_s,
                    "plain_time_s": program.answer.plain_time_s + program.outside_s,
                    "peak_bytes": program.predicted_peak_bytes,
                }
                self._programs[label] = program
                machine = program.machine or programs.machine.now()
                self._measured[label] = trace, machine, self.budgets[label] - program.unseen_bytes
        return block

    def _follow_without_prefetch(self, label: str) -> Block:
        refused = self.refused.get(in_budget(FOLLOWED, label))
        if refused is not None:
            raise RuntimeError(f"no plan: {refused['message']}")
        program = self._programs.get(label)
        with MemoryBudget(self.budgets[label], Config(planner=None)) as budget:
            session: Any = current_session()
            if program is not None:
                session.follower.is_on = True
                session.follower.programs.add(without_fetches(program))
            self.train()
            self._settle()
            block = self.timed_pairs()
            return block | _done(budget, self.num_steps) | _followed(session)

    def bounds(self) -> dict[str, dict[str, Any]]:
        """Return the bound of what no plan can beat, on the measured trace, for each budget that was followed."""
        found: dict[str, dict[str, Any]] = {}
        if classes_of(self.planner)[0] != "saved":
            return found  # the bound is of the class *saved*
        for label, (trace, machine, known_bytes) in self._measured.items():
            with contextlib.suppress(PlanError):
                least = bound(trace, machine, known_bytes)
                times_s = {"time_s": least.time_s, "plain_time_s": least.plain_time_s}
                found[label] = {"feasible": least.feasible, **(times_s if least.feasible else {})}
        return found


def without_fetches(program: Program) -> Program:
    """Return a program whose swapped buffers are read only when they are used."""
    schedule = program.schedule
    due = {save: dataclasses.replace(each, fetches=[]) for save, each in schedule.due.items()}
    return Program(
        schedule=dataclasses.replace(schedule, due=due),
        key=program.key,
        start_bytes=program.start_bytes,
        answer=program.answer,
        step=None,
        margin_bytes=program.margin_bytes,
    )


def _done(budget: MemoryBudget, num_steps: int, num_settling: int = 0) -> dict[str, Any]:
    """Return what a block did in its last steps: the highest peak, settling steps included, and medians of the rest."""
    steps = budget.summary().steps
    peak_bytes = max(step.peak_bytes for step in steps[-num_steps - num_settling :])
    steps = steps[-num_steps:]
    fields = ("swapped_out_bytes", "recomputed_bytes", "stall_s", "recompute_s")
    medians = {name: statistics.median(getattr(step, name) for step in steps) for name in fields}
    return {"peak_bytes": peak_bytes, **medians}


def _followed(session: Any) -> dict[str, int]:
    return {
        "num_followed_steps": session.follower.num_followed_steps,
        "num_diverged_steps": session.follower.num_diverged_steps,
        "num_unplanned": session.counters.num_unplanned,
    }
