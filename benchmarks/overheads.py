"""What small parts of the runtime cost, and that nothing grows: counting, checksums, copies, 200 steps.

`counting`: steps with the counting allocator and without, in turns. Its work is a table entry for each allocation and
two questions for each op, far below the noise of a shared machine over a whole step, so these are timed by themselves
as well and added up for the model's number of ops and allocations.

`checksums`: steps that swap all saved bytes to the disk, with a checksum and without, in turns. Copies run on threads
of their own: with one intra-op thread there may be a core to hide a checksum on, with as many as cores there is none.
Processor time stands beside the wall's: it is what a checksum costs where nothing hides it.

`copies`: what copies to and from the disk take from a step that computes meanwhile (copies.py). Plans for CPUs price
copies by it.

`growth`: tensor bytes, Python objects by type, open files, threads and resident memory at step 20 and at step 200. A
plain run is the control: what grows there is no fault of the runtime.
"""

from __future__ import annotations

import contextlib
import json
import statistics
import timeit
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch

from benchmarks import models
from benchmarks.disk import measure_disk
from benchmarks.held import count_held, describe_types
from benchmarks.launch import WorkerError, run_worker
from benchmarks.outcome import Outcome, format_table
from benchmarks.turns import median_interval, ratios
from torchdelta.native.counting import Counter, new_counter

if TYPE_CHECKING:
    import argparse

PARTS = ("counting", "checksums", "copies", "growth")
WITH, WITHOUT = "with", "without"
TURNS_TIMEOUT_S = 7200
COUNTING_SHARE = 0.01  # of a step, at most
CHECKSUM_SHARE = 0.02  # checksums would be on by default if they cost less than this share of a step
CHECKSUM_MODEL = "gpt2-like"
CHECKSUM_THREADS = (1, 2)
COPY_COLUMNS = ("lost_s_per_gb", "cpu_s_per_gb", "stolen_s_per_gb", "lost_s_per_taken_s", "gb_per_step")
GROWTH_MODEL = "tiny"
GROWTH_BUDGET_SHARE = 0.8  # AdamW's states make the least budget of so small a model large
GROWTH_STEPS = (20, 200)
GROWTH_POLICIES = (None, "recompute-only", "swap-only")
RSS_TOLERANCE = 0.03
NUM_CALLS = 10_000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this benchmark's own options."""
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--rounds", type=int, default=12, help="of the turns with and without")


def run(options: argparse.Namespace) -> Outcome:
    """Measure the parts asked for."""
    outcome = Outcome()
    if options.quick:
        options.rounds, options.models = 2, options.models[:1]
    measure = {
        "counting": measure_counting,
        "checksums": measure_checksums,
        "copies": measure_copies,
        "growth": measure_growth,
    }
    for part in options.parts:
        outcome.data[part] = {}
        measure[part](outcome, outcome.data[part], options)
    return outcome


def compare(
    model: str, settings: dict[str, dict[str, Any]], threads: int, options: argparse.Namespace
) -> dict[str, Any]:
    """Train in turns under two settings and add the intervals of their ratio, by the wall and by the processor."""
    found = run_worker(
        "turns:run",
        threads=threads,
        timeout_s=TURNS_TIMEOUT_S,
        model=model,
        contenders=settings,
        num_rounds=options.rounds,
    )
    if found["crashed"]:
        raise WorkerError(str(found["crashed"]))
    for name, key in (("wall", "times_s"), ("processor", "cpu_times_s")):
        found[name] = asdict(median_interval(ratios(found["rounds"], WITH, WITHOUT, key)))
    return found


def format_ratio(interval: dict[str, float]) -> str:
    """Return a median with its interval."""
    return f"{interval['median']:.3f} [{interval['low']:.3f}, {interval['high']:.3f}]"


