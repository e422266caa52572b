"""The runs of one model, as workers: plain and accumulated ones, and those under a limit.

Every run builds its model anew from the same seed, so that the losses of its steps can be compared bit for bit. After
each timed step, a second process runs a plain step of plain's largest batch. Times per sample are stated over that
step's.
"""

from __future__ import annotations

import contextlib
import gc
import statistics
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from benchmarks import models
from benchmarks.plain_process import PlainProcess
from benchmarks.settling import NUM_SETTLING_STEPS, PLAN_WAIT_S, settle
from benchmarks.turns import BESIDE
from torchdelta import Config, MemoryBudget
from torchdelta.runtime.current import current_session

if TYPE_CHECKING:
    from torch import nn

    from benchmarks.models import Inputs

UNBOUNDED_BYTES = 1 << 40
NUM_BEFORE_PLAN = 2  # a step that reacts, and one that is traced
TRIAL_STEPS = 4
SEARCH_RESOLUTION = 0.04


@dataclass(kw_only=True)
class Trainer:
    """A model with its batch in parts of at most `micro_batch` samples, one for all by default."""

    model: nn.Module
    parts: list[tuple[float, Inputs]]  # each with its share of the batch
    optimizer: torch.optim.Optimizer
    losses: list[str] = field(default_factory=list)

    def steps(self, num_steps: int) -> None:
        """Run steps, and keep the loss of each."""
        for _ in range(num_steps):
            total = 0.0
            for share, inputs in self.parts:
                loss = models.loss_of(self.model, inputs)
                (loss if share == 1 else loss * share).backward()
                total += loss.item() * share
                del loss
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.losses.append(float(total).hex())


def build(model: str, batch_size: int, micro_batch: int | None = None) -> Trainer:
    """Build a model and its batch from the seed."""
    gc.collect()
    workload = models.build(model, batch_size)
    optimizer = models.build_optimizer("sgd", workload.model)
    inputs = workload.inputs
    parts: list[tuple[float, Inputs]] = [(1.0, inputs)]
    if micro_batch is not None:
        starts = range(0, batch_size, micro_batch)
        ends = [min(start + micro_batch, batch_size) for start in starts]
        parts = [
            ((end - start) / batch_size, _rows(inputs, start, end)) for start, end in zip(starts, ends, strict=True)
        ]
    models.seed_everything(1)
    return Trainer(model=workload.model, parts=parts, optimizer=optimizer)


def _rows(inputs: Inputs, start: int, end: int) -> Inputs:
    if isinstance(inputs, dict):
        return {name: tensor[start:end] for name, tensor in inputs.items()}
    return tuple(tensor[start:end] for tensor in inputs)


def plain_peak(model: str, batch_size: int, micro_batch: int | None = None, num_steps: int = 1) -> int:
    """Return the peak of plain steps, counted at the allocator. With SGD, which has no states, one step is enough."""
    trainer = build(model, batch_size, micro_batch)
    with MemoryBudget(UNBOUNDED_BYTES) as budget:
        trainer.steps(num_steps)
    return budget.summary().peak_bytes


def limit(model: str, batch_size: int) -> dict[str, int]:
    """Return the limit: plain's peak at its largest batch, as a worker."""
    return {"limit_bytes": plain_peak(model, batch_size, num_steps=2)}


def measure(model: str, batch_size: int, limit_bytes: int, plain_batch: int, num_timed: int) -> dict[str, Any]:
    """Train one batch under the limit, reactively and by a plan, and plain without it, as a worker.

    Returns:
        Times per sample, over those of plain at its largest batch: of plain at this batch (without a limit), of plain
        with accumulation, and of both runs under the limit with their peaks, and whether their losses are plain's.
    """
    with PlainProcess(model, "sgd", plain_batch) as beside:
        return _measure(_Timer(beside, plain_batch, num_timed), model, batch_size, limit_bytes, plain_batch)


