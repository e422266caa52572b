"""Runs the rounds of each model, and judges and prints what they gave."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from benchmarks import models
from benchmarks.disk import measure_disk
from benchmarks.following import compiled, report
from benchmarks.following.contenders import (
    CONTENDERS,
    IN_BUDGET,
    NO_PREFETCH,
    PEERS,
    RECORD_ONLY,
    in_budget,
)
from benchmarks.following.judge import judge
from benchmarks.launch import run_worker
from benchmarks.outcome import Outcome
from benchmarks.results import RESULTS
from benchmarks.turns import PLAIN

if TYPE_CHECKING:
    import argparse

MODELS = ("gpt2-like", "bert-like", "resnet50", "gpt2-small-batch-4", "bert-base")
OPTIMIZERS = dict.fromkeys(
    ("gpt2-small", "gpt2-small-batch-4", "bert-base"), "adamw"
)  # the others: SGD, without states
SHARES = (0.8, 0.6, 0.5, 0.4)
# A step of a large model takes seconds, and its parameters, gradients and states, which stay, are most of the memory.
LARGE_SHARES = {"gpt2-small": (0.9,), "gpt2-small-batch-4": (0.8,), "bert-base": (0.8,)}
NUM_ROUNDS, NUM_LARGE_ROUNDS = 5, 1
ROUND_TIMEOUT_S = 3600
QUICK_SHARES = (0.6,)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this benchmark's own options."""
    import torch

    parser.set_defaults(threads=torch.get_num_threads(), models=list(MODELS))
    parser.add_argument("--rounds", type=int, help=f"(default: {NUM_ROUNDS}, and {NUM_LARGE_ROUNDS} for large models)")
    parser.add_argument(
        "--budgets",
        "--shares",
        nargs="+",
        type=float,
        help=f"of the plain peak (default: {' '.join(map(str, SHARES))}, and fewer for large models)",
    )
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=list(CONTENDERS), help="beside plain")
    parser.add_argument("--steps", type=int, default=7, help="of a block; the first one does not count")
    parser.add_argument("--optimizer", choices=models.OPTIMIZERS, help="(default: sgd, and adamw for large models)")
    parser.add_argument("--planner", default="torchdelta")
    parser.add_argument("--compiled", action="store_true", help="torch.compile's memory budget in place of all others")
    parser.add_argument(
        "--picture",
        nargs="*",
        metavar="JSON",
        help="run nothing: write the table and the pictures of these results (default: those of this tag)",
    )


def run(options: argparse.Namespace) -> Outcome:
    """Measure every model asked for."""
    outcome = Outcome()
    if options.picture is not None:
        options.no_write = True  # of raw results: there are no new ones
        report.write(options.picture or sorted(map(str, RESULTS.glob("following*.json"))))
        return outcome
    outcome.disk = measure_disk()
    if options.compiled:
        compiled.run(options, outcome, num_rounds=2 if options.quick else options.rounds or NUM_ROUNDS)
        return outcome
    for model in options.models:
        print(model, flush=True)
        data = outcome.data[model] = measure(options, model)
        judge(outcome, model, data)
    print("\n" + report.tables(outcome.data))
    return outcome


def measure(options: argparse.Namespace, model: str) -> dict[str, Any]:
    """Run all rounds of one model and return the raw data."""
    optimizer = options.optimizer or OPTIMIZERS.get(model, "sgd")
    shares = options.budgets or LARGE_SHARES.get(model, SHARES)
    num_rounds = options.rounds or (NUM_LARGE_ROUNDS if model in LARGE_SHARES else NUM_ROUNDS)
    if options.quick:
        shares, num_rounds = LARGE_SHARES.get(model, QUICK_SHARES), 2
    began_s = time.perf_counter()
    peers = [name for name in PEERS if name in options.contenders]
    common: dict[str, Any] = {"model": model, "optimizer": optimizer, "threads": options.threads}
    found = run_worker("following.contest:peaks", timeout_s=options.timeout, contenders=[PLAIN, *peers], **common)
    budgets = {f"{share:.0%}": int(share * found[PLAIN]) for share in shares}
    # A peer that holds no less than plain sets no budget.
    budgets |= {peer: found[peer] for peer in peers if found[peer] < found[PLAIN]}
    contenders = [PLAIN, *(name for name in (RECORD_ONLY, *peers) if name in options.contenders)]
    for label in budgets:
        names = [name for name in IN_BUDGET if name in options.contenders]
        contenders += [in_budget(name, label) for name in names if name != NO_PREFETCH or label not in PEERS]
    data: dict[str, Any] = {"optimizer": optimizer, "peaks": found, "budgets": budgets, "rounds": [], "refused": {}}
    for index in range(num_rounds):
        done = run_worker(
            "following.contest:contest",
            timeout_s=ROUND_TIMEOUT_S,
            contenders=contenders,
            budgets=budgets,
            planner=options.planner,
            seed=index,
            num_steps=options.steps,
            with_bound=index == 0,
            **common,
        )
        data["rounds"].append(done["blocks"])
        data["refused"] |= done["refused"]
        data.setdefault("bounds", done["bounds"])
        contenders = [name for name in contenders if name not in done["refused"]]
        print(f"    round {index + 1}: {time.perf_counter() - began_s:.0f} s so far", flush=True)
    return data
