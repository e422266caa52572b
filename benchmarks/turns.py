"""Takes turns between ways to train in one process, and states medians of ratios with a bootstrap interval.

A round runs a short block of steps for every contender, in an order drawn anew each round; a contender's ratio is its
block against another's of the same round. Slow drifts of a shared machine (other jobs, clock frequency) then fall on
both sides. The first step of a block opens the scope and its tier; it is kept apart.

Where a machine changes its speed within a round, plain steps run right after each block, and are kept in the block as
`BESIDE`. A block counts as its median step over the median of these. Where they alternate with the steps of the block
(`IN_PAIRS`), it counts as the median of the ratios of each pair.

[Note: pages that are given back]
The host of a virtual machine may take pages back that the guest has not used for seconds. A plain step frees its pages
at its end. If the other process holds its own, as inside a budget, nobody uses the freed ones while the plain process
waits; its next step gets them anew from the host, which takes longer. A method that also frees its pages uses the same
ones in turn with the plain process. So for models of gigabytes, plain steps beside budgets were slower by 5 to 8 %,
on one machine by 32 %, than those beside other methods. Where that is seen in a round (`fair_rounds`), its blocks are
compared with the plain steps beside the other methods alone, and not in pairs.
"""

from __future__ import annotations

import contextlib
import gc
import random
import statistics
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

NUM_RESAMPLES = 2000
FEWEST_SAMPLES = 6  # the lowest and the highest of n samples enclose the median with a probability of 1 - 2 ** (1 - n)
PLAIN = "plain"
RECORD_ONLY = "record-only"
IN_BUDGET = " @ "  # in the names of contenders that have a budget
SLOWER_BESIDE = 0.03
BESIDE = "beside"
IN_PAIRS = "in_pairs"

Block = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Interval:
    """A median and the 2.5 % and 97.5 % quantiles of its bootstrap distribution.

    Of fewer than `FEWEST_SAMPLES` samples these quantiles are the lowest and the highest one, and no 95 % interval: two
    samples enclose the median in half of all cases, three in 75 %, five in 94 %.
    """

    median: float
    low: float
    high: float
    num_samples: int

    def __str__(self) -> str:
        return f"{self.median:.3f}" + (f" [{self.low:.3f}, {self.high:.3f}]" if self.num_samples > 1 else "")


def median_interval(samples: Sequence[float]) -> Interval:
    """Return the median with its 95 % percentile-bootstrap interval (seeded: the same samples give the same)."""
    if not samples:
        raise ValueError("no samples: an interval needs at least one")
    generator = random.Random(0)
    medians = sorted(statistics.median(generator.choices(samples, k=len(samples))) for _ in range(NUM_RESAMPLES))
    return Interval(
        median=statistics.median(samples),
        low=medians[int(0.025 * NUM_RESAMPLES)],
        high=medians[int(0.975 * NUM_RESAMPLES) - 1],
        num_samples=len(samples),
    )


def name_of_interval(num_rounds: int) -> str:
    """Return what the interval of so many rounds is, for a caption."""
    if num_rounds == 1:
        return "one round, without an interval"
    if num_rounds < FEWEST_SAMPLES:
        return f"medians of {num_rounds} rounds, in brackets the lowest and the highest one"
    return f"medians of {num_rounds} rounds with 95 % intervals"


def take_turns(
    contenders: Sequence[str], num_rounds: int, run_block: Callable[[str], Block | None], seed: int = 0
) -> list[dict[str, Block]]:
    """Run the rounds, in an order drawn from the seed. A contender whose block is None is left out from then on."""
    generator = random.Random(seed)
    in_race = list(contenders)
    rounds: list[dict[str, Block]] = []
    for _ in range(num_rounds):
        blocks = {name: run_block(name) for name in generator.sample(in_race, len(in_race))}
        rounds.append({name: block for name, block in blocks.items() if block is not None})
        in_race = [name for name in in_race if blocks[name] is not None]
    return rounds