def _measure(timer: _Timer, model: str, batch_size: int, limit_bytes: int, plain_batch: int) -> dict[str, Any]:
    found: dict[str, Any] = {"batch_size": batch_size}
    if batch_size > plain_batch:
        accumulated = build(model, batch_size, plain_batch)
        accumulated.steps(NUM_SETTLING_STEPS)
        found["accumulated"] = timer.time(accumulated, batch_size)
        del accumulated
        found["accumulated"]["peak_bytes"] = plain_peak(model, batch_size, plain_batch)
    for name, planner in (("reactive", None), ("followed", "torchdelta")):
        try:
            found[name] = _limited(timer, model, batch_size, limit_bytes, planner)
        except (torch.OutOfMemoryError, RuntimeError) as error:
            least_bytes = getattr(error, "least_budget_bytes", None)
            found[name] = {"error": f"{type(error).__name__}: {error}", "least_budget_bytes": least_bytes}
    # Last, because it runs as many steps as each of them: all losses are compared.
    num_steps = max(len(found[name].get("losses", ())) for name in ("reactive", "followed"))
    plain = build(model, batch_size)
    plain.steps(max(NUM_SETTLING_STEPS, num_steps - timer.num_steps))
    found["plain"] = timer.time(plain, batch_size) | {"losses": plain.losses}
    for name in ("reactive", "followed"):
        if "losses" in found[name]:
            losses = found[name].pop("losses")
            found[name] |= {"num_steps": len(losses), "same_losses": losses == plain.losses[: len(losses)]}
    del plain
    found["plain_peak_bytes"] = plain_peak(model, batch_size)
    return found


@dataclass(frozen=True)
class _Timer:
    """Times steps beside those of plain's largest batch."""

    beside: PlainProcess
    plain_batch: int
    num_timed: int

    @property
    def num_steps(self) -> int:
        """How many steps `time` runs: the first one does not count, because the second process was idle before."""
        return 1 + self.num_timed

    def time(self, trainer: Trainer, batch_size: int) -> dict[str, Any]:
        """Run timed steps. Return their times, those beside them, and the time per sample over that beside it."""
        block = self.beside.timed_pairs(lambda: trainer.steps(1), self.num_steps)
        times_s, plain_times_s = block["times_s"], block[BESIDE]["times_s"]
        ratios = [own / plain for own, plain in zip(times_s, plain_times_s, strict=True)][1:]
        over_plain = statistics.median(ratios) * self.plain_batch / batch_size
        return {"times_s": times_s, "plain_times_s": plain_times_s, "sample_over_plain": over_plain}


def _limited(timer: _Timer, model: str, batch_size: int, limit_bytes: int, planner: str | None) -> dict[str, Any]:
    trainer = build(model, batch_size)
    extra: dict[str, Any] = {}
    with MemoryBudget(limit_bytes, Config(planner=planner)) as budget:
        session: Any = current_session()
        if planner is None:
            trainer.steps(NUM_SETTLING_STEPS)
        else:
            trainer.steps(NUM_BEFORE_PLAN)
            if not session.programs.wait(PLAN_WAIT_S) and session.counters.num_evictions:
                raise RuntimeError(session.programs.why_no_plan or "no plan was asked for")
            settle(session.programs, lambda: trainer.steps(1))
        timed = timer.time(trainer, batch_size)
        if planner is not None:
            extra["num_followed_steps"] = session.follower.num_followed_steps
            extra["num_unplanned"] = session.counters.num_unplanned
    summary = budget.summary()
    return {
        **timed,
        **extra,
        "losses": trainer.losses,
        "peak_bytes": summary.peak_bytes,
        "swapped_out_bytes": summary.steps[-1].swapped_out_bytes,
        "recomputed_bytes": summary.steps[-1].recomputed_bytes,
    }


def largest(model: str, start_batch: int, limit_bytes: int) -> dict[str, Any]:
    """Return the largest batch that trains under the limit, by doubling and then bisection, as a worker."""
    trials: dict[int, dict[str, Any]] = {}

    def trains(batch_size: int) -> bool:
        trainer = build(model, batch_size)
        began_s = time.perf_counter()
        trials[batch_size] = trial = {"trains": False}
        with contextlib.suppress(torch.OutOfMemoryError):
            try:
                with MemoryBudget(limit_bytes, Config(planner=None)) as budget:
                    trainer.steps(TRIAL_STEPS)
                trial |= {"trains": True, "peak_bytes": budget.summary().peak_bytes}
            except torch.OutOfMemoryError as error:
                trial["least_budget_bytes"] = getattr(error, "least_budget_bytes", None)
                raise
            finally:
                trial["time_s"] = time.perf_counter() - began_s
        return trial["trains"]

    low, high = start_batch, 2 * start_batch
    while trains(high):
        low, high = high, 2 * high
    while high - low > max(1, int(SEARCH_RESOLUTION * low)):
        middle = (low + high) // 2
        low, high = (middle, high) if trains(middle) else (low, middle)
    return {"largest_batch": low, "least_refused_batch": high, "trials": trials}
