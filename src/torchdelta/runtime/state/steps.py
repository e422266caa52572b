"""Finds the training steps in an unmarked loop.

A step is one forward, one backward and, if there is one, an optimizer step. It ends after `optimizer.step()`. In a loop
without `torch.optim`, or between the micro-batches of gradient accumulation, it ends when the next forward saves its
first tensor after a backward that freed its graph. After a backward that kept the graph (`retain_graph`), it ends in
this way only once a parameter was written or no saved tensor is left: until then the graph may have another backward in
the same step. Evaluation saves nothing and is not a step. A step that the budget refused is not counted either.

As long as no optimizer has stepped, a step may end early, right after its backward, for two reasons: it has saved
nothing, so the next forward may save nothing either and not show where it begins; or recording pauses
(record/pause.py). If the session's first step saves nothing, it ends after two backwards, since an optimizer may follow
the first. An optimizer that steps after all counts as that of the step that has ended.
"""

from __future__ import annotations

import array
import time
from typing import TYPE_CHECKING, Final

from torchdelta._torch.compiled import is_in_compiled_call
from torchdelta._torch.engine import graph_task_id
from torchdelta.notices import warn_once
from torchdelta.summary import StepSummary

if TYPE_CHECKING:
    from collections.abc import Callable

    from torchdelta.runtime.state.counters import Counters
    from torchdelta.runtime.state.ledger import Ledger
    from torchdelta.trace.model import Phase

# How many of the latest steps keep their own summary.
MAX_SUMMARIES: Final = 10_000
_ROW: Final = 13
_HAD_OPTIMIZER: Final = 9  # its place in a row
_PLAN: Final = 12


