"""A real limit: the kernel stops a plain training script, and `torchdelta run` finishes it with the same loss.

Four runs of scripts/train_gpt2.py, which knows nothing of torchdelta:

1. plain, no limit: its final loss, and the memory that it maps;
2. `torchdelta run`, no limit: the memory that it maps inside a budget of half the plain peak at the allocator;
3. plain, limit between the two: must be killed or fail;
4. `torchdelta run`, same limit: must finish with the final loss of 1, to the last bit.

The limit is RLIMIT_DATA, which any user may set and any kernel enforces; with --cgroup-parent a memory cgroup is made
below a group that you own (a delegated one, as `systemd-run --user --scope -p Delegate=yes` gives). With
--decision-class all, take a cgroup: what is mapped from the swap file at the end counts against RLIMIT_DATA.

All four runs get the same settings of glibc's allocator, without which a freed tensor often stays mapped and neither
side's figure says anything about tensors: MALLOC_ARENA_MAX=1 (one heap, also for threads), and MALLOC_MMAP_THRESHOLD_
with MALLOC_TRIM_THRESHOLD_ at 128 KiB (each large tensor is its own map and returns to the system when it is freed;
left alone, glibc raises the threshold to 32 MiB as soon as one such map is freed).
"""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.launch import REPOSITORY, run_worker, worker_environment
from benchmarks.limits import CgroupLimit, DataLimit, Finished, run_watched
from benchmarks.outcome import Outcome, format_table

if TYPE_CHECKING:
    import argparse

SCRIPT = Path("benchmarks") / "scripts" / "train_gpt2.py"
BUDGET_SHARE = 0.5
# Where between the two peaks the limit stands: nearer to the budgeted run, so that plain misses it by far.
LIMIT_POSITION = 0.3
# Less between the two peaks, and noise of the process (stacks, caches) could decide instead of tensors.
LEAST_MARGIN_BYTES = 200 * 2**20
MIB = 2**20
ALLOCATOR_SETTINGS = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": str(128 * 1024),
    "MALLOC_TRIM_THRESHOLD_": str(128 * 1024),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this benchmark's own options."""
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--batch", type=int, default=12)
    parser.add_argument("--width", type=int, default=384, help="of the model")
    parser.add_argument("--decision-class", choices=("saved", "all"), default="saved", help="what may leave")
    parser.add_argument("--budget-share", type=float, default=BUDGET_SHARE, help="of the plain peak at the allocator")
    parser.add_argument("--limit-bytes", type=int, help="this limit (default: found from the two unlimited runs)")
    parser.add_argument("--cgroup-parent", type=Path, help="limit by a memory cgroup made below this group")


