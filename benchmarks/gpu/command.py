"""The GPU benchmark: its options, its checks and its table."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import statistics
import subprocess
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.gpu import overlap
from benchmarks.gpu.subjects import SUBJECTS, Subject, checkpointed, deterministic
from benchmarks.outcome import Outcome, format_table
from benchmarks.turns import median_interval, take_turns
from torchdelta import Config, MemoryBudget
from torchdelta.cli.allocator_peak import AllocatorPeak, MeterError
from torchdelta.runtime.current import current_session

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable
    from types import TracebackType

SHARE = 0.5
NUM_STEPS = 3
FOLLOWED = "followed"
PEERS = ("plain", "torchdelta", FOLLOWED, "save_on_cpu", "checkpoint")
PLAN_WAIT_S = 120.0
LEAST_OVERLAP = 0.3
MIB = 2**20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this benchmark's own options."""
    parser.add_argument("--device", default="cuda", help="cuda (default); cpu tries the harness")
    parser.add_argument("--tiny", action="store_true", help="models of no use but for trying the harness")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--share", type=float, default=SHARE, help="budget as a share of the plain peak")


def run(options: argparse.Namespace) -> Outcome:
    """Measure each model.

    Raises:
        SystemExit: There is no such device here.
    """
    # cuBLAS is deterministic with a workspace of its own only; it reads this when it starts.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    device = torch.device(options.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise SystemExit("no CUDA device here: this benchmark needs one (--device cpu --tiny tries the harness)")
    outcome = Outcome()
    outcome.data["device"] = describe(device)
    rows = []
    for name, build in SUBJECTS.items():
        case = Case(outcome, lambda build=build: build(device, is_tiny=options.tiny), device, options.share)
        outcome.data[name] = case.data
        try:
            case.check_bits()
            case.check_overlap()
            rows += case.race(2 if options.quick else options.rounds)
        except torch.OutOfMemoryError as error:  # of the budget or of the device: the other models are still measured
            outcome.check(f"{name}: memory suffices", str(error).splitlines()[0], passed=False)
            case.data["error"] = f"{type(error).__name__}: {error}"
    print(format_table(["model", "how", "step time / plain", "peak / plain"], rows))
    return outcome


def describe(device: torch.device) -> dict[str, Any]:
    """Return what the figures depend on."""
    if device.type != "cuda":
        return {"name": device.type}
    properties = torch.cuda.get_device_properties(device)
    return {
        "name": properties.name,
        "memory_bytes": properties.total_memory,
        "capability": list(torch.cuda.get_device_capability(device)),
        "driver": driver_version(),
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "alloc_conf": os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF"),
    }


