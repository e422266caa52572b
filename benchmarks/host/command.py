"""The host benchmark: its options, its checks and its table."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any

from benchmarks.host.contest import CONTENDERS, FITTING, NO_OP, median_ratios
from benchmarks.host.subjects import SUBJECTS
from benchmarks.launch import run_worker
from benchmarks.outcome import Outcome, format_table
from benchmarks.turns import PLAIN, median_interval

if TYPE_CHECKING:
    import argparse

# What a step that fits may take of plain's time on the host.
GOALS = {"lstm": 1.5, "mlp-adam": 1.5}
GOAL = 1.25
TIMEOUT_S = 1800


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this benchmark's own options."""
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--subjects", nargs="+", choices=list(SUBJECTS), default=list(SUBJECTS))


def run(options: argparse.Namespace) -> Outcome:
    """Measure every subject, on one thread whatever `--threads` says."""
    outcome = Outcome()
    rows: list[list[str]] = []
    for name in ["mlp-adam"] if options.quick else options.subjects:
        num_rounds = 2 if options.quick else options.rounds
        data = run_worker("host.contest:contest", timeout_s=TIMEOUT_S, model=name, num_rounds=num_rounds)
        outcome.data[name] = data
        rows.append(_judge(outcome, name, data))
        print(" | ".join(rows[-1]), flush=True)
    print(format_table(["step", "plain, ms", *CONTENDERS[1:]], rows))
    return outcome


def _judge(outcome: Outcome, name: str, data: dict[str, Any]) -> list[str]:
    rounds = data["rounds"]
    plain_ms = statistics.median(statistics.median(blocks[PLAIN]["thread_s"]) for blocks in rounds) * 1e3
    cells = [name, f"{plain_ms:.2f}"]
    found = {contender: median_ratios(rounds, contender) for contender in CONTENDERS[1:]}
    cells += [str(median_interval(samples)) if samples else "does not fit" for samples in found.values()]
    fitting, no_op = (median_interval(found[contender]) for contender in (FITTING, NO_OP))
    goal = GOALS.get(name, GOAL)
    outcome.check(
        f"{name}: a step that fits",
        f"{fitting} of plain's thread time; {goal} is wanted",
        passed=fitting.median <= goal,
        required=False,
    )
    outcome.check(
        f"{name}: a step that fits against a mode and hooks that do nothing",
        f"{fitting.median:.2f} against {no_op.median:.2f}",
        passed=fitting.median <= no_op.median,
        required=False,
    )
    return cells
