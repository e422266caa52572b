"""Training in less memory than parameters, gradients and optimizer states take: the decision class "all".

Each model trains with AdamW. The *persistent* bytes are those of its parameters, gradients and states. Budgets are
shares of them, and hold the activations, too. Plain steps, steps that follow a plan, steps that react, and steps that
react and in which nothing moves beside the compute take turns in one process. Three more processes train a few steps
each, one of them plain, one with a plan: all must end with the same bits. The *named* budget is the least one that a
`BudgetError` names in a budget that is far too small; it is tried, too.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import statistics
from dataclasses import asdict
from typing import Any
from unittest import mock

import torch

from benchmarks import bits, models
from benchmarks.disk import measure_disk
from benchmarks.launch import run_worker
from benchmarks.outcome import Outcome, format_table
from benchmarks.settling import PLAN_WAIT_S, settle
from benchmarks.turns import PLAIN, Block, Interval, median_interval, ratios, take_turns, timed_steps

FOLLOWED, REACTING, AT_USE = "followed", "reacting", "at use"
CONTENDERS = (PLAIN, FOLLOWED, REACTING, AT_USE)
PLANNER = "torchdelta"
SHARES = (0.9, 0.7, 0.5)
NUM_WARM, NUM_TIMED, NUM_CHECKED = 4, 4, 6
NUM_BEFORE_PLAN = 3  # steps before a plan is waited for
TOO_SMALL = 50  # the persistent bytes over a budget in which nothing trains
MIB = 2**20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this benchmark's own options."""
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--named", action=argparse.BooleanOptionalAction, default=True, help="try named budgets")
    parser.add_argument(
        "--shares", type=float, nargs="*", default=list(SHARES), help="budgets / persistent bytes, beside the named one"
    )


def run(options: argparse.Namespace) -> Outcome:
    """Measure each model in each budget."""
    outcome = Outcome(disk=measure_disk())
    chosen = [name for name in options.models if name != "resnet50"]
    if options.quick:
        options.rounds, chosen, options.shares = 1, ["tiny"], [0.7]
    if options.named:
        named = [_measure_named(outcome, name, options) for name in chosen]
        print("\n" + format_table(["model", "named budget MiB", "of persistent", "peak"], named))
    rows = [row for name in chosen for share in options.shares for row in _measure(outcome, name, share, options)]
    header = ["model", "budget MiB", "of persistent", "followed / plain", "reacting / plain", "read at use / plain"]
    header += ["predicted / measured time", "waits of a step", "peak"]
    if rows:
        print("\n" + format_table(header, rows))
    return outcome


def _measure_named(outcome: Outcome, model: str, options: argparse.Namespace) -> list[str]:
    """Have a budget named, and train in it."""
    common: dict[str, Any] = {"threads": options.threads, "timeout_s": options.timeout, "model": model}
    found = run_worker("everything:name_budget", **common)
    share = found["named_bytes"] / found["persistent_bytes"]
    plain = run_worker("everything:train", in_budget=False, share=share, **common)
    trained = run_worker("everything:train", in_budget=True, share=share, **common)
    label = f"{model} named"
    outcome.data[label] = found | {"bits": [plain, trained], "named_share": share}
    outcome.check(f"{label}: below what persists", f"{share:.3f} of it", passed=share < 1)
    is_same = all(plain[key] == trained[key] for key in ("state", "optimizer"))
    outcome.check(f"{label}: trains with the same bits", trained["refused"] or trained["state"][:12], passed=is_same)
    peak = max(trained["peaks_bytes"][1:], default=0) / found["named_bytes"]
    outcome.check(f"{label}: peak after the first step", f"{peak:.4f} of the budget", passed=peak <= 1)
    return [model, f"{found['named_bytes'] / MIB:.0f}", f"{share:.1%}", f"{peak:.4f}"]