def driver_version() -> str | None:
    """Return the driver's version as it says it itself; None where its tool is not at hand."""
    try:
        command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        done = subprocess.run(command, capture_output=True, check=True, text=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.splitlines()[0].strip() if done.stdout.strip() else None


class Case:
    """One model."""

    def __init__(self, outcome: Outcome, build: Callable[[], Subject], device: torch.device, share: float) -> None:
        self.outcome = outcome
        self.build = build
        self.device = device
        self.share = share
        self.name = ""
        self.data: dict[str, Any] = {}
        self.budget_bytes = 0
        self.plain_peak_bytes = 0

    def check_bits(self) -> None:
        """Train plainly, twice, and under the budget: the same bits, and active bytes within it."""
        with deterministic():
            plain, self.plain_peak_bytes = self._train(None)
            again, _ = self._train(None)
            self.budget_bytes = int(self.share * self.plain_peak_bytes)
            budget = MemoryBudget(self.budget_bytes, Config(planner=None))
            ours, _ = self._train(budget)
        self.outcome.check(
            f"{self.name}: plain equals plain", "same bits" if plain == again else "differ", passed=plain == again
        )
        self.outcome.check(f"{self.name}: same bits", "same" if plain == ours else "differ", passed=plain == ours)
        summary = budget.summary()
        self.data["summary"] = summary.as_dict()
        acted = summary.swapped_out_bytes + summary.recomputed_bytes
        self.outcome.check(f"{self.name}: something left the device", f"{acted / MIB:.1f} MiB", passed=acted > 0)

    def _train(self, budget: MemoryBudget | None) -> tuple[str, int]:
        """Train from fixed seeds, and hold the active bytes against a budget. Returns the fingerprint and the peak."""
        meter = Peaks(self.device)
        with meter:
            subject = self.build()
        self.name = subject.name
        torch.manual_seed(1)
        peaks_bytes, losses = [], []
        with budget or contextlib.nullcontext():
            for _ in range(NUM_STEPS):
                with meter:
                    losses.append(subject.step())
                peaks_bytes.append(meter.peak_bytes)
        if budget is not None:
            later = max(peaks_bytes[1:])
            self.data["peaks_bytes"] = peaks_bytes
            detail = (
                f"{later / self.budget_bytes:.4f} of the budget, first step {peaks_bytes[0] / self.budget_bytes:.4f}"
            )
            self.outcome.check(
                f"{self.name}: active bytes from the second step on", detail, passed=later <= self.budget_bytes
            )
        return subject.digest(*losses), max(peaks_bytes)

    def check_overlap(self) -> None:
        """Swap everything, and read from the device's events how much of it ran beside kernels."""
        if self.device.type != "cuda":
            return
        subject = self.build()
        with MemoryBudget(self.budget_bytes * 4, Config(decisions="swap", tier="memory")):
            subject.step()
            found = overlap.measure(subject.step)
        self.data["overlap"] = asdict(found) | {"share": found.share}
        copy_ms, kernel_ms = found.copy_s * 1e3, found.kernel_s * 1e3
        detail = f"{found.share:.0%} of {copy_ms:.1f} ms of copies run beside {kernel_ms:.1f} ms of kernels"
        self.outcome.check(f"{self.name}: transfers beside compute", detail, passed=found.share >= LEAST_OVERLAP)

    def race(self, num_rounds: int) -> list[list[str]]:
        """Time plain, ours and the peers in turns. Returns the rows of the table."""
        subject = self.build()
        subject.step()
        peers = PEERS if can_plan() else tuple(peer for peer in PEERS if peer != FOLLOWED)
        rounds = take_turns(peers, num_rounds, lambda peer: self._block(subject, peer))
        self.data["rounds"] = rounds
        if FOLLOWED in peers:
            self._check_followed([found[FOLLOWED] for found in rounds])
        rows = []
        for peer in peers:
            times = median_interval([found[peer]["step_s"] / found["plain"]["step_s"] for found in rounds])
            peaks = statistics.median(found[peer]["peak_bytes"] / found["plain"]["peak_bytes"] for found in rounds)
            rows.append([subject.name, peer, str(times), f"{peaks:.3f}"])
        return rows

    def _check_followed(self, blocks: list[dict[str, float]]) -> None:
        """Hold the followed steps against the budget, and record how many of the timed steps were followed."""
        num_followed = int(sum(block["num_followed_steps"] for block in blocks))
        peak_bytes = max(block["peak_bytes"] for block in blocks)
        detail = f"{peak_bytes / self.budget_bytes:.4f} of the budget; {num_followed} steps followed a plan"
        self.outcome.check(
            f"{self.name}: active bytes of followed steps", detail, passed=peak_bytes <= self.budget_bytes
        )

    def _block(self, subject: Subject, peer: str) -> dict[str, float]:
        """Run a few steps one way; the first, which opens the scope, is kept apart.

        A followed block also keeps apart the step that is traced, the wait for its plan, and the first followed step.
        """
        scope: Any = contextlib.nullcontext()
        if peer == "torchdelta":
            scope = MemoryBudget(self.budget_bytes, Config(planner=None))
        elif peer == FOLLOWED:
            scope = MemoryBudget(self.budget_bytes, Config(planner="torchdelta"))
        elif peer == "save_on_cpu":
            scope = torch.autograd.graph.save_on_cpu(pin_memory=self.device.type == "cuda")
        elif peer == "checkpoint":
            scope = checkpointed(subject.model)
        with scope:
            subject.step()
            if peer == FOLLOWED:
                subject.step()
                _wait_for_plan()
                subject.step()
            meter = Peaks(self.device)
            with meter:
                began_s = time.perf_counter()
                for _ in range(NUM_STEPS):
                    subject.step()
                if self.device.type != "cpu":
                    torch.accelerator.synchronize()
                step_s = (time.perf_counter() - began_s) / NUM_STEPS
        block = {"step_s": step_s, "peak_bytes": meter.peak_bytes}
        if peer == FOLLOWED:
            follow = scope.summary().follow
            block |= {"num_followed_steps": follow.num_followed_steps, "num_unplanned": follow.num_unplanned}
            block |= {"predicted_time_s": follow.predicted_time_s, "predicted_peak_bytes": follow.predicted_peak_bytes}
        return block


def can_plan() -> bool:
    """Return whether the planners' packages are here, which the GPU machine may not have."""
    return importlib.util.find_spec("numba") is not None


def _wait_for_plan() -> None:
    """Wait until the traced step has its plan, or surely gets none."""
    session: Any = current_session()
    session.programs.wait(PLAN_WAIT_S)


class Peaks:
    """Highest active bytes of a stretch of work: the allocator's own figure; on CPU the sum of the profiler's events.

    On CPU the first stretch has to be the one that builds what lives; what was there before it is not counted.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.peak_bytes = 0
        self._meter = AllocatorPeak()

    def __enter__(self) -> None:
        """Begin a stretch."""
        if self.device.type != "cpu":
            torch.accelerator.synchronize()
            torch.accelerator.reset_peak_memory_stats()
        else:
            self._meter.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """End it and read its peak."""
        if self.device.type != "cpu":
            torch.accelerator.synchronize()
            self.peak_bytes = torch.accelerator.memory_stats()["active_bytes.all.peak"]
            return
        # What was freed may have been allocated before the first stretch: a sum below zero is no error here.
        with contextlib.suppress(MeterError):
            self._meter.__exit__(kind, error, traceback)
        self.peak_bytes = self._meter.segments[-1].peak_bytes
