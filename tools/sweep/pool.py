"""Processes that judge subjects: limited in time and memory, and a crash costs one subject only.

A fork server imports torch and transformers once; each group of subjects gets a process forked from it, so that it
starts at once, shares those pages, and takes everything that it loaded along when it ends. A process reports before
each phase. When it dies or hangs, the subject that it was at gets that as its result, and the rest of its group a new
process.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import resource
import signal
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing import connection as mp_connection
from typing import TYPE_CHECKING, Any

from benchmarks.launch import worker_environment
from tools.sweep.subjects import Subject

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator
    from multiprocessing.connection import Connection

Record = dict[str, Any]
Report = Callable[[str, Record], None]
# Judges one subject in some modes, reporting each phase with what is known so far. A function of an importable module.
Judge = Callable[[Subject, Sequence[str], Report], Record]

BUILD = "build"
PRELOADED = "tools.sweep.preload"
CRASHED = "crashed"
TIMEOUT = "timeout"
_DONE = ""
_POLL_S = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """What one subject may take: seconds in any one phase, and bytes of memory of its process (RLIMIT_DATA)."""

    phase_s: float
    memory_bytes: int


class _Slot:
    """One running process and what it is at."""

    def __init__(
        self, context: Any, judge: Judge, subjects: Sequence[Subject], modes: Sequence[str], memory_bytes: int
    ) -> None:
        self.subjects = deque(subjects)
        self.phase = BUILD
        self.known: Record = {}
        self.phase_began_s = self.subject_began_s = time.monotonic()
        self.has_ended = False
        self.connection, theirs = context.Pipe(duplex=False)
        arguments = (theirs, judge, list(subjects), list(modes), memory_bytes)
        self.process = context.Process(target=_work, args=arguments, daemon=True)
        self.process.start()
        theirs.close()

    def receive(self) -> Iterator[Record]:
        """Take in what the process has said: phases, and finished records."""
        while not self.has_ended and self.connection.poll():
            try:
                phase, known = self.connection.recv()
            except (EOFError, OSError):
                self.has_ended = True
                return
            self.phase_began_s = time.monotonic()
            if phase != _DONE:
                self.phase, self.known = phase, known
                continue
            self.subjects.popleft()
            yield known | {"time_s": round(self.phase_began_s - self.subject_began_s, 3)}
            self.phase, self.known, self.subject_began_s = BUILD, {}, self.phase_began_s

    def cut_off(self, verdict: str, words: str) -> Record:
        """Make the record of the subject that the process does not come back from."""
        subject = self.subjects.popleft()
        return {
            "family": subject.family,
            "name": subject.name,
            "group": subject.group,
            "task": subject.task,
            "status": verdict,
            "phase": self.phase,
            "reason": words,
            "modes": self.known,
            "time_s": round(time.monotonic() - self.subject_began_s, 3),
        }

    def kill(self) -> None:
        """End the process, whatever it does."""
        self.process.join(0 if not self.has_ended else _POLL_S)
        if self.process.is_alive():
            self.process.kill()
        self.process.join()
        self.connection.close()


def judge_groups(
    judge: Judge,
    groups: Sequence[Sequence[Subject]],
    modes: Sequence[str],
    limits: Limits,
    *,
    num_workers: int,
    threads: int = 1,
) -> Iterator[Record]:
    """Judge every subject of every group and give its record as soon as it is there."""
    with _environment(threads):
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([PRELOADED])
        waiting = deque(groups)
        slots: list[_Slot] = []
        try:
            while waiting or slots:
                while waiting and len(slots) < num_workers:
                    slots.append(_Slot(context, judge, waiting.popleft(), modes, limits.memory_bytes))
                mp_connection.wait([slot.connection for slot in slots], timeout=_POLL_S)
                for slot in list(slots):
                    yield from slot.receive()
                    is_late = time.monotonic() - slot.phase_began_s > limits.phase_s
                    if not slot.has_ended and not is_late:
                        continue
                    slots.remove(slot)
                    slot.kill()
                    if slot.subjects and slot.has_ended:
                        yield slot.cut_off(CRASHED, _describe_exit(slot.process.exitcode))
                    elif slot.subjects:
                        yield slot.cut_off(TIMEOUT, f"not finished after {limits.phase_s:.0f} s")
                    if slot.subjects:
                        waiting.appendleft(list(slot.subjects))
        finally:
            for slot in slots:
                slot.kill()


def _describe_exit(code: int | None) -> str:
    if code is not None and code < 0:
        with contextlib.suppress(ValueError):
            return f"killed by {signal.Signals(-code).name}"
    return f"exit code {code}"


def _work(connection: Connection, judge: Judge, subjects: list[Subject], modes: list[str], memory_bytes: int) -> None:
    """Judge a group; runs in the forked process."""
    resource.setrlimit(resource.RLIMIT_DATA, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)  # models print and warn; the sweep's own lines are to stay readable
    os.dup2(nowhere, 2)
    for subject in subjects:
        connection.send((BUILD, {}))
        record = judge(subject, modes, lambda phase, known: connection.send((phase, known)))
        connection.send((_DONE, record))


@contextlib.contextmanager
def _environment(threads: int) -> Generator[None]:
    """Give the fork server, which starts with the first process, the environment of a measured one."""
    before = dict(os.environ)
    os.environ.update(worker_environment(threads))
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
