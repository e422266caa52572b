"""Finds the training steps in a loop that nobody marked.

A step is one forward, backward and, where there is one, optimizer step. It ends after `optimizer.step()`; in a loop
without `torch.optim` (or between the micro-batches of gradient accumulation) it ends where the next forward saves its
first tensor after a backward that consumed its graph. Evaluation saves nothing and makes no step.
"""

from __future__ import annotations

import array
import time
from typing import TYPE_CHECKING, Final

from torchdelta._torch import graph_task_id
from torchdelta.summary import StepSummary

if TYPE_CHECKING:
    from collections.abc import Callable

    from torchdelta.runtime.counters import Counters
    from torchdelta.runtime.ledger import Ledger
    from torchdelta.trace.model import Phase

# The latest steps whose numbers are kept one by one.
MAX_KEPT_STEPS: Final = 10_000
_ROW: Final = 8


class StepTracker:
    """Counts steps and takes their measure."""

    def __init__(self, ledger: Ledger, counters: Counters) -> None:
        self.ledger = ledger
        self.counters = counters
        self._rows = array.array("d")
        self.num_steps = 0
        self.peak_bytes = 0
        self.is_in_optimizer = False
        self.on_step_end: Callable[[], None] | None = None
        self._had_backward = False
        self._saved_index = 0
        self._start_s = time.perf_counter()
        self._before = counters.copy()

    @property
    def phase(self) -> Phase:
        """Forward, backward or optimizer.

        What comes between the backward and the end of the step (clipping of gradients) counts as the optimizer's.
        """
        if self.is_in_optimizer:
            return "optimizer"
        if graph_task_id() != -1:
            return "backward"
        return "optimizer" if self.is_after_backward else "forward"

    @property
    def is_after_backward(self) -> bool:
        """Whether this step has had its backward."""
        return self._had_backward

    @property
    def summaries(self) -> tuple[StepSummary, ...]:
        """The latest steps, oldest first."""
        rows = (self._rows[start : start + _ROW] for start in range(0, len(self._rows), _ROW))
        return tuple(
            StepSummary(
                index=int(row[0]),
                time_s=row[1],
                peak_bytes=int(row[2]),
                kept_bytes=int(row[3]),
                swapped_out_bytes=int(row[4]),
                recomputed_bytes=int(row[5]),
                stall_s=row[6],
                recompute_s=row[7],
            )
            for row in rows
        )

    def on_save(self) -> None:
        """Autograd saves a tensor: a new forward, if a backward has ended since the last one."""
        self.is_in_optimizer = False  # one that raised in its step has not said that it ended
        if self._had_backward and graph_task_id() == -1:
            self.end()

    def next_saved_index(self) -> int:
        """Return the position of the next saved buffer in this step."""
        self._saved_index += 1
        return self._saved_index - 1

    def on_backward_end(self, *, keeps_graph: bool) -> None:
        """A backward has ended. One that keeps its graph (double backward, several losses) leaves the step open."""
        if not keeps_graph:
            self._had_backward = True

    def on_optimizer_start(self) -> None:
        """An optimizer begins its step."""
        self.is_in_optimizer = True

    def on_optimizer_end(self) -> None:
        """An optimizer has stepped."""
        self.is_in_optimizer = False
        if self._had_backward:
            self.end()

    def end(self) -> None:
        """Close the step."""
        now_s = time.perf_counter()
        done = self.counters.minus(self._before)
        gone_bytes = done.swapped_out_bytes + done.dropped_bytes
        # Plain numbers in one array: an object a step would grow the heap of a long run, and with it the collector's
        # work.
        self._rows.extend(
            (
                self.num_steps,
                now_s - self._start_s,
                self.ledger.peak_bytes,
                max(0, done.kept_bytes - gone_bytes),
                done.swapped_out_bytes,
                done.recomputed_bytes,
                done.stall_s,
                done.recompute_s,
            )
        )
        del self._rows[: -MAX_KEPT_STEPS * _ROW]
        self.num_steps += 1
        self.peak_bytes = max(self.peak_bytes, self.ledger.peak_bytes)
        self.ledger.restart_peak()
        self._before = self.counters.copy()
        self._start_s = now_s
        self._had_backward = False
        self._saved_index = 0
        if self.on_step_end is not None:
            self.on_step_end()
