"""Starts workers and reads what they print."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parent.parent


class WorkerError(Exception):
    """A worker crashed, ran out of time or distrusts its own measure."""


class WorkerTimeoutError(WorkerError):
    """A worker did not finish in the time it was given."""


def worker_environment(threads: int) -> dict[str, str]:
    """Return the environment of a measured process: quiet, and with a fixed number of threads."""
    paths = [str(REPOSITORY / "src"), str(REPOSITORY), os.environ.get("PYTHONPATH", "")]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_VERBOSITY": "error",
    }


def run_worker(*arguments: object, threads: int = 1, timeout_s: float = 600) -> dict[str, Any]:
    """Run `benchmarks.worker` with these arguments and return its record.

    Raises:
        WorkerError: The worker crashed, or reported that its measure cannot be trusted.
        WorkerTimeoutError: It exceeded `timeout_s`.
    """
    record = run_module("worker", *arguments, "--json", threads=threads, timeout_s=timeout_s)
    if record["outcome"] == "meter_error":
        raise WorkerError(record["message"])
    return record


def run_module(
    module: str, *arguments: object, threads: int, timeout_s: float, variables: dict[str, str] | None = None
) -> dict[str, Any]:
    """Run a module of this package in a process of its own and return the JSON object that it prints last.

    Its messages on stderr are passed on only when it fails. `variables` are added to its environment.

    Raises:
        WorkerError: It printed no object, or exceeded `timeout_s`.
    """
    words = [*map(str, arguments), "--threads", str(threads)]
    return _run_json(f"benchmarks.{module}", words, threads, timeout_s, variables)


def run_script_peak(script: Path, arguments: list[str], *, threads: int, timeout_s: float) -> int:
    """Run an ordinary script under the allocator meter and return its peak in bytes.

    Raises:
        WorkerError: It failed, or exceeded `timeout_s`.
    """
    return _run_json("benchmarks.script_peak", [str(script), *arguments], threads, timeout_s)["peak_bytes"]


def _run_json(
    module: str, words: list[str], threads: int, timeout_s: float, variables: dict[str, str] | None = None
) -> dict[str, Any]:
    command = [sys.executable, "-m", module, *words]
    try:
        finished = subprocess.run(
            command,
            capture_output=True,
            check=False,
            cwd=REPOSITORY,
            env=worker_environment(threads) | (variables or {}),
            text=True,
            timeout=timeout_s,
        )
    except subprocess.TimeoutExpired as error:
        raise WorkerTimeoutError(f"{module} {' '.join(words)}: not finished after {timeout_s:.0f} s") from error
    lines = [line for line in finished.stdout.splitlines() if line.startswith("{")]
    if not lines:
        # Where it happened and what it was; the whole traceback comes back by running the command by hand.
        tail = " | ".join(line.strip() for line in finished.stderr.splitlines()[-4:])
        raise WorkerError(f"{module} {' '.join(words)}: exit code {finished.returncode}: {tail}")
    return json.loads(lines[-1])
