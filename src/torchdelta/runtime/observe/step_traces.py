"""Traces the steps of a session: the first one for the user, later ones for the programs and for a file."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from torchdelta.runtime.observe.plain_peak import find_plain_peak
from torchdelta.runtime.observe.trace_builder import TraceBuilder
from torchdelta.runtime.record.scan import scan_storages
from torchdelta.runtime.state.observer import Observer

if TYPE_CHECKING:
    from torchdelta.runtime.device.device import Device
    from torchdelta.runtime.follow.programs import Programs
    from torchdelta.runtime.observe.trace_output import TraceOutput
    from torchdelta.runtime.state.buffer import Buffer, View
    from torchdelta.runtime.state.ledger import Ledger
    from torchdelta.runtime.state.steps import StepTracker
    from torchdelta.summary import PlainPeak
    from torchdelta.trace.model import Trace

__all__ = ["StepTraces"]


class StepTraces:
    """Which step is traced, and who gets the trace. Mutable.

    Args:
        ledger: The storages that exist when a step begins.
        steps: The position in the training step.
        device: Its timer measures the ops, and it tells which ones may be replayed.
        programs: Plans steps from their traces.
        output: Writes one trace to a file.
    """

    def __init__(
        self, ledger: Ledger, steps: StepTracker, device: Device, programs: Programs, output: TraceOutput
    ) -> None:
        self.first: Trace | None = None  # of the first step; None before it is complete or if it was dropped
        self._ledger = ledger
        self._steps = steps
        self._device = device
        self._programs = programs
        self._output = output
        self._builder: TraceBuilder | None = None
        self._is_first = True  # whether the running trace is that of the first step
        self._plain_peak: PlainPeak | None = None  # of the first step, once it was asked for
        self._readers: list[Programs | TraceOutput] = []  # who wants the trace of the running step
        self._waits = False  # whether the trace of this step begins at its first save, if at all
        self._began_s = time.perf_counter()  # when the running step did
        self._lost_before_s = 0.0  # what the budget had cost by then
        programs.follower.on_first_save = self._on_first_save

    def begin(self) -> None:
        """Begin the trace of a step: all storages that exist are known from here on."""
        pause_s = time.perf_counter() - self._began_s - (self._steps.counters.lost_s - self._lost_before_s)
        builder = self._builder = TraceBuilder(self._ledger, self._steps, self._device)
        builder.is_for_plans = builder.wants_uses = not self._is_first
        self._ledger.observing.observer = builder
        scan_storages(self._ledger, others="all" if self._is_first else "none")
        builder.start_clock(pause_s)

    def begin_later(self) -> None:
        """Begin the trace of a step after the first one, if anybody wants it.

        While steps are recorded in part, only the first save of a step tells whether it needs a trace for its program.
        To trace it from its start, recording in part would have to end, also if the step turns out to have a program.
        So the trace begins at that save. What the step made before is then part of its start.
        """
        self._is_first = False
        self._began_s, self._lost_before_s = time.perf_counter(), self._steps.counters.lost_s
        self._readers = [reader for reader in (self._programs, self._output) if reader.wants_trace]
        self._waits = self._readers == [self._programs] and self._programs.follower.may_record_in_part
        if self._readers and not self._waits:
            self._begin_for_readers()

    def stop_waiting(self) -> None:
        """Begin a trace that waits for the first save: from here on the step is recorded as a whole."""
        if self._waits:
            self._waits = False
            self._begin_for_readers()

    def _begin_for_readers(self) -> None:
        for reader in self._readers:
            reader.on_trace_begin()
        self.begin()

    def end(self) -> None:
        """End the trace of a step that is complete, and hand it out."""
        builder = self._builder
        if builder is None:
            return
        self.drop()
        if self._steps.num_steps or self._steps.is_after_backward:
            trace = builder.finish()
            if self._is_first:
                self.first = trace
            elif trace is not None:
                for reader in self._readers:
                    reader.on_traced(trace, builder.log())

    def plain_peak(self) -> PlainPeak | None:
        """Return where the first step would peak without a budget; None if there is no trace of it."""
        if self._plain_peak is None and self.first is not None and self.first.ops:
            self._plain_peak = find_plain_peak(self.first)
        return self._plain_peak

    def drop(self) -> None:
        """End a trace without handing it out: the step will not be complete."""
        self._waits = False
        if self._builder is not None:
            self._builder = None
            self._ledger.observing.observer = Observer()

    def drop_later(self) -> None:
        """Drop the trace of a later step; that of the first one goes on."""
        if not self._is_first:
            self.drop()

    def on_abandoned(self) -> None:
        """Note that what was saved so far had no backward."""
        if self._builder is not None:
            self._builder.on_abandoned()

    def forget_saves(self) -> None:
        """Number the saves of the running step anew: those so far had no backward."""
        if self._builder is not None:
            self._builder.forget_saves()

    def stop(self) -> None:
        """End the traces: the session ends. The first step may be complete."""
        if self._is_first:
            self.end()
        else:
            self.drop()
        self._output.on_stop()

    def _on_first_save(self, buffer: Buffer, view: View) -> None:
        if self._waits:
            self._waits = False
            if self._programs.needs_trace():
                self._begin_for_readers()
                self._ledger.observing.observer.on_save(buffer, view)
        elif self._builder is not None and self._readers == [self._programs] and not self._programs.needs_trace():
            self.drop_later()
            self._programs.on_trace_dropped()