def measure_counting(outcome: Outcome, data: dict[str, Any], options: argparse.Namespace) -> None:
    """Hold the parts of counting, added up, against each model's step."""
    rows: list[list[str]] = []
    for model in options.models:
        settings = {WITH: {"count_allocations": True}, WITHOUT: {"count_allocations": False}}
        found = compare(model, settings, options.threads, options)
        parts = run_worker("overheads:count_parts", threads=options.threads, timeout_s=options.timeout, model=model)
        parts_s = parts["num_allocations"] * parts["allocation_s"] + parts["num_ops"] * parts["op_s"]
        step_s = statistics.median(s for blocks in found["rounds"] for s in blocks[WITHOUT]["times_s"][1:])
        share = parts_s / step_s
        data[model] = {**found, "parts": parts, "parts_share": share}
        outcome.check(f"{model}: counting, share of a step", f"{share:.3%}", passed=share < COUNTING_SHARE)
        rows.append([model, f"{share:.3%}", format_ratio(found["wall"])])
    print(format_table(["model", "counting's parts added up", "step with / without"], rows))


def count_parts(model: str) -> dict[str, float]:
    """Count a model's ops and allocations in a step and time what counting adds to each, as a worker."""
    from torchdelta import MemoryBudget
    from torchdelta.cli.allocator_peak import AllocatorPeak
    from torchdelta.errors import NativeError

    counter = new_counter()
    if isinstance(counter, NativeError):
        raise counter
    workload = models.build(model)
    optimizer = models.build_optimizer("sgd", workload.model)
    workload.train(optimizer)
    with AllocatorPeak() as meter:
        workload.train(optimizer)
    with MemoryBudget("1TiB") as budget:
        workload.train(optimizer)
    trace = budget.trace()
    assert trace is not None
    return {"num_allocations": meter.num_events // 2, "num_ops": len(trace.ops), **unit_times_s(counter)}


def unit_times_s(counter: Counter, num_calls: int = NUM_CALLS) -> dict[str, float]:
    """Return the seconds that counting adds to one allocation and its free, and to one op."""
    from torchdelta import MemoryBudget
    from torchdelta.aten.facts import facts_of
    from torchdelta.runtime.current import current_session

    def allocate() -> None:
        torch.empty(1024)

    differences_s: list[float] = []
    for _ in range(15):
        counter.start()
        counted_s = timeit.timeit(allocate, number=num_calls)
        counter.stop()
        differences_s.append((counted_s - timeit.timeit(allocate, number=num_calls)) / num_calls)

    with MemoryBudget("1TiB"):
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

        op_s = statistics.median(timeit.repeat(ask, number=num_calls, repeat=5)) / num_calls
    return {"allocation_s": max(0.0, statistics.median(differences_s)), "op_s": op_s}


def measure_checksums(outcome: Outcome, data: dict[str, Any], options: argparse.Namespace) -> None:
    """Compare steps that swap everything, with checksums and without."""
    settings = {name: {"decisions": "swap", "checksum": name == WITH} for name in (WITH, WITHOUT)}
    outcome.disk = measure_disk()
    rows: list[list[str]] = []
    for num_threads in CHECKSUM_THREADS[:1] if options.quick else CHECKSUM_THREADS:
        label = f"{CHECKSUM_MODEL}, {num_threads} threads"
        data[label] = found = compare(CHECKSUM_MODEL, settings, num_threads, options)
        for key in ("wall", "processor"):
            outcome.check(
                f"{label}: checksums cost less than {CHECKSUM_SHARE:.0%} of a step by the {key}",
                format_ratio(found[key]),
                passed=found[key]["median"] < 1 + CHECKSUM_SHARE,
                required=False,
            )
        num_steps = len(found["rounds"][0][WITH]["times_s"])
        swapped_bytes = found["summaries"][WITH]["swapped_out_bytes"] / num_steps
        rows.append(
            [label, f"{swapped_bytes / 2**20:.0f}", *(format_ratio(found[key]) for key in ("wall", "processor"))]
        )
    print(format_table(["model", "swapped MiB a step", "step with / without a checksum", "by the processor"], rows))


def measure_copies(outcome: Outcome, data: dict[str, Any], options: argparse.Namespace) -> None:
    """State what a gigabyte takes from steps beside it, with as many threads as asked for."""
    del outcome  # nothing is promised
    rows: list[list[str]] = []
    for model in options.models:
        data[model] = run_worker(
            "copies:measure",
            threads=options.threads,
            timeout_s=TURNS_TIMEOUT_S,
            model=model,
            num_rounds=options.rounds,
        )
        for kind, found in data[model]["medians"].items():
            rows.append([model, kind, *(f"{found[key]:.2f}" for key in COPY_COLUMNS)])
    print(format_table(["model", "copies", *(key.replace("_", " ") for key in COPY_COLUMNS)], rows))


def measure_growth(outcome: Outcome, data: dict[str, Any], options: argparse.Namespace) -> None:
    """Count in a plain run and under a few policies."""
    first, last = GROWTH_STEPS[0], 60 if options.quick else GROWTH_STEPS[1]
    plain = run_worker("steps:run", threads=options.threads, model=GROWTH_MODEL, optimizer="adamw")
    budget_bytes = int(GROWTH_BUDGET_SHARE * plain["scope_peak_bytes"])
    cases: dict[str, dict[str, Any]] = {"plain (control)": {}}
    for policy in GROWTH_POLICIES[:1] if options.quick else GROWTH_POLICIES:
        cases[policy or "default"] = {"budget_bytes": budget_bytes, "policy": policy}
    for name, settings in cases.items():
        try:
            counts = run_worker(
                "overheads:count_twice",
                threads=options.threads,
                timeout_s=options.timeout,
                first=first,
                last=last,
                **settings,
            )
        except WorkerError as error:
            outcome.check(f"growth, {name}", str(error), passed=False)
            continue
        data[name] = counts
        judge_growth(outcome, name, counts["first"], counts["last"])


def count_twice(first: int, last: int, budget_bytes: int | None = None, policy: str | None = None) -> dict[str, Any]:
    """Train for `last` steps and count what the process holds at two of them, as a worker."""
    workload = models.build(GROWTH_MODEL)
    optimizer = models.build_optimizer("adamw", workload.model)
    scope: Any = contextlib.nullcontext()
    if budget_bytes is not None:
        from torchdelta import Config, MemoryBudget

        scope = MemoryBudget(budget_bytes, Config(policy=policy or Config().policy, planner=None))
    # Kept as text: a container would be one more object in the second count.
    counts: dict[int, str] = {}
    # Counting once before the steps that count: what the first counting leaves behind is then in both.
    count_held()
    with scope as budget:
        for index in range(1, last + 1):
            workload.train(optimizer)
            if index in {first, last}:
                counts[index] = json.dumps({**count_held(), **_last_step(budget)})
    return {"first": json.loads(counts[first]), "last": json.loads(counts[last])}


def _last_step(budget: Any) -> dict[str, int]:
    """Return what the runtime itself counted in the step that has just ended; nothing for a plain run."""
    if budget is None:
        return {}
    step = budget.summary().steps[-1]
    return {"step_peak_bytes": step.peak_bytes, "step_kept_bytes": step.kept_bytes}


def judge_growth(outcome: Outcome, name: str, first: dict[str, Any], last: dict[str, Any]) -> None:
    """Compare the two counts of one case."""
    for key in (key for key in first if key not in {"types", "heap_bytes", "rss_bytes"}):
        detail = f"{first[key]} then {last[key]}"
        if key == "num_objects" and first[key] != last[key]:
            detail += f" ({describe_types(first['types'], last['types'])})"
        # Who leaves hangs on measured op times, so a step's own peak may differ a little: stated, not promised.
        required = not key.startswith("step_")
        outcome.check(f"growth, {name}: {key}", detail, passed=first[key] == last[key], required=required)
    change = last["rss_bytes"] / first["rss_bytes"] - 1
    outcome.check(f"growth, {name}: rss_bytes", f"{change:+.2%}", passed=abs(change) <= RSS_TOLERANCE)
