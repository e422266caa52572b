"""One measured training run in a process of its own: `python -m benchmarks.worker --model gpt2-like --json`.

A process a run, because a peak at the allocator must not include what an earlier run left behind, and because the
profiler has to start before the first tensor of the model exists. Without `--budget-bytes` the run is plain and does
not import the runtime at all.

With `--meter allocator` the profiler's memory events are read; the run fails when there are none, or when the total
still live at the end disagrees by more than 1 % with the storages that Python can see.
Times of such a run carry the profiler's cost and are for orientation; measure time with `--meter none`.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import resource
import sys
import time
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from benchmarks import bits, models
from benchmarks.storages import live_storages
from torchdelta.cli.allocator_peak import AllocatorPeak, MeterError

if TYPE_CHECKING:
    from contextlib import AbstractContextManager
    from types import TracebackType


class MeteredSegments:
    """Segments of an allocator meter, with the garbage collector running inside them only.

    The meter cannot see what is freed between two segments, and adding up a segment's events is work enough to start a
    collection there.
    """

    def __init__(self, meter: AllocatorPeak | None) -> None:
        self.meter = meter

    def __enter__(self) -> None:
        """Begin a segment."""
        if self.meter is not None:
            self.meter.__enter__()
            gc.enable()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """End the segment."""
        if self.meter is not None:
            gc.disable()
            self.meter.__exit__(kind, error, traceback)


@dataclass(kw_only=True)
class StepRecord:
    """What one step did."""

    index: int
    time_s: float
    cpu_s: float
    loss: str
    gradients_sha256: str | None
    random_state_sha256: str
    allocator_peak_bytes: int | None = None


@dataclass(kw_only=True)
class RunRecord:
    """What one run did; the JSON that a worker prints."""

    model: str
    optimizer: str
    budget_bytes: int | None
    outcome: str = "finished"
    steps: list[StepRecord] = field(default_factory=list)
    state_sha256: str | None = None
    scope_peak_bytes: int | None = None
    largest_workspace_bytes: int | None = None
    counting_allocator: str | None = None
    allocator_live_bytes: int | None = None
    num_allocator_events: int | None = None
    known_live_bytes: int | None = None
    rss_peak_bytes: int = 0
    summary: dict[str, Any] | None = None
    error: dict[str, Any] | None = None


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.worker", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", choices=list(models.MODELS), required=True)
    parser.add_argument("--batch", type=int, help="batch size (default: the model's own)")
    parser.add_argument("--optimizer", choices=models.OPTIMIZERS, default="sgd")
    parser.add_argument("--budget-bytes", type=int, help="run inside this budget (default: plain)")
    parser.add_argument("--policy", help="reactive policy (default: the library's)")
    parser.add_argument("--decisions", choices=["recompute", "swap", "keep"], help="force every decision")
    parser.add_argument("--tier", choices=["disk", "memory"], default="disk")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1, help="intra-op threads")
    parser.add_argument("--meter", choices=["allocator", "none"], default="allocator")
    parser.add_argument("--no-gradients", action="store_true", help="leave the gradients' fingerprint out")
    parser.add_argument("--keep-gradients", action="store_true", help="zero them in place between the steps")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    return parser.parse_args(arguments)


def open_scope(options: argparse.Namespace) -> AbstractContextManager[Any]:
    """Return the budget's context, or one that does nothing and gives None."""
    if options.budget_bytes is None:
        return contextlib.nullcontext()
    from torchdelta import Config, MemoryBudget

    settings: dict[str, Any] = {"tier": options.tier, "decisions": options.decisions}
    if options.policy is not None:
        settings["policy"] = options.policy
    return MemoryBudget(options.budget_bytes, Config(**settings))


def run_step(
    workload: models.Workload,
    optimizer: torch.optim.Optimizer,
    index: int,
    *,
    with_gradients: bool,
    keeps_gradients: bool = False,
) -> StepRecord:
    """Run one training step and record its bits; the time to read them is left out."""
    began_s, began_cpu_s = time.perf_counter(), time.process_time()
    loss = workload.loss()
    loss.backward()
    backward_s, backward_cpu_s = time.perf_counter() - began_s, time.process_time() - began_cpu_s
    gradients = bits.gradients_digest(workload.model) if with_gradients else None
    began_s, began_cpu_s = time.perf_counter(), time.process_time()
    optimizer.step()
    optimizer.zero_grad(set_to_none=not keeps_gradients)
    loss_value = loss.item()
    return StepRecord(
        index=index,
        time_s=backward_s + time.perf_counter() - began_s,
        cpu_s=backward_cpu_s + time.process_time() - began_cpu_s,
        loss=float(loss_value).hex(),
        gradients_sha256=gradients,
        random_state_sha256=bits.random_state_digest(),
    )