def _measure(outcome: Outcome, model: str, share: float, options: argparse.Namespace) -> list[list[str]]:
    common: dict[str, Any] = {"threads": options.threads, "timeout_s": options.timeout, "model": model, "share": share}
    found = run_worker("everything:train_in_turns", num_rounds=options.rounds, **common)
    ways = ({"in_budget": False}, {"in_budget": True}, {"in_budget": True, "planner": PLANNER})
    digests = [run_worker("everything:train", **way, **common) for way in ways]
    label = f"{model} {share:.0%}"
    outcome.data[label] = found | {"budget_share": share, "bits": digests}
    for name, digest in zip(("reacting", "followed"), digests[1:], strict=True):
        is_same = all(digests[0][key] == digest[key] for key in ("state", "optimizer"))
        outcome.check(f"{label}: same bits, {name}", digest["refused"] or digest["state"][:12], passed=is_same)
    num_followed = digests[2]["num_followed"]
    outcome.check(f"{label}: a plan is followed", f"{num_followed} of {NUM_CHECKED} steps", passed=num_followed > 0)
    if found["refused"]:
        outcome.check(f"{label}: trains", found["refused"], passed=False, required=False)
        return []
    peak = max(found["peaks_bytes"]) / found["budget_bytes"]
    outcome.check(f"{label}: peak after the first step", f"{peak:.4f} of the budget", passed=peak <= 1)
    summary = summarize(found["rounds"])
    outcome.data[label]["summary"] = {name: asdict(interval) for name, interval in summary.items()}
    gain, planned = summary["reacting over at use"], summary["followed over reacting"]
    outcome.check(f"{label}: reading ahead is not slower", str(gain), passed=gain.median <= 1)
    outcome.check(f"{label}: a plan is not slower than reacting", str(planned), passed=planned.median <= 1)
    predicted = summary["predicted over measured"].median
    outcome.check(f"{label}: predicted time", f"{predicted:.3f} of the measured one", passed=abs(predicted - 1) <= 0.1)
    size, waits = f"{found['budget_bytes'] / MIB:.0f}", f"{summary['waits'].median:.1%}"
    steps = [str(summary[name]) for name in CONTENDERS[1:]]
    return [[model, size, f"{share:.0%}", *steps, f"{predicted:.3f}", waits, f"{peak:.4f}"]]


def summarize(rounds: list[dict[str, Block]]) -> dict[str, Interval]:
    """Return step times over plain's and over those of other ways, and the share of a planned step that waits."""
    return {
        FOLLOWED: median_interval(ratios(rounds, FOLLOWED, num_warm_steps=0)),
        REACTING: median_interval(ratios(rounds, REACTING, num_warm_steps=0)),
        AT_USE: median_interval(ratios(rounds, AT_USE, num_warm_steps=0)),
        "reacting over at use": median_interval(ratios(rounds, REACTING, AT_USE, num_warm_steps=0)),
        "followed over reacting": median_interval(ratios(rounds, FOLLOWED, REACTING, num_warm_steps=0)),
        "waits": median_interval([blocks[FOLLOWED]["stall_share"] for blocks in rounds]),
        "predicted over measured": median_interval([_predicted_over_measured(blocks[FOLLOWED]) for blocks in rounds]),
    }


def _predicted_over_measured(block: Block) -> float:
    return block["predicted_s"] / statistics.median(block["times_s"])


def _build(model: str) -> tuple[models.Workload, torch.optim.Optimizer, int]:
    """Return a workload, its optimizer and its persistent bytes."""
    workload = models.build(model)
    sizes = [parameter.nbytes for parameter in workload.model.parameters()]
    return workload, models.build_optimizer("adamw", workload.model), 4 * sum(sizes)


