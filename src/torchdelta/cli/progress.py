"""The line that `torchdelta run --progress` shows on stderr while a script trains."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Final, NamedTuple

from torchdelta.cli.errors import prefix
from torchdelta.cli.stderr import is_terminal
from torchdelta.units import format_bytes

if TYPE_CHECKING:
    from typing import TextIO

    from torchdelta import MemoryBudget

__all__ = ["Progress"]

_ON_TERMINAL_S: Final = 0.5  # at most so often the line is written anew
_IN_FILE_S: Final = 5.0  # at most so often a line is added
_NUM_SAMPLES: Final = 20  # the rates are those between the oldest and the newest one


class _Sample(NamedTuple):
    time_s: float
    num_steps: int
    op_time_s: float


class Progress:
    """Writes the line from a thread of its own, until it is stopped. It reads figures and touches no tensor."""

    def __init__(self, budget: MemoryBudget, stream: TextIO | None = None) -> None:
        self._budget = budget
        self._stream = sys.stderr if stream is None else stream
        self._is_terminal = is_terminal(self._stream)
        self._samples: deque[_Sample] = deque(maxlen=_NUM_SAMPLES)
        self._peak_bytes = 0
        self._next_step = 0  # index of the first step whose peak was not read yet
        self._width = 0  # of the line on the terminal
        self._planned = (0.0, "")  # when the slowdown under a plan was last asked for, and as text
        self._written = 0  # steps in the latest line
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="torchdelta-progress", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Write the last line, and end the thread."""
        self._end.set()
        self._thread.join()
        self._write(is_last=True)

    def _run(self) -> None:
        while not self._end.wait(_ON_TERMINAL_S if self._is_terminal else _IN_FILE_S):
            self._write()

    def _write(self, *, is_last: bool = False) -> None:
        text = self._text()
        # stderr is closed, its reader is gone, or it is an object of the script's own, which can do less than a file.
        with contextlib.suppress(Exception):
            if self._is_terminal:
                if text:
                    self._stream.write(f"\r{text:<{self._width}}")
                    self._width = len(text)
                if is_last and self._width:
                    self._stream.write("\n")
            elif text and self._samples[-1].num_steps > self._written:
                self._stream.write(f"{text}\n")
            self._stream.flush()
        if self._samples:
            self._written = self._samples[-1].num_steps

    def _text(self) -> str:
        """Return the line; nothing before the first step is complete."""
        totals = self._budget.totals()
        if not totals.num_steps:
            return ""
        self._samples.append(_Sample(time.perf_counter(), totals.num_steps, totals.op_time_s))
        peaks_bytes = [step.peak_bytes for step in self._budget.steps_since(self._next_step)]
        self._next_step += len(peaks_bytes)
        self._peak_bytes = max([self._peak_bytes, *peaks_bytes])
        budget = format_bytes(self._budget.budget_bytes)
        text = f"{prefix()}: step {totals.num_steps}, peak {format_bytes(self._peak_bytes)} of {budget}"
        return f"{text}{self._rates()}"

    def _rates(self) -> str:
        """Return slowdown and steps per second since the oldest sample; nothing before there are two."""
        oldest, newest = self._samples[0], self._samples[-1]
        time_s = newest.time_s - oldest.time_s
        num_steps = newest.num_steps - oldest.num_steps
        if not num_steps or time_s <= 0:
            return ""
        op_time_s = newest.op_time_s - oldest.op_time_s
        if self._budget.totals().num_followed_steps:
            slowdown = self._planned_slowdown(newest.time_s)
        else:
            slowdown = _slowdown(time_s / op_time_s) if op_time_s > 0 else ""
        return f"{slowdown}, {num_steps / time_s:.2f} steps/s"

    def _planned_slowdown(self, now_s: float) -> str:
        """Return the slowdown of steps that follow a plan, in whose backward not every op is timed."""
        asked_s, text = self._planned
        if now_s - asked_s >= _IN_FILE_S:  # a summary takes longer than the totals
            with contextlib.suppress(RuntimeError):  # what is counted changed in the meantime
                follow = self._budget.summary().follow
                text = "" if follow is None or follow.slowdown is None else _slowdown(follow.slowdown)
            self._planned = (now_s, text)
        return text


def _slowdown(factor: float) -> str:
    return f", slowdown x{factor:.2f} (estimated)"
