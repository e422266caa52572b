"""torch.compile with `activation_memory_budget` beside compiled plain: what the compiler's own trade costs here.

A budget there is a share of the bytes saved for backward, not of the peak. Each share is compiled from a function of
its own, because dynamo keeps what it compiled by the code of the function; a model that it breaks into several graphs
is refused (`fullgraph=True`).
"""

from __future__ import annotations

import gc
import time
from typing import TYPE_CHECKING, Any

from benchmarks.following.figures import ratio
from benchmarks.launch import run_worker
from benchmarks.outcome import format_table
from benchmarks.turns import PLAIN, take_turns, timed_steps

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable

    from benchmarks.outcome import Outcome
    from benchmarks.turns import Block

COMPILED = "compiled"
SHARES = (0.8, 0.5, 0.2)
TIMEOUT_S = 3600


def run(options: argparse.Namespace, outcome: Outcome, *, num_rounds: int) -> None:
    """Measure every model asked for, and print a table. Nothing is promised here, so nothing is checked."""
    rows: list[list[str]] = []
    for model in options.models:
        data = run_worker(
            "following.compiled:contest",
            threads=options.threads,
            timeout_s=TIMEOUT_S,
            model=model,
            num_rounds=num_rounds,
            num_steps=options.steps,
            shares=list(SHARES[1:2] if options.quick else SHARES),
        )
        outcome.data[model] = data
        for name, peak_bytes in data["peaks"].items():
            share = peak_bytes / data["peaks"][COMPILED]
            cells = [ratio(data, name, baseline) for baseline in (COMPILED, PLAIN)]
            rows.append([f"{model}, {name}", f"{peak_bytes / 2**20:.0f} MiB, {share:.1%}", *map(str, cells)])
    print("\n" + format_table(["", "peak, of compiled plain", "time of compiled plain", "time of eager plain"], rows))


def contest(
    model: str, shares: list[float], num_rounds: int = 5, num_steps: int = 4, optimizer: str = "sgd"
) -> dict[str, Any]:
    """Compile a model once for each share, and let all take turns with eager plain, as a worker."""
    import torch
    from torch._functorch import config as functorch_config

    from benchmarks import models
    from benchmarks.held import live_storages

    workload = models.build(model)
    network: Any = workload.model
    if hasattr(network, "loss_function"):  # of transformers: looked up once, since looking it up may log
        network.loss_function = network.loss_function
    built_optimizer = models.build_optimizer(optimizer, workload.model)
    # Before anything is compiled: the compiler keeps fake tensors, whose bytes do not exist.
    lasting_bytes = sum(live_storages().values())
    steps: dict[str, Callable[[], None]] = {PLAIN: lambda: workload.train(built_optimizer)}
    peaks: dict[str, int] = {}
    compile_times_s: dict[str, float] = {}

    def add(name: str, share: float) -> None:
        def loss() -> torch.Tensor:
            return workload.loss()

        loss.__code__ = loss.__code__.replace(co_name=f"loss_{len(steps)}")
        compiled = torch.compile(loss, fullgraph=True)

        def step() -> None:
            value = compiled()
            value.backward()
            built_optimizer.step()
            built_optimizer.zero_grad()
            value.item()

        began_s = time.perf_counter()
        with functorch_config.patch(activation_memory_budget=share):
            step()
        compile_times_s[name] = time.perf_counter() - began_s
        steps[name] = step

    add(COMPILED, 1.0)
    for share in shares:
        add(f"{COMPILED} {share}", share)
    for name, step in steps.items():
        peaks[name] = lasting_bytes + peak_growth(step)

    def run_block(name: str) -> Block:
        return timed_steps(steps[name], num_steps)

    rounds = take_turns(list(steps), num_rounds, run_block)
    return {"rounds": rounds, "peaks": peaks, "compile_times_s": compile_times_s}


def peak_growth(step: Callable[[], None]) -> int:
    """Return how far a step's allocations rise above what lives before it, counted at the allocator."""
    from torchdelta.errors import NativeError
    from torchdelta.native.counting import new_counter

    counter = new_counter()
    if isinstance(counter, NativeError):
        raise counter
    gc.collect()
    counter.start()
    step()
    step()
    peak = counter.take_peak_bytes()
    counter.stop()
    return peak
