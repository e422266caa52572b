"""The budget holds: peaks at the allocator, bits, the negative control, the least budget and what lies below it.

For each model and optimizer, every run in a process of its own: the plain run twice (its bits must equal themselves),
a record-only run (the runtime's own peak against the allocator's), the budgets at 80 to 30 % of the plain peak, the
same with eviction off (must exceed), then the least budget by bisection and four budgets below it.

A BudgetError names two least budgets, and both are tried. The first is for a run whose gradients live on from one step
to the next: the steps are run like that in the budget that was named, and have to finish. The second is for a run that
sets its gradients to None before each forward, as the steps do otherwise here: it is compared with the least budget
that the bisection found.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from benchmarks import models
from benchmarks.launch import WorkerError, WorkerTimeoutError, run_worker
from benchmarks.outcome import Outcome, format_table

if TYPE_CHECKING:
    import argparse

SHARES = (0.8, 0.6, 0.5, 0.4, 0.3)
SHARES_BELOW = (0.98, 0.9, 0.7, 0.5)
CONTROL_SHARE = 0.6
NUM_STEPS = 3
MIB = 2**20
RECORDED_TOLERANCE = 0.01
# What the benchmark itself allocates in a step, outside the scope's reach: fingerprints of gradients.
REPORTED_BYTES = 4096
LEAST_SHARES = {"gpt2-like": 0.28, "bert-like": 0.35, "resnet50": 0.50}
# Below 2 % of the smallest least share above, so that a budget of .98 of the least is really below it.
BISECTION_RESOLUTION = 0.005
NAMED_LEAST_TOLERANCE = 0.05
RECORD_ONLY_FACTOR = 4
# A run that does not end is one that the budget was too small for, and a broken promise besides.
TOO_SMALL = ("budget_error", "timeout")
UNMETERED = {"metered": False, "with_gradients": False}

Record = dict[str, Any]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this benchmark's own options."""
    parser.add_argument("--optimizers", nargs="+", choices=models.OPTIMIZERS, help="(default: all; --quick: sgd)")
    parser.add_argument("--policy", help="measure this policy (default: the library's)")


def run(options: argparse.Namespace) -> Outcome:
    """Measure every model and optimizer asked for."""
    outcome = Outcome()
    optimizers = options.optimizers or (["sgd"] if options.quick else models.OPTIMIZERS)
    for model in options.models:
        for optimizer in optimizers:
            print(f"{model}, {optimizer}", flush=True)
            case = Case(options, outcome, model, optimizer)
            outcome.data[f"{model} {optimizer}"] = case.data
            case.measure_plain()
            case.measure_record_only()
            case.measure_shares((0.6, 0.5) if options.quick else SHARES)
            case.measure_control()
            if not options.quick:
                case.measure_least()
    print()
    print(_summarize(outcome))
    return outcome


