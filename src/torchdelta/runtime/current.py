"""Which session runs on a thread."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from torchdelta._torch import graph_task_id, mode_stack
from torchdelta.runtime.recorder import Recorder

if TYPE_CHECKING:
    from torchdelta.runtime.session import Session

__all__ = ["current_session", "set_current_session"]

_local = threading.local()


def current_session() -> Session | None:
    """Return the session that is running on this thread, or whose node a thread of the autograd engine is running."""
    session: Session | None = getattr(_local, "session", None)
    if session is None and graph_task_id() != -1:
        for mode in mode_stack():  # see [Note: threads of the engine] in device_recorder.py
            if isinstance(mode, Recorder):
                return mode.session
    return session


def set_current_session(session: Session | None) -> None:
    """Say which session runs on this thread from now on."""
    _local.session = session
