"""The host benchmark: its options, its checks and its table."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any

from benchmarks.host.contest import CONTENDERS, FITTING, FOLLOWING, IN_BUDGET, NO_OP
from benchmarks.host.subjects import PRESSED, SUBJECTS
from benchmarks.launch import run_worker
from benchmarks.outcome import Outcome, format_table
from benchmarks.turns import PLAIN, median_interval, ratios

if TYPE_CHECKING:
    import argparse

# What a step that fits may take of plain's time on the host.
GOALS = {"lstm": 1.5, "mlp-adam": 1.5}
GOAL = 1.25
FOLLOWING_GOAL = 1.6  # the same of a step that follows a plan
TIMEOUT_S = 1800


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this benchmark's own options."""
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--subjects", nargs="+", choices=[*SUBJECTS, *PRESSED], default=[*SUBJECTS, *PRESSED])


def run(options: argparse.Namespace) -> Outcome:
    """Measure every subject, on one thread whatever `--threads` says."""
    outcome = Outcome()
    rows: list[list[str]] = []
    pressed_rows: list[list[str]] = []
    for name in ["mlp-adam"] if options.quick else options.subjects:
        num_rounds = 2 if options.quick else options.rounds
        data = run_worker("host.contest:contest", timeout_s=TIMEOUT_S, model=name, num_rounds=num_rounds)
        outcome.data[name] = data
        row = (judge_pressed if name in PRESSED else judge)(outcome, name, data)
        (pressed_rows if name in PRESSED else rows).append(row)
        print(" | ".join(row), flush=True)
    print(format_table(["step", "plain, ms", *CONTENDERS[1:]], rows))
    if pressed_rows:
        print(format_table(["step", "plain, ms", *IN_BUDGET[1:]], pressed_rows))
    return outcome


def _cells(name: str, data: dict[str, Any], contenders: tuple[str, ...]) -> tuple[list[str], dict[str, list[float]]]:
    """Return a row of the table, and the ratios by contender."""
    rounds = data["rounds"]
    plain_ms = statistics.median(statistics.median(blocks[PLAIN]["thread_s"]) for blocks in rounds) * 1e3
    found = {contender: ratios(rounds, contender, key="thread_s", num_warm_steps=0) for contender in contenders[1:]}
    cells = [str(median_interval(samples)) if samples else "does not fit" for samples in found.values()]
    return [name, f"{plain_ms:.2f}", *cells], found


def judge_pressed(outcome: Outcome, name: str, data: dict[str, Any]) -> list[str]:
    """Check the followed steps of a model that a budget presses, and return its row."""
    cells, found = _cells(name, data, IN_BUDGET)
    if not found[FOLLOWING]:
        outcome.check(f"{name}: a followed step", data["refused"].get(FOLLOWING, "not measured"), passed=False)
        return cells
    following, no_op = median_interval(found[FOLLOWING]), median_interval(found[NO_OP])
    outcome.check(
        f"{name}: a followed step",
        f"{following} of plain's thread time; {FOLLOWING_GOAL} is wanted; a mode and hooks that do nothing take "
        f"{no_op.median:.2f}",
        passed=following.median <= min(FOLLOWING_GOAL, no_op.median),
    )
    return cells


def judge(outcome: Outcome, name: str, data: dict[str, Any]) -> list[str]:
    """Check the steps of a model that fits, and return its row."""
    cells, found = _cells(name, data, CONTENDERS)
    fitting, no_op = (median_interval(found[contender]) for contender in (FITTING, NO_OP))
    goal = GOALS.get(name, GOAL)
    outcome.check(
        f"{name}: a step that fits",
        f"{fitting} of plain's thread time; {goal} is wanted",
        passed=fitting.median <= goal,
    )
    outcome.check(
        f"{name}: a step that fits against a mode and hooks that do nothing",
        f"{fitting.median:.2f} against {no_op.median:.2f}",
        passed=fitting.median <= no_op.median,
    )
    return cells