class Case:
    """One model with one optimizer."""

    def __init__(self, options: argparse.Namespace, outcome: Outcome, model: str, optimizer: str) -> None:
        self.options = options
        self.outcome = outcome
        self.model = model
        self.label = f"{model} {optimizer}"
        # AdamW runs beside SGD: what it does is stated, not required.
        self.required = optimizer == "sgd"
        self.settings = {"model": model, "optimizer": optimizer, "num_steps": NUM_STEPS}
        self.data: Record = {}
        self.plain: Record = {}
        self.plain_peak_bytes = 0
        self.plain_step_s = 0.0

    def measure_plain(self) -> None:
        """Run plain with and without the meter: the peak, the bits and the times to compare with."""
        self.plain = self._work()
        unmetered = self._work(metered=False)
        self.plain_peak_bytes = self.plain["scope_peak_bytes"]
        # The slowest of a few: the first step warms up, and an error in the first step is held against such a one.
        self.plain_step_s = max(step["time_s"] for step in unmetered["steps"])
        self.data["plain"] = self.plain
        self.data["plain_unmetered"] = unmetered
        peaks = ", ".join(f"{step['allocator_peak_bytes'] / MIB:.1f}" for step in self.plain["steps"])
        live, known = self.plain["allocator_live_bytes"], self.plain["known_live_bytes"]
        print(f"    plain peak at the allocator, MiB per step: {peaks}; live at the end {live}, known {known} bytes")
        self._check(
            "plain equals plain", _difference(self.plain, unmetered) or "same bits", _same(self.plain, unmetered)
        )

    def measure_record_only(self) -> None:
        """Run with a budget that never binds: what the runtime counts must be what the allocator counts."""
        record = self._work(RECORD_ONLY_FACTOR * self.plain_peak_bytes)
        self.data["record_only"] = record
        if record["outcome"] != "finished":
            self._check("record-only run", str(record["error"]), False)
            return
        known, peak = record["summary"]["peak_bytes"], record["scope_peak_bytes"]
        detail = f"known {known / MIB:.1f}, allocator {peak / MIB:.1f}, plain {self.plain_peak_bytes / MIB:.1f} MiB"
        self._check("recorded peak within 1 %", detail, abs(known - peak) <= RECORDED_TOLERANCE * peak)
        detail = f"{peak / self.plain_peak_bytes:.4f} of the plain peak"
        self._check("recording adds no peak", detail, peak <= (1 + RECORDED_TOLERANCE) * self.plain_peak_bytes)
        self._check_bits("record-only", record)

    def measure_shares(self, shares: tuple[float, ...]) -> None:
        """Run inside each share of the plain peak."""
        self.data["shares"] = {}
        for share in shares:
            budget_bytes = int(share * self.plain_peak_bytes)
            record = self._work(budget_bytes)
            self.data["shares"][str(share)] = record
            name = f"{share:.0%}"
            if record["outcome"] != "finished":
                named = (record["error"]["least_budget_bytes"] or 0) / self.plain_peak_bytes
                print(f"    ---- {name}: {record['outcome']}, names {named:.3f} of the plain peak", flush=True)
                continue
            self._check_peaks(name, record, budget_bytes)
            self._check_bits(name, record)

    def _check_peaks(self, name: str, record: Record, budget_bytes: int) -> None:
        """Hold the peaks at the allocator against the budget: never above it, but for what the first step learns."""
        first_bytes, *later_bytes = [step["allocator_peak_bytes"] for step in record["steps"]]
        workspace_bytes = record["largest_workspace_bytes"]
        if not record["counting_allocator"].startswith("on") or workspace_bytes is None:
            self._check(f"{name} counted at the allocator", record["counting_allocator"], False)
            return
        later = max(later_bytes)
        self._check(f"{name} peak from the second step on", f"{later / budget_bytes:.4f}", later <= budget_bytes)
        over = max(0, first_bytes - budget_bytes)
        detail = (
            f"{first_bytes / budget_bytes:.4f}: {over / MIB:.2f} MiB above, largest op's own workspace "
            f"{workspace_bytes / MIB:.2f} MiB"
        )
        self._check(f"{name} peak of the first step", detail, over <= workspace_bytes)
        reported = record["summary"]["peak_bytes"]
        measured = max(first_bytes, later)
        detail = f"reported {reported / MIB:.3f}, measured {measured / MIB:.3f} MiB"
        self._check(f"{name} reported peak is the allocator's", detail, abs(reported - measured) <= REPORTED_BYTES)

    def measure_control(self) -> None:
        """Run with eviction off: the measure must see the budget exceeded, or it sees nothing."""
        budget_bytes = int(CONTROL_SHARE * self.plain_peak_bytes)
        record = self._work(budget_bytes, decisions="keep")
        self.data["control"] = record
        ratio = record["scope_peak_bytes"] / budget_bytes
        self._check("eviction off exceeds the budget", f"{ratio:.4f} of the budget", ratio > 1.01)

    def measure_least(self) -> None:
        """Bisect the least budget at which the steps finish, then look below it."""
        low, high = self._bracket()
        runs: list[Record] = []
        bound_bytes = int(LEAST_SHARES.get(self.model, 0) * self.plain_peak_bytes)
        while True:
            if high - low > BISECTION_RESOLUTION * self.plain_peak_bytes:
                middle = (low + high) // 2
            elif low < bound_bytes < high:
                # The share that is wanted lies in the last interval: ask it directly.
                middle = bound_bytes
            else:
                break
            record = self._work(middle, **UNMETERED)
            runs.append(record)
            if record["outcome"] == "crashed":
                # A crash says nothing about the budget: no least is stated.
                self.data["least_runs"] = runs
                return
            if record["outcome"] == "finished":
                high = middle
            else:
                low = middle
        share = high / self.plain_peak_bytes
        self.data["least"] = {"least_budget_bytes": high, "too_small_bytes": low, "share": share, "runs": runs}
        bound = LEAST_SHARES.get(self.model)
        if bound is not None:
            self._check("least budget", f"{share:.3f} of the plain peak (wanted: {bound:.2f})", share <= bound)
        self.data["below"] = {}
        for fraction in SHARES_BELOW:
            self._look_below(fraction, high)

    def _bracket(self) -> tuple[int, int]:
        """Return a budget that is too small and one that is enough, from the runs made so far; crashes tell nothing."""
        finished = [r["budget_bytes"] for r in self.data["shares"].values() if r["outcome"] == "finished"]
        failed = [r["budget_bytes"] for r in self.data["shares"].values() if r["outcome"] in TOO_SMALL]
        high = min(finished, default=2 * self.plain_peak_bytes)
        return max((size for size in failed if size < high), default=0), high

    def _look_below(self, fraction: float, least_bytes: int) -> None:
        record = self._work(int(fraction * least_bytes), **UNMETERED)
        self.data["below"][str(fraction)] = record
        name = f"at {fraction} of the least"
        if record["outcome"] != "budget_error":
            self._check(f"{name}: BudgetError", record["outcome"], False)
            return
        error = record["error"]
        steps = error["since_scope_s"] / self.plain_step_s
        detail = f"{error['type']} in step {error['step'] + 1} after {steps:.2f} plain steps"
        self._check(f"{name}: BudgetError in time", detail, error["type"] == "BudgetError" and steps <= 1)
        freeing = error["least_freeing_gradients_bytes"] or 0
        detail = f"{freeing / least_bytes:.3f} of the bisected"
        is_near = abs(freeing - least_bytes) <= NAMED_LEAST_TOLERANCE * least_bytes
        self._check(f"{name}: named least that frees gradients", detail, is_near)
        named = error["least_budget_bytes"] or 0
        detail = f"{named / least_bytes:.3f} of the bisected: {self._outcome_keeping_gradients(named)}"
        self._check(f"{name}: named least is enough", detail, self._outcome_keeping_gradients(named) == "finished")

    def _outcome_keeping_gradients(self, budget_bytes: int) -> str:
        """Run the steps with gradients that live on, in a budget that an error named; each budget once."""
        advised = self.data.setdefault("advised", {})
        if str(budget_bytes) not in advised:
            advised[str(budget_bytes)] = self._work(budget_bytes, **UNMETERED, keeps_gradients=True)
        return advised[str(budget_bytes)]["outcome"]

    def _work(self, budget_bytes: int | None = None, *, decisions: str | None = None, **settings: bool) -> Record:
        config = {"policy": self.options.policy, "decisions": decisions}
        settings |= self.settings | {"config": {name: value for name, value in config.items() if value}}
        try:
            return run_worker(
                "steps:run",
                threads=self.options.threads,
                timeout_s=self.options.timeout,
                budget_bytes=budget_bytes,
                **settings,
            )
        except WorkerError as error:
            if budget_bytes is None:
                raise
            # A crash inside a budget is a finding, not the end of the benchmark.
            self._check("worker", str(error), False)
            return {
                "outcome": "timeout" if isinstance(error, WorkerTimeoutError) else "crashed",
                "budget_bytes": budget_bytes,
                "error": {"type": type(error).__name__, "message": str(error), "least_budget_bytes": None},
                "scope_peak_bytes": 0,
            }

    def _check(self, name: str, detail: str, passed: bool) -> None:
        self.outcome.check(f"{self.label}: {name}", detail, passed=passed, required=self.required)

    def _check_bits(self, name: str, record: Record) -> None:
        difference = _difference(self.plain, record)
        # The bits are a promise with every optimizer.
        self.outcome.check(f"{self.label}: {name} bits", difference or "same as plain", passed=not difference)


