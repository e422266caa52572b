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
from benchmarks.gpu.subjects import SHARES, SUBJECTS, Subject, checkpointed, deterministic
from benchmarks.outcome import Outcome, format_table
from benchmarks.turns import median_interval, take_turns
from torchdelta import Config, MemoryBudget
from torchdelta.cli.allocator_peak import AllocatorPeak, MeterError
from torchdelta.runtime.current import current_session

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterable
    from types import TracebackType

NUM_BITS_STEPS = 3
NUM_STEPS = 5
NUM_SETTLING_STEPS = 4
NUM_SETTLING_FOLLOWED = 8  # a plan may be replaced once measured times are known, and its backward proved
PLAIN, FITS, REACTIVE, FOLLOWED = "plain", "a budget that fits", "torchdelta, reacting", "torchdelta, following"
CHECKPOINT, OFFLOAD = "checkpoint", "save_on_cpu"
AT_CHECKPOINT = "following at checkpoint's peak"
PEERS = (PLAIN, FITS, REACTIVE, FOLLOWED, OFFLOAD, CHECKPOINT, AT_CHECKPOINT)
PLANNED = (FOLLOWED, AT_CHECKPOINT)
PLAN_WAIT_S = 120.0
LEAST_OVERLAP = 0.3
MIB = 2**20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this benchmark's own options."""
    parser.add_argument("--device", default="cuda", help="cuda (default); cpu tries the harness")
    parser.add_argument("--tiny", action="store_true", help="models of no use but for trying the harness")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--share", type=float, default=None, help="budget as a share of the plain peak")


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
        share = SHARES[name] if options.share is None else options.share
        case = Case(outcome, lambda build=build: build(device, is_tiny=options.tiny), device, share)
        outcome.data[name] = case.data
        try:
            case.check_bits()
            rows += case.race(2 if options.quick else options.rounds)
        except torch.OutOfMemoryError as error:  # of the budget or of the device: the other models are still measured
            outcome.check(f"{name}: memory suffices", str(error).splitlines()[0], passed=False)
            case.data["error"] = f"{type(error).__name__}: {error}"
    print(format_table(["model", "how", "step time / plain", "peak / plain", "processor time / plain"], rows))
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
        """Train plainly, twice, and under the budget, without and with plans: same bits, active bytes within it."""
        with deterministic():
            plain, self.plain_peak_bytes = self._train(None)
            again, _ = self._train(None)
            self.budget_bytes = int(self.share * self.plain_peak_bytes)
            budget = MemoryBudget(self.budget_bytes, Config(planner=None))
            ours, _ = self._train(budget)
            self._check_equal("plain equals plain", plain, again)
            self._check_equal("same bits", plain, ours)
            if can_plan():
                plain, _ = self._train(None, NUM_SETTLING_FOLLOWED)
                planned = MemoryBudget(self.budget_bytes, Config(planner="torchdelta"))
                ours, _ = self._train(planned, NUM_SETTLING_FOLLOWED, ", following")
                self._check_equal("same bits, following", plain, ours)
        summary = budget.summary()
        self.data["summary"] = summary.as_dict()
        acted = summary.swapped_out_bytes + summary.recomputed_bytes
        self.outcome.check(f"{self.name}: something left the device", f"{acted / MIB:.1f} MiB", passed=acted > 0)

    def _check_equal(self, what: str, one: str, other: str) -> None:
        self.outcome.check(f"{self.name}: {what}", "same bits" if one == other else "differ", passed=one == other)

    def _train(self, budget: MemoryBudget | None, num_steps: int = NUM_BITS_STEPS, how: str = "") -> tuple[str, int]:
        """Train from fixed seeds, and hold the active bytes against a budget. Returns the fingerprint and the peak."""
        meter = Peaks(self.device)
        with meter:
            subject = self.build()
        self.name = subject.name
        torch.manual_seed(1)
        peaks_bytes, losses = [], []
        with budget or contextlib.nullcontext():
            for index in range(num_steps):
                with meter:
                    losses.append(subject.step())
                peaks_bytes.append(meter.peak_bytes)
                if budget is not None and budget.config.planner is not None and index in (1, 3):
                    _wait_for_plan()
        if budget is not None:
            later = max(peaks_bytes[1:])
            self.data[f"peaks_bytes{how}"] = peaks_bytes
            detail = (
                f"{later / self.budget_bytes:.4f} of the budget, first step {peaks_bytes[0] / self.budget_bytes:.4f}"
            )
            self.outcome.check(
                f"{self.name}: active bytes from the second step on{how}", detail, passed=later <= self.budget_bytes
            )
        return subject.digest(*losses), max(peaks_bytes)

    def check_overlap(self, subject: Subject, name: str) -> None:
        """Read from the device's events how much of a step's copies runs beside kernels."""
        if self.device.type != "cuda":
            return
        found = overlap.measure(subject.step)
        self.data[f"overlap, {name}"] = asdict(found) | {"share": found.share}
        if name != FOLLOWED or not found.copy_s:
            return
        detail = (
            f"{found.share:.0%} of {found.copy_s * 1e3:.1f} ms of copies run beside {found.kernel_s * 1e3:.1f} ms of "
            "kernels"
        )
        self.outcome.check(
            f"{self.name}: transfers beside compute", detail, passed=found.share >= LEAST_OVERLAP, required=False
        )

    def race(self, num_rounds: int) -> list[list[str]]:
        """Time plain, ours and the peers in turns. Returns the rows of the table."""
        subject = self.build()
        subject.step()
        peers = PEERS if can_plan() else tuple(peer for peer in PEERS if peer not in PLANNED)
        checkpoint_bytes = int(self._block(subject, CHECKPOINT)["peak_bytes"])
        budgets_bytes = dict.fromkeys(PEERS, self.budget_bytes) | {
            FITS: 4 * self.plain_peak_bytes,
            AT_CHECKPOINT: checkpoint_bytes,
        }
        self.data["budgets_bytes"] = budgets_bytes
        rounds = take_turns(peers, num_rounds, lambda peer: self._block_or_error(subject, peer, budgets_bytes[peer]))
        self.data["rounds"] = rounds
        refused = {peer: found[peer]["error"] for found in rounds for peer in peers if "error" in found[peer]}
        for peer, error in refused.items():
            self.outcome.check(f"{self.name}: {peer}: memory suffices", error, passed=False)
        peers = tuple(peer for peer in peers if peer not in refused)
        for peer in PLANNED:
            if peer in peers:
                self._check_followed(peer, budgets_bytes[peer], [found[peer] for found in rounds])
        for peer in (FITS, REACTIVE, FOLLOWED, OFFLOAD):
            if peer in peers:
                with self._scope(subject, peer, budgets_bytes[peer]):
                    _settle(subject, peer)
                    self.check_overlap(subject, peer)
        self.data["over_plain"] = over_plain(rounds, peers)
        return [
            [subject.name, peer, str(found["step_time"]), f"{found['peak']:.3f}", str(found["processor_time"])]
            for peer, found in _intervals(rounds, peers).items()
        ]

    def _check_followed(self, peer: str, budget_bytes: int, blocks: list[dict[str, float]]) -> None:
        """Hold the followed steps against the budget, and record how many of the timed steps were followed."""
        num_followed = int(sum(block["num_followed_steps"] for block in blocks))
        peak_bytes = max(block["peak_bytes"] for block in blocks)
        detail = f"{peak_bytes / budget_bytes:.4f} of the budget; {num_followed} steps followed a plan"
        self.outcome.check(
            f"{self.name}: active bytes, {peer}", detail, passed=peak_bytes <= budget_bytes and num_followed > 0
        )

    def _scope(self, subject: Subject, peer: str, budget_bytes: int) -> Any:
        if peer in (FITS, REACTIVE):
            return MemoryBudget(budget_bytes, Config(planner=None))
        if peer in PLANNED:
            return MemoryBudget(budget_bytes, Config(planner="torchdelta"))
        if peer == OFFLOAD:
            return torch.autograd.graph.save_on_cpu(pin_memory=self.device.type == "cuda")
        if peer == CHECKPOINT:
            return checkpointed(subject.model)
        return contextlib.nullcontext()

    def _block_or_error(self, subject: Subject, peer: str, budget_bytes: int) -> dict[str, Any]:
        try:
            return self._block(subject, peer, budget_bytes)
        except torch.OutOfMemoryError as error:
            subject.optimizer.zero_grad()
            return {"error": str(error).splitlines()[0]}

    def _block(self, subject: Subject, peer: str, budget_bytes: int = 0) -> dict[str, float]:
        """Run a few steps one way; the first ones, in which memory, plans and times settle, are kept apart."""
        scope = self._scope(subject, peer, budget_bytes)
        with scope:
            _settle(subject, peer)
            meter = Peaks(self.device)
            with meter:
                began_s, began_host_s = time.perf_counter(), time.process_time()
                for _ in range(NUM_STEPS):
                    subject.step()
                host_s = (time.process_time() - began_host_s) / NUM_STEPS
                if self.device.type != "cpu":
                    torch.accelerator.synchronize()
                step_s = (time.perf_counter() - began_s) / NUM_STEPS
        block = {"step_s": step_s, "host_s": host_s, "peak_bytes": meter.peak_bytes}
        if peer in PLANNED:
            follow = scope.summary().follow
            block |= {"num_followed_steps": follow.num_followed_steps, "num_unplanned": follow.num_unplanned}
            block |= {"predicted_time_s": follow.predicted_time_s, "predicted_peak_bytes": follow.predicted_peak_bytes}
        return block


