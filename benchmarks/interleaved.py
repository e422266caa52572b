"""Times contenders against plain in one process, in turns: `python -m benchmarks.interleaved --model tiny ...`.

A round runs a short block of steps for plain and for every contender, in an order drawn anew each round; a contender's
ratio is its block against the plain block of the same round. Slow drifts of a shared machine (other jobs, clock
frequency) then fall on both sides. The first step of a block opens the scope and its tier; it is kept apart.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import random
import statistics
import sys
import time
from typing import Any

import torch

from benchmarks import models
from benchmarks.disk import measure_disk

PLAIN = "plain"
RECORD_ONLY = "record-only"


class Contest:
    """One model, trained in turns by plain and by each contender."""

    def __init__(self, model: str, budget_bytes: int, num_steps: int) -> None:
        self.workload = models.build(model)
        self.optimizer = models.build_optimizer("sgd", self.workload.model)
        self.budget_bytes = budget_bytes
        self.num_steps = num_steps
        self.rounds: list[dict[str, Any]] = []
        self.summaries: dict[str, Any] = {}
        self.refused: dict[str, str] = {}
        self.crashed: dict[str, str] = {}

    def step(self) -> None:
        """Run one ordinary training step."""
        self.workload.train(self.optimizer)

    def block(self, contender: str) -> dict[str, list[float]]:
        """Run a block of steps and return the wall and processor time of each."""
        scope: Any = contextlib.nullcontext()
        if contender != PLAIN:
            from torchdelta import Config, MemoryBudget

            scope = MemoryBudget(self.budget_bytes, Config() if contender == RECORD_ONLY else Config(policy=contender))
        times_s, cpu_times_s = [], []
        with scope as budget:
            for _ in range(self.num_steps):
                began_s, began_cpu_s = time.perf_counter(), time.process_time()
                self.step()
                times_s.append(time.perf_counter() - began_s)
                cpu_times_s.append(time.process_time() - began_cpu_s)
        if budget is not None:
            self.summaries[contender] = budget.summary().as_dict()
        return {"times_s": times_s, "cpu_times_s": cpu_times_s}

    def run(self, contenders: list[str], num_rounds: int) -> None:
        """Run the rounds; a contender that refuses the budget is left out of the later ones."""
        generator = random.Random(0)
        self.block(PLAIN)
        for _ in range(num_rounds):
            turns = [PLAIN, *(name for name in contenders if name not in self.refused)]
            generator.shuffle(turns)
            blocks = {}
            for contender in turns:
                try:
                    blocks[contender] = self.block(contender)
                except torch.OutOfMemoryError as error:
                    self.refused[contender] = str(error)
                except Exception as error:  # noqa: BLE001 - one that crashes is a finding, the others go on
                    self.refused[contender] = self.crashed[contender] = f"{type(error).__name__}: {error}"
                if contender in self.refused:
                    self.optimizer.zero_grad()
                    gc.collect()
            self.rounds.append(blocks)


def ratios(rounds: list[dict[str, Any]], contender: str, baseline: str, key: str = "times_s") -> list[float]:
    """Return, for each round that both took part in, the contender's median step over the baseline's."""
    return [
        statistics.median(blocks[contender][key][1:]) / statistics.median(blocks[baseline][key][1:])
        for blocks in rounds
        if contender in blocks and baseline in blocks
    ]


def main() -> int:
    """Run one contest and print it as JSON."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.interleaved", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--model", choices=list(models.MODELS), required=True)
    parser.add_argument("--budget-bytes", type=int, required=True)
    parser.add_argument("--contenders", nargs="*", default=[])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=3, help="steps a block; the first is kept apart")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--no-disk", action="store_true", help="leave the tier's bandwidth out")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    contest = Contest(options.model, options.budget_bytes, options.steps)
    disk = [] if options.no_disk else [measure_disk()]
    contest.run(options.contenders, options.rounds)
    if not options.no_disk:
        disk.append(measure_disk())
    document = {
        "rounds": contest.rounds,
        "summaries": contest.summaries,
        "refused": contest.refused,
        "crashed": contest.crashed,
        "disk": disk,
    }
    print(json.dumps(document))
    return 0


if __name__ == "__main__":
    sys.exit(main())
