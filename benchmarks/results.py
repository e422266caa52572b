"""Writes what a benchmark measured as raw JSON, with everything that a reader needs to judge it."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import time
from pathlib import Path
from typing import Any

from benchmarks.launch import REPOSITORY

RESULTS = REPOSITORY / "benchmarks" / "results"


def commit() -> str:
    """Return the commit of the sources, marked where the measured files differ from it."""
    git = ["git", "-C", str(REPOSITORY)]
    try:
        head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, check=True, text=True).stdout.strip()
        paths = ["--", "src", "benchmarks", ":!benchmarks/results"]
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


def write(name: str, *, command: str, threads: int, disk: dict[str, float] | None, data: dict[str, Any]) -> Path:
    """Write `results/NAME.json` and return its path."""
    document = {"command": command, "environment": environment(threads), "disk": disk, **data}
    path = RESULTS / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return path
