"""Whether steps stay as fast as they were at first: a training in a budget, long after its first followed steps.

A process trains in a budget, and from time to time hands over to a plain process, which trains a few steps of the same
model while the first one waits. A block of steps counts as its median over that of the plain steps after it. Beside the
times stands what the caching allocator holds and moves.
"""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any

from benchmarks import models
from benchmarks.disk import measure_disk
from benchmarks.launch import run_worker
from benchmarks.outcome import Outcome, format_table
from benchmarks.plain_process import PlainProcess
from benchmarks.turns import timed_steps

if TYPE_CHECKING:
    import argparse

BUDGET_SHARE = 0.5
NUM_BLOCKS, BLOCK_STEPS = 12, 10
NUM_TIMED = 5  # the last of each block, and as many plain ones
NUM_COMPARED = 3  # blocks
MOST_SLOWER, MOST_SEGMENTS = 1.05, 2.0
PLAN_WAIT_S = 60.0
UNLIMITED_BYTES = 2**40


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this benchmark's own options."""
    parser.add_argument("--blocks", type=int, default=NUM_BLOCKS, help=f"of {BLOCK_STEPS} steps each")
    parser.add_argument("--budget-share", type=float, default=BUDGET_SHARE, help="of the plain peak at the allocator")


def run(options: argparse.Namespace) -> Outcome:
    """Measure each model."""
    outcome = Outcome(disk=measure_disk())
    chosen = options.models
    if options.quick:
        options.blocks, options.budget_share, chosen = 4, 0.8, ["tiny"]
    rows = [_measure(outcome, name, options) for name in chosen]
    print("\n" + format_table(["model", "step / plain, by block", "segments, by block"], rows))
    return outcome


def _measure(outcome: Outcome, model: str, options: argparse.Namespace) -> list[str]:
    common: dict[str, Any] = {"threads": options.threads, "timeout_s": options.timeout, "model": model}
    plain_bytes = run_worker("lasting:train", budget_bytes=UNLIMITED_BYTES, num_blocks=1, **common)["peak_bytes"]
    found = run_worker(
        "lasting:train", budget_bytes=int(options.budget_share * plain_bytes), num_blocks=options.blocks, **common
    )
    blocks = found["blocks"]
    ratios = [statistics.median(block["times_s"]) / statistics.median(block["plain_s"]) for block in blocks]
    segments = [block["caching"]["num_segments"] for block in blocks]
    outcome.data[model] = found | {"plain_peak_bytes": plain_bytes, "ratios": ratios}
    slower = statistics.median(ratios[-NUM_COMPARED:]) / statistics.median(ratios[:NUM_COMPARED])
    outcome.data[model]["last_over_first"] = slower
    outcome.check(
        f"{model}: the last {NUM_COMPARED} blocks take as long as the first",
        f"{slower:.3f}",
        passed=slower <= MOST_SLOWER,
    )
    if any(segments):
        more = max(segments[-NUM_COMPARED:]) / max(1, *segments[:NUM_COMPARED])
        outcome.check(
            f"{model}: the caching allocator's segments do not become many", f"{more:.2f}", passed=more <= MOST_SEGMENTS
        )
    return [model, " ".join(f"{ratio:.2f}" for ratio in ratios), " ".join(map(str, segments))]


def train(model: str, budget_bytes: int, num_blocks: int) -> dict[str, Any]:
    """Train in a budget as a worker, in turns with a plain process."""
    from torchdelta import Config, MemoryBudget
    from torchdelta.native.caching import caching_figures
    from torchdelta.runtime.current import current_session

    workload = models.build(model)
    optimizer = models.build_optimizer("sgd", workload.model)
    blocks: list[dict[str, Any]] = []
    with PlainProcess(model, "sgd") as plain, MemoryBudget(budget_bytes, Config(planner="torchdelta")) as budget:
        for _ in range(3):
            workload.train(optimizer)
        session: Any = current_session()
        session.programs.wait(PLAN_WAIT_S)
        for _ in range(num_blocks):
            times_s = timed_steps(lambda: workload.train(optimizer), BLOCK_STEPS)["times_s"][-NUM_TIMED:]
            figures = caching_figures()
            blocks.append(
                {
                    "times_s": times_s,
                    "plain_s": plain.times_s(NUM_TIMED),
                    "caching": {name: getattr(figures, name) for name in figures.__slots__},
                }
            )
    summary = budget.summary()
    num_followed = summary.follow.num_followed_steps if summary.follow is not None else 0
    return {
        "budget_bytes": budget_bytes,
        "peak_bytes": summary.peak_bytes,
        "num_followed_steps": num_followed,
        "blocks": blocks,
    }
