"""Runs many steps and counts what a process holds at two of them: `python -m benchmarks.long_run --model tiny ...`."""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import sys
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from benchmarks import models
from benchmarks.storages import live_storages


def count_held() -> dict[str, Any]:
    """Count live tensor bytes, objects by type, open files, threads and resident bytes."""
    # First of all: looking at a storage from Python makes an object that stays with it.
    live_bytes = sum(live_storages().values())
    gc.collect()
    names = [f"{type(held).__module__}.{type(held).__qualname__}" for held in gc.get_objects()]
    types = Counter(names)
    return {
        "live_bytes": live_bytes,
        "num_objects": len(names),
        "types": dict(types),
        "num_files": len(os.listdir("/proc/self/fd")),  # noqa: PTH208 - names only
        "num_threads": threading.active_count(),
        "rss_bytes": int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1]) * os.sysconf("SC_PAGE_SIZE"),
    }


def last_step(budget: Any) -> dict[str, int]:
    """Return what the runtime itself counted in the step that has just ended; nothing for a plain run."""
    if budget is None:
        return {}
    step = budget.summary().steps[-1]
    return {"step_peak_bytes": step.peak_bytes, "step_kept_bytes": step.kept_bytes}


def main() -> int:
    """Run the steps and print both counts."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.long_run", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", choices=list(models.MODELS), default="tiny")
    parser.add_argument("--budget-bytes", type=int)
    parser.add_argument("--policy")
    parser.add_argument("--optimizer", choices=models.OPTIMIZERS, default="adamw")
    parser.add_argument("--first", type=int, default=20)
    parser.add_argument("--last", type=int, default=200)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    workload = models.build(options.model)
    optimizer = models.build_optimizer(options.optimizer, workload.model)
    scope: Any = contextlib.nullcontext()
    if options.budget_bytes is not None:
        from torchdelta import Config, MemoryBudget

        scope = MemoryBudget(options.budget_bytes, Config(policy=options.policy) if options.policy else Config())
    # Kept as text: a container would be one more object in the second count.
    counts: dict[int, str] = {}
    # Counting once before the steps that count: what the first counting leaves behind is then in both.
    count_held()
    with scope as budget:
        for index in range(1, options.last + 1):
            loss = workload.loss()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            loss.item()
            del loss
            if index in {options.first, options.last}:
                counts[index] = json.dumps({**count_held(), **last_step(budget)})
    print(json.dumps({"first": json.loads(counts[options.first]), "last": json.loads(counts[options.last])}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
