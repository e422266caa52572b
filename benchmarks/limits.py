"""Limits on a process's memory that the kernel enforces, and what a process uses under them.

Two kinds. RLIMIT_DATA needs no rights: it bounds the private writable memory that a process has mapped (heap,
anonymous maps, thread stacks; `VmData` in /proc/PID/status), and an allocation beyond it fails. A memory cgroup bounds
resident memory, and the kernel kills what passes it; it needs a group that the caller may write to.
"""

from __future__ import annotations

import subprocess
import tempfile
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Generator

POLL_S = 0.005


@dataclass(frozen=True, kw_only=True)
class Finished:
    """How a process ended, and the most that it used."""

    exit_code: int
    stdout: str
    stderr: str
    time_s: float
    data_peak_bytes: int
    rss_peak_bytes: int


@dataclass(frozen=True, kw_only=True)
class DataLimit:
    """RLIMIT_DATA of so many bytes, rounded down to KiB."""

    size_bytes: int
    kind: str = "RLIMIT_DATA"

    @contextmanager
    def wrap(self, command: list[str]) -> Generator[list[str]]:
        """Give the command that runs `command` under the limit."""
        yield ["/bin/sh", "-c", f'ulimit -d {self.size_bytes // 1024} && exec "$@"', "sh", *command]


@dataclass(frozen=True, kw_only=True)
class CgroupLimit:
    """A memory cgroup of so many bytes, swap excluded, made below a group that the caller may write to."""

    size_bytes: int
    parent: Path
    kind: str = "memory cgroup"

    @contextmanager
    def wrap(self, command: list[str]) -> Generator[list[str]]:
        """Make the group, give the command that runs `command` in it, and remove the group."""
        group = Path(tempfile.mkdtemp(prefix="torchdelta-", dir=self.parent))
        try:
            # Version 2 names it memory.max, version 1 memory.limit_in_bytes; each has a file more for swap.
            for limit, swap, swap_bytes in (
                ("memory.max", "memory.swap.max", 0),
                ("memory.limit_in_bytes", "memory.memsw.limit_in_bytes", self.size_bytes),
            ):
                if (group / limit).exists():
                    (group / limit).write_text(str(self.size_bytes), encoding="ascii")
                    if (group / swap).exists():
                        (group / swap).write_text(str(swap_bytes), encoding="ascii")
            enter = f'echo $$ > {group}/cgroup.procs && exec "$@"'
            yield ["/bin/sh", "-c", enter, "sh", *command]
        finally:
            group.rmdir()


def run_watched(command: list[str], environment: dict[str, str], cwd: Path, timeout_s: float) -> Finished:
    """Run a command to its end and note the most data and resident memory that it had."""
    began_s = time.perf_counter()
    peaks = {"VmData": 0, "VmHWM": 0}
    with subprocess.Popen(
        command, cwd=cwd, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        ended = threading.Event()
        watcher = threading.Thread(target=_watch, args=(process.pid, peaks, ended), daemon=True)
        watcher.start()
        try:
            stdout, stderr = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            process.kill()
            stdout, stderr = process.communicate()
            stderr += f"\nkilled: not finished after {timeout_s:.0f} s"
        finally:
            ended.set()
            watcher.join()
    return Finished(
        exit_code=process.returncode,
        stdout=stdout,
        stderr=stderr,
        time_s=time.perf_counter() - began_s,
        data_peak_bytes=peaks["VmData"],
        rss_peak_bytes=peaks["VmHWM"],
    )


def _watch(pid: int, peaks: dict[str, int], ended: threading.Event) -> None:
    status = Path(f"/proc/{pid}/status")
    while not ended.wait(POLL_S):
        try:
            lines = status.read_text(encoding="ascii", errors="replace").splitlines()
        except OSError:
            return
        for line in lines:
            key, _, rest = line.partition(":")
            if key in peaks:
                peaks[key] = max(peaks[key], int(rest.split()[0]) * 1024)
