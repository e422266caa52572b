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


def worker_command(function: str, **options: Any) -> list[str]:
    """Return the command that calls a function (MODULE:FUNCTION of this package) in a process of its own."""
    words = [f"{name}={json.dumps(value)}" for name, value in options.items() if value is not None]
    return [sys.executable, "-m", "benchmarks.worker", function, *words]


def run_worker(
    function: str, *, threads: int = 1, timeout_s: float = 600, variables: dict[str, str] | None = None, **options: Any
) -> dict[str, Any]:
    """Call a function in a process of its own and return the record that it prints.

    Its messages on stderr are passed on only when it fails. `variables` are added to its environment; options that are
    None are left to the function.

    Raises:
        WorkerError: It printed no record.
        WorkerTimeoutError: It exceeded `timeout_s`.
    """
    command = worker_command(function, threads=threads, **options)
    words = " ".join(command[3:])
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
        raise WorkerTimeoutError(f"{words}: not finished after {timeout_s:.0f} s") from error
    lines = [line for line in finished.stdout.splitlines() if line.startswith("{")]
    if finished.returncode or not lines:
        # Where it happened and what it was; the whole traceback comes back by running the command by hand.
        tail = " | ".join(line.strip() for line in finished.stderr.splitlines()[-4:])
        raise WorkerError(f"{words}: exit code {finished.returncode}: {tail}")
    return json.loads(lines[-1])
