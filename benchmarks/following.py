"""Step times of followed plans beside the reactive policy, recording alone and torch's checkpointing.

One process for each model and budget, in which plain and all others take turns (see `turns`). A followed block traces
its second step, waits for its plan and runs one watched step before its time counts, as a run of many steps would.
Where the model has torch's checkpointing, one budget is the peak that it was measured with. Checked: followed steps
stay inside the budget, and cost no more than reactive ones.
"""

from __future__ import annotations

import contextlib
import gc
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from benchmarks.launch import run_worker
from benchmarks.outcome import Outcome, format_table
from benchmarks.turns import PLAIN, median_interval, ratios, take_turns, timed_steps

if TYPE_CHECKING:
    import argparse
    from collections.abc import Generator

    from benchmarks.models import Workload
    from benchmarks.turns import Block

SHARES = (0.8, 0.6, 0.5, 0.4)
CHECKPOINT, RECORD_ONLY, REACTIVE, FOLLOWED = "checkpoint", "record-only", "reactive", "followed"
CONTEST_TIMEOUT_S = 3600
PLAN_WAIT_S = 300.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this benchmark's own options."""
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--shares", nargs="+", type=float, default=list(SHARES), help="of the plain peak")
    parser.add_argument("--planner", default="torchdelta")


def run(options: argparse.Namespace) -> Outcome:
    """Measure every model and budget asked for."""
    outcome = Outcome()
    rows: list[list[str]] = []
    for model in options.models:
        peaks = run_worker("following:peaks", threads=options.threads, model=model)
        data: dict[str, Any] = {**peaks}
        outcome.data[model] = data
        budgets = {f"{share:.0%}": int(share * peaks["plain_peak_bytes"]) for share in options.shares}
        if peaks["checkpoint_peak_bytes"] is not None:
            budgets[f"checkpoint {peaks['checkpoint_peak_bytes'] / peaks['plain_peak_bytes']:.1%}"] = peaks[
                "checkpoint_peak_bytes"
            ]
        for label, budget_bytes in budgets.items():
            contest = run_worker(
                "following:contest",
                threads=options.threads,
                timeout_s=CONTEST_TIMEOUT_S,
                model=model,
                budget_bytes=budget_bytes,
                planner=options.planner,
                num_rounds=2 if options.quick else options.rounds,
            )
            data[label] = contest
            rows.append(_judge(outcome, f"{model} {label}", contest, budget_bytes))
    header = ["model, budget", RECORD_ONLY, REACTIVE, FOLLOWED, CHECKPOINT, "followed of reactive", "peak of budget"]
    print("\n" + format_table(header, rows))
    return outcome


def _judge(outcome: Outcome, label: str, contest: dict[str, Any], budget_bytes: int) -> list[str]:
    """Check one contest, add its intervals to the raw data, and return its row of the table."""
    contest["intervals"] = {}
    cells = [label]
    for name in (RECORD_ONLY, REACTIVE, FOLLOWED, CHECKPOINT):
        samples = ratios(contest["rounds"], name)
        interval = median_interval(samples) if samples else None
        contest["intervals"][name] = asdict(interval) if interval else None
        cells.append(str(interval) if interval else "-")
    blocks = [blocks[FOLLOWED] for blocks in contest["rounds"] if FOLLOWED in blocks]
    if not blocks:
        outcome.check(f"{label}: followed", str(contest["refused"].get(FOLLOWED)), passed=False)
        return [*cells, "-", "-"]
    peak_share = max(block["peak_bytes"] for block in blocks) / budget_bytes
    num_followed = sum(block["num_followed_steps"] for block in blocks)
    outcome.check(f"{label}: peak of followed steps", f"{peak_share:.4f} of the budget", passed=peak_share <= 1)
    outcome.check(
        f"{label}: steps with room made beyond the plan",
        f"{sum(block['num_unplanned'] > 0 for block in blocks)} of {len(blocks)} blocks, {num_followed} followed steps",
        passed=all(block["num_unplanned"] == 0 for block in blocks),
        required=False,
    )
    samples = ratios(contest["rounds"], FOLLOWED, REACTIVE)
    if not samples:
        return [*cells, "-", f"{peak_share:.4f}"]
    against = median_interval(samples)
    outcome.check(f"{label}: followed against reactive", str(against), passed=against.median <= 1)
    return [*cells, str(against), f"{peak_share:.4f}"]


def peaks(model: str) -> dict[str, int | None]:
    """Return the peaks of steps in which nothing leaves, plain and checkpointed, as a worker."""
    from benchmarks import models
    from torchdelta import MemoryBudget

    found: dict[str, int | None] = {"plain_peak_bytes": None, "checkpoint_peak_bytes": None}
    workload = models.build(model)
    optimizer = models.build_optimizer("sgd", workload.model)
    for key, is_checkpointed in (("plain_peak_bytes", False), ("checkpoint_peak_bytes", True)):
        if is_checkpointed and not hasattr(workload.model, "gradient_checkpointing_enable"):
            continue
        with _checkpointing(workload, is_on=is_checkpointed), MemoryBudget("1TiB") as budget:
            for _ in range(3):
                workload.train(optimizer)
        found[key] = budget.summary().peak_bytes
    return found


@contextlib.contextmanager
def _checkpointing(workload: Workload, *, is_on: bool) -> Generator[None]:
    model: Any = workload.model
    if is_on:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    try:
        yield
    finally:
        if is_on:
            model.gradient_checkpointing_disable()


def contest(
    model: str, budget_bytes: int, planner: str = "torchdelta", num_rounds: int = 5, num_steps: int = 4
) -> dict[str, Any]:
    """Train one model in turns, as a worker."""
    import torch

    from benchmarks import models
    from torchdelta import Config, MemoryBudget
    from torchdelta.runtime.current import current_session

    workload = models.build(model)
    optimizer = models.build_optimizer("sgd", workload.model)
    refused: dict[str, str] = {}

    def train() -> object:
        return workload.train(optimizer)

    def follow() -> Block:
        with MemoryBudget(budget_bytes, Config(planner=planner)) as budget:
            train()
            train()
            session: Any = current_session()
            if not session.programs.wait(PLAN_WAIT_S):
                raise RuntimeError("there is no plan to follow")
            train()
            num_before = len(budget.summary().steps)
            block = timed_steps(train, num_steps)
            block["peak_bytes"] = max(step.peak_bytes for step in budget.summary().steps[num_before - 1 :])
            block["num_followed_steps"] = session.follower.num_followed_steps
            block["num_unplanned"] = session.counters.num_unplanned
        return block

    def run_block(name: str) -> Block | None:
        try:
            if name == FOLLOWED:
                return follow()
            scope: Any = contextlib.nullcontext()
            if name in (RECORD_ONLY, REACTIVE):
                scope = MemoryBudget(1 << 40 if name == RECORD_ONLY else budget_bytes)
            with _checkpointing(workload, is_on=name == CHECKPOINT), scope:
                return timed_steps(train, num_steps)
        except (torch.OutOfMemoryError, RuntimeError) as error:
            refused[name] = str(error)
        optimizer.zero_grad()
        gc.collect()
        return None

    contenders = [PLAIN, RECORD_ONLY, REACTIVE, FOLLOWED]
    if hasattr(workload.model, "gradient_checkpointing_enable"):
        contenders.append(CHECKPOINT)
    timed_steps(train, num_steps)
    return {"rounds": take_turns(contenders, num_rounds, run_block), "refused": refused}