def _same(one: Record, other: Record) -> bool:
    return not _difference(one, other)


def _difference(one: Record, other: Record) -> str:
    """Say where two runs first differ; empty when their bits are the same."""
    if len(one["steps"]) != len(other["steps"]):
        return f"{len(one['steps'])} steps against {len(other['steps'])}"
    for left, right in zip(one["steps"], other["steps"], strict=True):
        for key in ("loss", "gradients_sha256", "random_state_sha256"):
            if left[key] != right[key]:
                return f"step {left['index'] + 1}: {key} {left[key]} against {right[key]}"
    if one["state_sha256"] != other["state_sha256"]:
        return "parameters or buffers differ after the last step"
    return ""


def _summarize(outcome: Outcome) -> str:
    rows = []
    for label, data in outcome.data.items():
        plain = data["plain"]["scope_peak_bytes"]
        row = [label, f"{plain / MIB:.1f}"]
        for share in SHARES:
            record = data.get("shares", {}).get(str(share))
            done = record is not None and record["outcome"] == "finished"
            row.append(f"{record['scope_peak_bytes'] / record['budget_bytes']:.4f}" if record and done else "-")
        least = data.get("least")
        row.append(f"{least['share']:.3f}" if least else "-")
        rows.append(row)
    header = ["peak / budget", "plain MiB", *(f"{share:.0%}" for share in SHARES), "least share"]
    return format_table(header, rows)