def run(options: argparse.Namespace) -> Outcome:
    """Run the four and check the two under the limit."""
    outcome = Outcome()
    proof = Proof(options)
    peak_bytes = run_worker(
        "steps:script_peak",
        threads=options.threads,
        timeout_s=options.timeout,
        script=str(SCRIPT),
        arguments=proof.arguments,
    )["peak_bytes"]
    budget_bytes = int(options.budget_share * peak_bytes)
    print(f"plain peak at the allocator {peak_bytes / MIB:.0f} MiB, budget {budget_bytes / MIB:.0f} MiB", flush=True)
    budgeted = [sys.executable, "-m", "torchdelta", "run", "--memory-budget", str(budget_bytes)]
    budgeted += ["--class", options.decision_class, str(SCRIPT)]
    plain = [sys.executable, str(SCRIPT)]

    free_plain = proof.run("plain", plain, None)
    outcome.check("plain, no limit", final_loss(free_plain) or tail(free_plain), passed=bool(final_loss(free_plain)))
    free_budgeted = proof.run("torchdelta run", budgeted, None)
    passed = final_loss(free_budgeted) == final_loss(free_plain)
    outcome.check("torchdelta run, no limit", final_loss(free_budgeted) or tail(free_budgeted), passed=passed)
    if not passed:
        print(free_budgeted.stderr[-2000:])
        return outcome
    used = [proof.used_bytes(finished) for finished in (free_plain, free_budgeted)]
    limit_bytes = options.limit_bytes or int(used[1] + LIMIT_POSITION * (used[0] - used[1]))
    margin = used[0] - limit_bytes
    detail = f"{margin / MIB:.0f} MiB below what plain uses"
    outcome.check("the limit bites", detail, passed=margin >= LEAST_MARGIN_BYTES)

    stopped = proof.run("plain", plain, limit_bytes)
    detail = f"exit code {stopped.exit_code}: {tail(stopped)}"
    outcome.check("plain, limited: killed or fails", detail, passed=stopped.exit_code != 0)
    survived = proof.run("torchdelta run", budgeted, limit_bytes)
    same = survived.exit_code == 0 and final_loss(survived) == final_loss(free_plain) != ""
    detail = final_loss(survived) or f"exit code {survived.exit_code}: {tail(survived)}"
    outcome.check("torchdelta run, limited: same final loss", detail, passed=same)
    header = ["run", "limit MiB", "exit code", "final loss", "data peak MiB", "RSS peak MiB", "time s"]
    print("\n" + format_table(header, proof.rows))
    outcome.data = {
        "plain_peak_bytes": peak_bytes,
        "budget_bytes": budget_bytes,
        "limit_bytes": limit_bytes,
        "limit_kind": "memory cgroup" if options.cgroup_parent else "RLIMIT_DATA",
        "runs": proof.runs,
    }
    return outcome


class Proof:
    """Runs the script in its ways and keeps the table."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.arguments = ["--steps", str(options.steps), "--batch", str(options.batch)]
        self.arguments += ["--threads", str(options.threads), "--width", str(options.width)]
        self.rows: list[list[str]] = []
        self.runs: list[dict[str, Any]] = []

    def run(self, name: str, command: list[str], limit_bytes: int | None) -> Finished:
        """Run one way, under a limit or not, and add it to the table."""
        environment = {**worker_environment(self.options.threads), **ALLOCATOR_SETTINGS}
        command = [*command, *self.arguments]
        timeout_s = self.options.timeout
        if limit_bytes is None:
            finished = run_watched(command, environment, REPOSITORY, timeout_s)
        else:
            parent = self.options.cgroup_parent
            limit = CgroupLimit(size_bytes=limit_bytes, parent=parent) if parent else DataLimit(size_bytes=limit_bytes)
            with limit.wrap(command) as limited:
                finished = run_watched(limited, environment, REPOSITORY, timeout_s)
        self.rows.append(
            [
                name,
                "none" if limit_bytes is None else f"{limit_bytes / MIB:.0f}",
                str(finished.exit_code),
                final_loss(finished) or "-",
                f"{finished.data_peak_bytes / MIB:.0f}",
                f"{finished.rss_peak_bytes / MIB:.0f}",
                f"{finished.time_s:.1f}",
            ]
        )
        record = {key: value for key, value in asdict(finished).items() if key not in {"stdout", "stderr"}}
        self.runs.append({"name": name, "limit_bytes": limit_bytes, "final_loss": final_loss(finished), **record})
        return finished

    def used_bytes(self, finished: Finished) -> int:
        """Return what the kind of limit counts."""
        return finished.rss_peak_bytes if self.options.cgroup_parent else finished.data_peak_bytes


def final_loss(finished: Finished) -> str:
    """Return the loss that the script printed last, as hexadecimal; empty when it did not get there."""
    for line in reversed(finished.stdout.splitlines()):
        if line.startswith("final loss "):
            return line.removeprefix("final loss ")
    return ""


def tail(finished: Finished) -> str:
    """Return the last line that the process wrote to stderr."""
    lines = [line.strip() for line in finished.stderr.splitlines() if line.strip()]
    return lines[-1][:200] if lines else "nothing on stderr"