class StepTracker:
    """Counts steps and measures them."""

    def __init__(self, ledger: Ledger, counters: Counters) -> None:
        self.ledger = ledger
        self.counters = counters
        self._rows = array.array("d")
        self.num_steps = 0
        self.num_optimizer_steps = 0  # how many of them ended with an optimizer's step
        self.num_refused = 0
        self.peak_bytes = 0
        self.last_peak_bytes = 0  # of the latest step
        self.last_time_s = 0.0
        self.is_in_optimizer = False
        self.has_optimizer = False  # whether any has begun to step
        self.has_stepped = False  # whether the latest step has ended with an optimizer's
        self.node_name = ""  # of the running autograd node, if its ops are recorded
        self.on_step_end: Callable[[], None] | None = None
        self.startup_s = 0.0  # from the start to the first saved tensor of the first step
        self._has_begun = False  # whether that tensor was saved
        self.is_adopting = False  # whether what was saved before is packed now: no new step begins
        self.is_unrecorded = False  # recording pauses: see record/pause.py
        self.num_unrecorded = 0
        self.last_saved_bytes = 0  # of the latest step
        self.outlined_bytes: int | None = None  # saved in this step, if it is like an outline: Python sees a part
        self._had_backward = False
        self._kept_graph = False  # whether a backward of this step kept its graph
        self.last_kept_graph = False  # whether one of the latest step did
        self._num_backwards = 0  # of this step, that freed their graphs
        self._last_num_backwards = 0
        self._has_saved = False  # whether this step has saved a tensor
        self._has_ended_early = False  # whether the latest step has, and no recorded save and no backward came since
        self.first_had_optimizer = True  # whether the first step did; True before its end
        self.had_other_optimizers = False  # whether one stepped after another one had ended the step
        self._is_refused = False  # its optimizer was refused, and did not step again
        self._saved_index = 0
        self._start_s = time.perf_counter()
        self._before = counters.copy()

    @property
    def phase(self) -> Phase:
        """The current phase: forward, backward or optimizer.

        Ops between the backward and the end of the step (such as gradient clipping) belong to the optimizer phase.
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
    def is_after_all_backwards(self) -> bool:
        """Whether this step has had as many backwards as the one before."""
        return self._had_backward and self._num_backwards >= self._last_num_backwards

    @property
    def had_any_backward(self) -> bool:
        """Whether this step has had a backward, one that kept its graph included."""
        return self._had_backward or self._kept_graph

    @property
    def summaries(self) -> tuple[StepSummary, ...]:
        """The latest steps, oldest first."""
        return self.summaries_since(0)

    def summaries_since(self, index: int) -> tuple[StepSummary, ...]:
        """Return the steps from this index on, as far as they are among the latest; the time taken is by their number.

        Args:
            index: Position of the first wanted step in the scope, from 0.
        """
        oldest = self.num_steps - len(self._rows) // _ROW
        begin = max(0, index - oldest) * _ROW
        rows = (self._rows[start : start + _ROW] for start in range(begin, len(self._rows), _ROW))
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
                optimizer_step=int(row[8]),
                had_optimizer=bool(row[_HAD_OPTIMIZER]),
                evict_s=row[10],
                op_time_s=row[11],
                plan=int(row[_PLAN]),
            )
            for row in rows
        )

    def on_save(self) -> None:
        """Autograd saves a tensor. This begins a new step if the current one has had its backward."""
        self.is_in_optimizer = False  # it is still true if the optimizer's step raised
        if not self._has_begun:
            self._has_begun = True
            now_s = time.perf_counter()
            self.startup_s += now_s - self._start_s
            self._start_s = now_s
        if self._had_backward and not self.is_adopting and graph_task_id() == -1:
            self.end()
        self._has_saved = True
        self._has_ended_early = False

    def next_saved_index(self) -> int:
        """Return the position of the next saved buffer in this step."""
        self._saved_index += 1
        return self._saved_index - 1

    def on_backward_end(self, *, keeps_graph: bool) -> None:
        """A backward has ended. If it keeps its graph (double backward, several losses), the step may continue."""
        if keeps_graph:
            self._kept_graph = True
        else:
            self._had_backward = True
            self._num_backwards += 1
        self._has_ended_early = False

    def on_graph_freed(self) -> None:
        """The backward has freed its graph: end a step that has saved nothing, as long as no optimizer has stepped."""
        is_first = self.num_steps == 0 and self._num_backwards < 2
        if self._had_backward and not self._has_saved and not self.has_optimizer and not is_first:
            self.end_early()

    def end_early(self) -> None:
        """Close the step after its backward."""
        self.end()
        self._has_ended_early = True

    def on_graph_over(self) -> None:
        """Kept graphs are not needed any more: no saved tensor is left, or a trained leaf was written."""
        if self._kept_graph and graph_task_id() == -1:
            self._had_backward = True

    def on_optimizer_start(self) -> None:
        """An optimizer begins its step."""
        self.is_in_optimizer = self.has_optimizer = True
        if is_in_compiled_call():  # a hook of the library runs, so Dynamo has given up the frame of the step
            warn_once(
                "torch.compile does not compile an optimizer's step inside a MemoryBudget: the step runs eagerly, with "
                "the bits and the time of an uncompiled one"
            )

    def note_plan(self, number: int) -> None:
        """Note which plan the latest step has followed to its end."""
        self._rows[_PLAN - _ROW] = number

    def on_closure_start(self) -> None:
        """The closure of an optimizer runs next: it is the forward and the backward of a step."""
        self.is_in_optimizer = False

    def on_closure_end(self) -> None:
        """The optimizer goes on with its step."""
        self.is_in_optimizer = True

    def on_optimizer_end(self) -> None:
        """An optimizer has stepped."""
        self.is_in_optimizer = False
        if self._had_backward or self._kept_graph:
            self._is_refused = False  # the program has made room, and the optimizer has stepped after all
            self.end(had_optimizer=True)
        elif self._has_ended_early and graph_task_id() == -1:
            self._has_ended_early = False
            self._rows[_HAD_OPTIMIZER - _ROW] = True  # of the latest step
            self.first_had_optimizer |= self.num_steps == 1
            self.has_stepped = True
            self.num_optimizer_steps += 1
        elif graph_task_id() == -1 and self.has_stepped and not self._has_saved:
            self.had_other_optimizers = True

    def on_abandoned(self) -> None:
        """What was saved so far had no backward. Before the first step it belongs to the script's start."""
        self._has_begun = self.num_steps > 0

    def refuse(self) -> None:
        """The budget cannot hold the rest of this step: it counts only if the program lets its optimizer step again."""
        self.num_refused += 1
        if self.is_in_optimizer and (self._had_backward or self._kept_graph):
            self._is_refused = True
        else:
            self._begin()

    def end(self, *, had_optimizer: bool = False) -> None:
        """Close the step."""
        if self._is_refused:
            self._begin()
            return
        self.last_time_s = time.perf_counter() - self._start_s
        if self.is_unrecorded:
            self.num_unrecorded += 1
            self._note_unrecorded(self.last_time_s)
            self.counters.saved_bytes += self.last_saved_bytes
        elif self.outlined_bytes is not None:
            self.counters.saved_bytes = self._before.saved_bytes + self.outlined_bytes
        done = self.counters.minus(self._before)
        self.last_saved_bytes = done.saved_bytes
        # All steps are rows of one array: one object per step would make every garbage collection of a long run slower.
        self._rows.extend(
            (
                self.num_steps,
                self.last_time_s,
                self.ledger.usage.peak_bytes,
                max(0, done.saved_bytes - done.left_bytes),
                done.swapped_out_bytes,
                done.recomputed_bytes,
                done.stall_s,
                done.recompute_s,
                self.num_optimizer_steps,
                had_optimizer,
                done.evict_s,
                done.op_time_s,
                0,  # see `note_plan`
            )
        )
        del self._rows[: -MAX_SUMMARIES * _ROW]
        if self.num_steps == 0:
            self.first_had_optimizer = had_optimizer
        self.num_steps += 1
        self.num_optimizer_steps += had_optimizer
        self.has_stepped = had_optimizer
        self.last_peak_bytes = self.ledger.usage.peak_bytes
        self._last_num_backwards = self._num_backwards
        self.last_kept_graph = self._kept_graph
        self._begin()
        if self.on_step_end is not None:
            self.on_step_end()

    def resume_recording(self) -> None:
        """The rest of this step is recorded."""
        if self.is_unrecorded:
            self.is_unrecorded = False
            self._note_unrecorded(time.perf_counter() - self._start_s)

    def _note_unrecorded(self, time_s: float) -> None:
        """Count the time since the step began as that of the program's own ops."""
        counted_s = self.counters.op_time_s - self._before.op_time_s
        self.counters.op_time_s += max(0.0, time_s - counted_s)

    def _begin(self) -> None:
        """Measure the next step from here."""
        self.peak_bytes = max(self.peak_bytes, self.ledger.usage.peak_bytes)
        self.ledger.usage.restart_peak()
        self._before = self.counters.copy()
        self._start_s = time.perf_counter()
        self._had_backward = self._kept_graph = self._is_refused = self._has_saved = self._has_ended_early = False
        self._num_backwards = 0
        self._saved_index = 0
        self.outlined_bytes = None