def timed_steps(step: Callable[[], object], num_steps: int) -> Block:
    """Run steps and return the wall and processor time of each."""
    times_s, cpu_times_s = [], []
    for _ in range(num_steps):
        began_s, began_cpu_s = time.perf_counter(), time.process_time()
        step()
        times_s.append(time.perf_counter() - began_s)
        cpu_times_s.append(time.process_time() - began_cpu_s)
    return {"times_s": times_s, "cpu_times_s": cpu_times_s}


def fair_rounds(rounds: Sequence[dict[str, Block]]) -> list[dict[str, Block]]:
    """Return rounds whose plain steps are not slower because of what they ran beside.

    See [Note: pages that are given back].
    """
    return [_fair_round(blocks) for blocks in rounds]


def _fair_round(blocks: dict[str, Block]) -> dict[str, Block]:
    inside: list[float] = []
    outside: list[float] = []
    for name, block in blocks.items():
        if block.get(BESIDE, {}).get(IN_PAIRS):
            plain_s = block[BESIDE]["times_s"][1:]
            (inside if name == RECORD_ONLY or IN_BUDGET in name else outside).extend(plain_s)
    if not inside or not outside or statistics.median(inside) <= statistics.median(outside) * (1 + SLOWER_BESIDE):
        return blocks
    reference = {"times_s": [outside[0], *outside]}  # the first step of each is left out
    return {name: block | {BESIDE: reference} if BESIDE in block else block for name, block in blocks.items()}


def ratios(
    rounds: Sequence[dict[str, Block]],
    contender: str,
    baseline: str = PLAIN,
    key: str = "times_s",
    num_warm_steps: int = 1,
) -> list[float]:
    """Return, for each round that both took part in, the contender's median step over the baseline's.

    With plain steps beside them, each of the two is divided by its own first.
    """

    def median_s(block: Block) -> float:
        return statistics.median(block[key][num_warm_steps:])

    def over_plain(block: Block) -> float:
        beside = block[BESIDE]
        if not beside.get(IN_PAIRS):
            return median_s(block) / median_s(beside)
        pairs = list(zip(block[key], beside[key], strict=True))[num_warm_steps:]
        return statistics.median(own / plain for own, plain in pairs)

    def ratio(block: Block, other: Block) -> float:
        if BESIDE not in block:
            return median_s(block) / median_s(other)
        return over_plain(block) if baseline == PLAIN else over_plain(block) / over_plain(other)

    return [
        ratio(blocks[contender], blocks[baseline]) for blocks in rounds if contender in blocks and baseline in blocks
    ]


def run(
    model: str,
    contenders: dict[str, dict[str, Any] | None],
    budget_bytes: int = 1 << 40,
    num_rounds: int = 5,
    num_steps: int = 3,
    *,
    with_disk: bool = False,
) -> dict[str, Any]:
    """Train one model in turns, as a worker: each contender under the `Config` of these settings, None without us."""
    from benchmarks import models
    from benchmarks.disk import measure_disk

    workload = models.build(model)
    optimizer = models.build_optimizer("sgd", workload.model)
    found: dict[str, Any] = {"summaries": {}, "refused": {}, "crashed": {}}

    def run_block(name: str) -> Block | None:
        settings = contenders[name]
        scope: Any = contextlib.nullcontext()
        if settings is not None:
            from torchdelta import Config, MemoryBudget

            scope = MemoryBudget(budget_bytes, Config(**{"planner": None} | settings))
        try:
            with scope as budget:
                block = timed_steps(lambda: workload.train(optimizer), num_steps)
            if budget is not None:
                found["summaries"][name] = budget.summary().as_dict()
        except torch.OutOfMemoryError as error:
            found["refused"][name] = str(error)
        except Exception as error:  # noqa: BLE001 - one that crashes is a finding, the others go on
            found["refused"][name] = found["crashed"][name] = f"{type(error).__name__}: {error}"
        else:
            return block
        optimizer.zero_grad()
        gc.collect()
        return None

    disk = [measure_disk()] if with_disk else []
    timed_steps(lambda: workload.train(optimizer), num_steps)
    found["rounds"] = take_turns(list(contenders), num_rounds, run_block)
    return {**found, "disk": [*disk, measure_disk()] if with_disk else []}