def train_in_turns(model: str, share: float, num_rounds: int) -> dict[str, Any]:
    """Train in turns, as a worker."""
    from torchdelta import Config, MemoryBudget
    from torchdelta.runtime.current import current_session
    from torchdelta.runtime.memory.read_ahead import ReadAhead

    workload, optimizer, persistent_bytes = _build(model)
    budget_bytes = int(share * persistent_bytes)
    found: dict[str, Any] = {"budget_bytes": budget_bytes, "refused": "", "peaks_bytes": []}

    def step() -> None:
        workload.train(optimizer)

    def run_block(name: str) -> Block | None:
        gc.collect()
        if name == PLAIN:
            step()
            return timed_steps(step, NUM_TIMED)
        off = mock.patch.object(ReadAhead, "look") if name == AT_USE else contextlib.nullcontext()
        try:
            config = Config(decision_class="all", planner=PLANNER if name == FOLLOWED else None)
            with off, MemoryBudget(budget_bytes, config) as budget:
                if name == FOLLOWED:
                    timed_steps(step, NUM_BEFORE_PLAN)
                    session: Any = current_session()
                    session.programs.wait(PLAN_WAIT_S)
                    settle(session.programs, step)
                else:
                    timed_steps(step, NUM_WARM)
                block = timed_steps(step, NUM_TIMED)
        except torch.OutOfMemoryError as error:
            found["refused"] = str(error)
            return None
        steps = budget.summary().steps
        found["peaks_bytes"] += [each.peak_bytes for each in steps[1:]]
        timed = steps[-NUM_TIMED:]
        shares = {
            "stall_share": sum(each.stall_s for each in timed) / sum(each.time_s for each in timed),
            "recompute_share": sum(each.recompute_s for each in timed) / sum(each.time_s for each in timed),
            "swapped_out_bytes": sum(each.swapped_out_bytes for each in timed) // NUM_TIMED,
        }
        follow = budget.summary().follow
        if follow is not None:
            last = steps[-1].plan
            shares |= {
                "num_unplanned": follow.num_unplanned,
                "plan": last,
                "predicted_s": follow.predicted_time_s or 0.0,
            }
        return block | shares

    step()
    found["rounds"] = take_turns(CONTENDERS, num_rounds, run_block)
    return found


def name_budget(model: str) -> dict[str, int]:
    """Return the budget that a `BudgetError` names in one that is far too small, as a worker."""
    from torchdelta import BudgetError, Config, MemoryBudget

    workload, optimizer, persistent_bytes = _build(model)
    too_small_bytes = persistent_bytes // TOO_SMALL
    try:
        with MemoryBudget(too_small_bytes, Config(decision_class="all")):
            workload.train(optimizer)
    except BudgetError as error:
        return {"named_bytes": error.least_budget_bytes, "persistent_bytes": persistent_bytes}
    raise AssertionError(f"{model} trains in {too_small_bytes} bytes")


def train(model: str, share: float, *, in_budget: bool, planner: str | None = None) -> dict[str, Any]:
    """Train a few steps, as a worker. Return the fingerprints of what they end with, and the peaks in a budget."""
    workload, optimizer, persistent_bytes = _build(model)
    scope: Any = contextlib.nullcontext()
    if in_budget:
        from torchdelta import Config, MemoryBudget
        from torchdelta.runtime.current import current_session

        scope = MemoryBudget(int(share * persistent_bytes), Config(decision_class="all", planner=planner))
    models.seed_everything(1)
    refused = ""
    try:
        with scope:
            for index in range(NUM_CHECKED):
                workload.train(optimizer)
                if planner is not None and index == NUM_BEFORE_PLAN - 1:
                    current_session().programs.wait(PLAN_WAIT_S)  # pyright: ignore[reportOptionalMemberAccess]
    except torch.OutOfMemoryError as error:
        refused = str(error).partition("\n")[0]
    follow = scope.summary().follow if in_budget else None
    return {
        "num_followed": follow.num_followed_steps if follow is not None else 0,
        "state": bits.state_digest(workload.model),
        "optimizer": bits.digest(_states(optimizer)),
        "refused": refused,
        "peaks_bytes": [step.peak_bytes for step in scope.summary().steps] if in_budget else [],
    }


def _states(optimizer: torch.optim.Optimizer) -> list[tuple[str, torch.Tensor]]:
    found = optimizer.state_dict()["state"]
    return [
        (f"{index}.{name}", state)
        for index, states in found.items()
        for name, state in states.items()
        if isinstance(state, torch.Tensor)
    ]
