"""The session that runs on each thread."""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING, Protocol

from torchdelta._torch.engine import graph_task_id
from torchdelta._torch.modes import mode_stack

if TYPE_CHECKING:
    from torchdelta.runtime.device.device import Device
    from torchdelta.runtime.observe.step_traces import StepTraces
    from torchdelta.runtime.record.backward import Backward
    from torchdelta.runtime.record.compiled import CompiledRegions
    from torchdelta.runtime.record.partial import PartialRecording
    from torchdelta.runtime.record.pause import Pause
    from torchdelta.runtime.record.raw_writes import RawWrites
    from torchdelta.runtime.record.recorder import Recorder
    from torchdelta.runtime.record.transforms import Transforms

__all__ = ["Running", "current_session", "set_current_session"]


class Running(Protocol):
    """The parts of a running session that torch's patched functions call."""

    backward: Backward
    compiled: CompiledRegions
    device: Device
    partial: PartialRecording
    pause: Pause
    raw_writes: RawWrites
    recorder: Recorder
    traces: StepTraces
    transforms: Transforms

    def leave_backward(self) -> None:
        """Remove from this thread what the engine has put back after the session was stopped in a backward."""
        ...

    def leave_child(self) -> None:
        """Remove from a forked child what acts on its one thread."""
        ...


of_thread = threading.local()
_sessions: weakref.WeakSet[Running] = weakref.WeakSet()


def current_session() -> Running | None:
    """Return the session of this thread, or on a thread of the autograd engine that of the node it runs."""
    session: Running | None = getattr(of_thread, "session", None)
    if session is None and _sessions and graph_task_id() != -1:
        modes = mode_stack()  # see [Note: threads of the engine] in device/accelerator.py
        running = (each for each in tuple(_sessions) if each.recorder in modes and not each.recorder.is_over)
        return next(running, None)
    return session


def set_current_session(session: Running | None) -> None:
    """Set the session of this thread."""
    of_thread.session = session
    if session is not None:
        _sessions.add(session)