def _intervals(rounds: list[dict[str, dict[str, Any]]], peers: Iterable[str]) -> dict[str, dict[str, Any]]:
    return {
        peer: {
            "step_time": median_interval([found[peer]["step_s"] / found[PLAIN]["step_s"] for found in rounds]),
            "processor_time": median_interval([found[peer]["host_s"] / found[PLAIN]["host_s"] for found in rounds]),
            "peak": statistics.median(found[peer]["peak_bytes"] / found[PLAIN]["peak_bytes"] for found in rounds),
        }
        for peer in peers
    }


def over_plain(rounds: list[dict[str, dict[str, Any]]], peers: Iterable[str]) -> dict[str, dict[str, float]]:
    """Return the medians of each way's step time, processor time and peak, as multiples of plain's."""
    found = {
        peer: {
            "step_time": ratios["step_time"].median,
            "processor_time": ratios["processor_time"].median,
            "peak": ratios["peak"],
        }
        for peer, ratios in _intervals(rounds, peers).items()
    }
    if CHECKPOINT in found and AT_CHECKPOINT in found:
        ratio = [blocks[AT_CHECKPOINT]["step_s"] / blocks[CHECKPOINT]["step_s"] for blocks in rounds]
        found[AT_CHECKPOINT]["step_time_over_checkpoint"] = statistics.median(ratio)
    return found


def _settle(subject: Subject, peer: str) -> None:
    """Run steps until those that follow are alike."""
    for index in range(NUM_SETTLING_FOLLOWED if peer in PLANNED else NUM_SETTLING_STEPS):
        subject.step()
        if peer in PLANNED and index in (1, 3):
            _wait_for_plan()


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
