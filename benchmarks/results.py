"""Writes what a benchmark measured as raw JSON, with everything that a reader needs to judge it."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.launch import REPOSITORY

if TYPE_CHECKING:
    import argparse

    from benchmarks.outcome import Outcome

RESULTS = REPOSITORY / "benchmarks" / "results"


def commit() -> str:
    """Return the commit of the sources, marked where the measured files differ from it."""
    git = ["git", "-C", str(REPOSITORY)]
    try:
        head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, check=True, text=True).stdout.strip()
        paths = ["--", "src", "benchmarks", "tools", ":!benchmarks/results"]
        dirty = subprocess.run([*git, "status", "--porcelain", *paths], capture_output=True, check=True, text=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return head + (" with changes" if dirty.stdout.strip() else "")


def cpu_model() -> str:
    """Return the processor's name."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def memory_bytes() -> int:
    """Return the machine's physical memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def environment(threads: int) -> dict[str, Any]:
    """Describe the machine and the software."""
    import torch

    return {
        "commit": commit(),
        "cpu": cpu_model(),
        "num_cores": os.cpu_count(),
        "memory_bytes": memory_bytes(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "threads": threads,
        "load_average": list(os.getloadavg()),
        "measured_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that every benchmark has."""
    parser.add_argument("--quick", action="store_true", help="a small part, for trying")
    parser.add_argument("--threads", type=int, default=1, help="intra-op threads of the measured processes")
    parser.add_argument("--timeout", type=float, default=600, help="seconds that one measured process may take")
    parser.add_argument("--tag", default="", help="ending of the results file's name")
    parser.add_argument("--no-write", action="store_true", help="leave benchmarks/results as it is")


def conclude(outcome: Outcome, name: str, command: str, options: argparse.Namespace) -> int:
    """State the checks and write the results. Returns the exit code: 1 when a promise is broken."""
    failed = [check for check in outcome.checks if check.required and not check.passed]
    print(f"\n{len(outcome.checks)} checks, {len(failed)} failed")
    for check in failed:
        print(f"  {check.name}: {check.detail}")
    if not options.no_write:
        checks = [asdict(check) for check in outcome.checks]
        data = {"passed": outcome.passed, "checks": checks, "data": outcome.data}
        path = write(file_name(name, options), command=command, threads=options.threads, disk=outcome.disk, data=data)
        print(f"raw figures in {path.relative_to(REPOSITORY)}")
    return 0 if outcome.passed else 1


def file_name(name: str, options: argparse.Namespace) -> str:
    """Return the name of a benchmark's results file, without its ending."""
    return name + ("-quick" if options.quick else "") + (f"-{options.tag}" if options.tag else "")


def write(name: str, *, command: str, threads: int, disk: dict[str, float] | None, data: dict[str, Any]) -> Path:
    """Write `results/NAME.json` and return its path."""
    document = {"command": command, "environment": environment(threads), "disk": disk, **data}
    path = RESULTS / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return path
