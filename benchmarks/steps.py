"""One training run of a model, plain or in a budget, with its bits and its peaks: the worker's `steps:run`.

The profiler's memory events are read, and the run fails when there are none, or when the total still live at the end
disagrees by more than 1 % with the storages that Python can see. Times of such a run carry the profiler's cost and are
for orientation; measure time without the meter. A plain run does not import the runtime at all.
"""

from __future__ import annotations

import contextlib
import gc
import resource
import runpy
import sys
import time
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from benchmarks import bits, models
from benchmarks.held import live_storages
from torchdelta.cli.allocator_peak import AllocatorPeak

if TYPE_CHECKING:
    from collections.abc import Callable
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
    """What one run did."""

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


def run_step(
    workload: models.Workload,
    optimizer: torch.optim.Optimizer,
    index: int,
    *,
    with_gradients: bool,
    keeps_gradients: bool,
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


def train(
    step: Callable[[int], StepRecord],
    workload: models.Workload,
    optimizer: torch.optim.Optimizer,
    num_steps: int,
    config: dict[str, Any],
    segment: MeteredSegments,
    record: RunRecord,
) -> None:
    """Run the steps in the scope asked for and fill the record."""
    new_scope: Any = contextlib.nullcontext()
    if record.budget_bytes is not None:  # imports the library: no part of the time that an error takes to come
        from torchdelta import Config, MemoryBudget

        new_scope = MemoryBudget(record.budget_bytes, Config(**{"planner": None} | config))
    began_s = step_began_s = time.perf_counter()
    budget = None
    scope = contextlib.ExitStack()
    try:
        for index in range(num_steps):
            step_began_s = time.perf_counter()
            with segment:
                if index == 0:
                    # Inside the first step's segment: what opening the scope allocates is held against it.
                    budget = scope.enter_context(new_scope)
                record.steps.append(step(index))
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


def run(
    model: str,
    optimizer: str = "sgd",
    budget_bytes: int | None = None,
    config: dict[str, Any] | None = None,
    num_steps: int = 3,
    *,
    metered: bool = True,
    with_gradients: bool = True,
    keeps_gradients: bool = False,
) -> dict[str, Any]:
    """Train a model for a few steps.

    Args:
        model: A name of `models.MODELS`.
        optimizer: A name of `models.OPTIMIZERS`.
        budget_bytes: Train inside this budget; plain without.
        config: Settings of the budget's `Config`.
        num_steps: How many steps.
        metered: Read the profiler's memory events.
        with_gradients: Take the fingerprint of the gradients.
        keeps_gradients: Zero them in place between the steps.

    Raises:
        MeterError: No memory event was seen, or the events do not add up to the storages that are alive.
    """
    record = RunRecord(model=model, optimizer=optimizer, budget_bytes=budget_bytes)
    meter = AllocatorPeak() if metered else None
    segment = MeteredSegments(meter)
    before = live_storages()
    with segment:
        workload = models.build(model)
        built_optimizer = models.build_optimizer(optimizer, workload.model)
        models.seed_everything(1)

    def step(index: int) -> StepRecord:
        return run_step(
            workload, built_optimizer, index, with_gradients=with_gradients, keeps_gradients=keeps_gradients
        )

    train(step, workload, built_optimizer, num_steps, config or {}, segment, record)
    if meter is not None:
        record.known_live_bytes = sum(size for key, size in live_storages().items() if key not in before)
        record.allocator_live_bytes = meter.live_bytes
        record.num_allocator_events = meter.num_events
        # The first segment built the model; its own peak is no matter of the budget.
        record.scope_peak_bytes = max(segment.peak_bytes for segment in meter.segments[1:])
        for step_record, segment_peak in zip(record.steps, meter.segments[1:], strict=False):
            step_record.allocator_peak_bytes = segment_peak.peak_bytes
        if record.outcome == "finished":
            meter.check_live(record.known_live_bytes)
    record.rss_peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return asdict(record)


def script_peak(script: str, arguments: list[str]) -> dict[str, int]:
    """Run an ordinary script under the meter and return its peak at the allocator."""
    sys.argv = [script, *arguments]
    with AllocatorPeak() as meter:
        try:
            runpy.run_path(script, run_name="__main__")
        except SystemExit as stop:
            if stop.code:
                raise
    return {"peak_bytes": meter.peak_bytes, "num_events": meter.num_events}
