"""What counting at the allocator costs: steps with and without it in turns, and an allocation by itself.

The counter's work is a table entry for each allocation and two questions for each op. Both are far below the noise of
a shared machine over a whole step, so the parts are timed by themselves as well, and added up for the model's number
of ops and allocations.
"""

from __future__ import annotations

import random
import statistics
import time
import timeit
from typing import TYPE_CHECKING, Any

import torch

from benchmarks import models
from benchmarks.intervals import median_interval
from benchmarks.outcome import Outcome, format_table
from torchdelta import Config, MemoryBudget
from torchdelta.aten.facts import facts_of
from torchdelta.cli.allocator_peak import AllocatorPeak
from torchdelta.errors import NativeError
from torchdelta.native.counting import Counter, new_counter
from torchdelta.runtime.current import current_session

if TYPE_CHECKING:
    import argparse

MOST_SHARE = 0.01
NUM_STEPS = 4  # a block; the first, which records the trace, is left out
BUDGET = "1TiB"
NUM_CALLS = 10_000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this benchmark's own options."""
    parser.add_argument("--rounds", type=int, default=9)


def run(options: argparse.Namespace) -> Outcome:
    """Measure each model."""
    torch.set_num_threads(options.threads)
    outcome = Outcome()
    counter = new_counter()
    if isinstance(counter, NativeError):
        outcome.check("counting allocator", str(counter), passed=False)
        return outcome
    rows = []
    unit_s = unit_times_s(counter)
    for name in options.models:
        found = _measure(name, 3 if options.quick else options.rounds)
        parts_s = found["num_allocations"] * unit_s["allocation"] + found["num_ops"] * unit_s["op"]
        found["parts_share"] = parts_s / found["plain_step_s"]
        outcome.data[name] = found | {"unit_times_s": unit_s}
        share = found["parts_share"]
        outcome.check(f"{name}: share of a step", f"{share:.3%}", passed=share < MOST_SHARE)
        rows.append([name, f"{share:.3%}", str(median_interval(found["ratios"]))])
    print(format_table(["model", "parts added up", "step with / without, in turns"], rows))
    return outcome


def unit_times_s(counter: Counter, num_calls: int = NUM_CALLS) -> dict[str, float]:
    """Return the seconds that counting adds to one allocation and its free, and to one op."""

    def allocate() -> None:
        torch.empty(1024)

    differences = []
    for _ in range(15):
        counter.start()
        counted_s = timeit.timeit(allocate, number=num_calls)
        counter.stop()
        differences.append((counted_s - timeit.timeit(allocate, number=num_calls)) / (num_calls))

    with MemoryBudget(BUDGET):
        torch.randn(8, 8, requires_grad=True).exp()
        session = current_session()
        assert session is not None
        recorder = session.recorder
        weight, x = torch.empty(64, 64), torch.empty(8, 64)
        need = recorder.needs.need(facts_of(torch.ops.aten.mm.default), torch.ops.aten.mm.default, (x, weight), None)

        def ask() -> None:
            # What the recorder does more for an op: room before it, a mark, the growth after it, whose each output is.
            recorder.ledger.usage.ask_counter()
            recorder.device.mark(need, recorder.ledger.usage)
            recorder.device.measure(need, 0, recorder.ledger.usage)
            counter.owns(x.data_ptr())

        asked_s = statistics.median(timeit.repeat(ask, number=num_calls, repeat=5)) / (num_calls)
    return {"allocation": max(0.0, statistics.median(differences)), "op": asked_s}


def _measure(name: str, num_rounds: int) -> dict[str, Any]:
    workload = models.build(name)
    optimizer = models.build_optimizer("sgd", workload.model)

    def step() -> None:
        workload.loss().backward()
        optimizer.step()
        optimizer.zero_grad()

    def block(*, counts: bool) -> tuple[float, int]:
        times_s = []
        with MemoryBudget(BUDGET, Config(count_allocations=counts)) as budget:
            for _ in range(NUM_STEPS):
                began_s = time.perf_counter()
                step()
                times_s.append(time.perf_counter() - began_s)
            trace = budget.trace()
        return statistics.median(times_s[1:]), len(trace.ops) if trace is not None else 0

    step()
    with AllocatorPeak() as meter:
        step()
    began_s = time.perf_counter()
    step()
    plain_step_s = time.perf_counter() - began_s
    order = random.Random(0)
    ratios, num_ops = [], 0
    for _ in range(num_rounds):
        times_s = {}
        for counts in order.sample([True, False], 2):
            times_s[counts], num_ops = block(counts=counts)
        ratios.append(times_s[True] / times_s[False])
    return {
        "num_allocations": meter.num_events // 2,
        "num_ops": num_ops,
        "plain_step_s": plain_step_s,
        "ratios": ratios,
    }