def prepare(options: argparse.Namespace) -> tuple[models.Workload, torch.optim.Optimizer]:
    """Build the model with its batch, and its optimizer."""
    workload = models.build(options.model, options.batch, options.seed)
    optimizer = models.build_optimizer(options.optimizer, workload.model)
    models.seed_everything(options.seed + 1)
    return workload, optimizer


def train(
    options: argparse.Namespace,
    workload: models.Workload,
    optimizer: torch.optim.Optimizer,
    segment: MeteredSegments,
    record: RunRecord,
) -> None:
    """Run the steps in the scope asked for and fill the record."""
    new_scope = open_scope(options)  # imports the library: no part of the time that an error takes to come
    with_gradients = not options.no_gradients
    began_s = step_began_s = time.perf_counter()
    budget = None
    scope = contextlib.ExitStack()
    try:
        for index in range(options.steps):
            step_began_s = time.perf_counter()
            with segment:
                if index == 0:
                    # Inside the first step's segment: what opening the scope allocates is held against it.
                    budget = scope.enter_context(new_scope)
                step = run_step(
                    workload,
                    optimizer,
                    index,
                    with_gradients=with_gradients,
                    keeps_gradients=options.keep_gradients,
                )
                record.steps.append(step)
    except torch.OutOfMemoryError as error:
        now_s = time.perf_counter()
        record.outcome = "budget_error"
        record.error = {
            "type": type(error).__name__,
            "message": str(error),
            "step": len(record.steps),
            "since_scope_s": now_s - began_s,
            "since_step_s": now_s - step_began_s,
            "least_budget_bytes": getattr(error, "least_budget_bytes", None),
            "least_freeing_gradients_bytes": getattr(error, "least_freeing_gradients_bytes", None),
            "op": getattr(error, "op", None),
        }
    with segment:
        scope.close()
        # One tensor more, so that this segment is never empty (the meter takes an empty one for a broken one). After
        # the scope: a budget below what lives already would refuse it.
        torch.empty(1)
        optimizer.zero_grad()
        gc.collect()
    if budget is not None:
        from torchdelta.native.counting import counting_status

        record.summary = budget.summary().as_dict()
        status = counting_status()
        record.counting_allocator = f"{'on' if status.is_on else 'off'}: {status.reason}"
        if record.outcome == "finished":
            record.largest_workspace_bytes = max(op.workspace_bytes for op in budget.trace().ops)
    record.state_sha256 = bits.state_digest(workload.model)


def measure(options: argparse.Namespace) -> RunRecord:
    """Run once, with or without the allocator meter.

    Raises:
        MeterError: No memory event was seen, or the events do not add up to the storages that are alive.
    """
    record = RunRecord(model=options.model, optimizer=options.optimizer, budget_bytes=options.budget_bytes)
    meter = AllocatorPeak() if options.meter == "allocator" else None
    segment = MeteredSegments(meter)
    before = live_storages()
    with segment:
        workload, optimizer = prepare(options)
    train(options, workload, optimizer, segment, record)
    if meter is None:
        return record
    record.known_live_bytes = sum(size for key, size in live_storages().items() if key not in before)
    record.allocator_live_bytes = meter.live_bytes
    record.num_allocator_events = meter.num_events
    # The first segment built the model; its own peak is no matter of the budget.
    record.scope_peak_bytes = max(segment.peak_bytes for segment in meter.segments[1:])
    for step, segment_peak in zip(record.steps, meter.segments[1:], strict=False):
        step.allocator_peak_bytes = segment_peak.peak_bytes
    if record.outcome == "finished":
        meter.check_live(record.known_live_bytes)
    return record


def main() -> int:
    """Run and print the record."""
    options = parse_arguments()
    torch.set_num_threads(options.threads)
    try:
        record = measure(options)
    except MeterError as error:
        print(json.dumps({"outcome": "meter_error", "message": str(error)}))
        return 3
    record.rss_peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    if options.json:
        print(json.dumps(asdict(record)))
        return 0
    print(f"{record.model} {record.optimizer}: {record.outcome}")
    for step in record.steps:
        peak = "" if step.allocator_peak_bytes is None else f"  peak {step.allocator_peak_bytes / 2**20:.1f} MiB"
        print(f"  step {step.index + 1}: {step.time_s:.3f} s  loss {float.fromhex(step.loss):.6f}{peak}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
