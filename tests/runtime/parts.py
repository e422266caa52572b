"""The inner parts of a running scope, and what torch keeps to itself and the runtime changes.

Tests of behaviour ask here, so that this is the one file to change when the parts move.
"""

# torch's stubs do not have all that is here.
# pyright: reportAttributeAccessIssue=false, reportPrivateImportUsage=false

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, cast
from unittest import mock

import torch
from torch.library import _scoped_library as scoped_library
from torch.nn.modules.module import _global_forward_pre_hooks as module_hooks
from torch.optim.optimizer import _global_optimizer_pre_hooks as optimizer_hooks

from torchdelta.runtime.current import current_session
from torchdelta.runtime.record.pause import Pause
from torchdelta.runtime.session import Session
from torchdelta.runtime.tiers.disk import DiskMedium

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from torchdelta.native.counting import LimitedCounter
    from torchdelta.runtime.state.buffer import Buffer
    from torchdelta.runtime.tiers.disk import DiskTier

__all__ = [
    "buffer_of",
    "descriptor_of",
    "empty_everything",
    "engine_door",
    "is_emptied",
    "module_hooks",
    "num_saved_hooks",
    "optimizer_hooks",
    "pausing_until",
    "running_session",
    "scoped_library",
    "set_engine_door",
    "set_pause_limit",
]


def running_session() -> Session:
    """Return the session of the scope that is open on this thread."""
    session = current_session()
    assert isinstance(session, Session)
    return session


def buffer_of(session: Session, tensor: torch.Tensor) -> Buffer:
    """Return the buffer that a tensor's storage holds now."""
    record = session.ledger.find(tensor)
    assert record is not None
    assert record.current is not None
    return record.current


def descriptor_of(tier: DiskTier) -> int:
    """Return the file descriptor of a disk tier's scratch file, which has no name."""
    assert isinstance(tier.medium, DiskMedium)
    return tier.medium.descriptor


def engine_door() -> Any:
    """Return the object whose `run_backward` is called where Python enters the autograd engine."""
    return cast("Any", torch.autograd.Variable)._execution_engine


@contextlib.contextmanager
def pausing_until(limit_bytes: int | None) -> Generator[Callable[[Session], None]]:
    """Yield what stops recording at once in a session that is opened inside.

    It resumes when so many bytes more are allocated (None: never), whatever is saved. Then all that can leave leaves.
    """
    resume = Pause.on_limit
    thresholds: list[int] = []

    def on_limit(pause: Pause) -> None:
        usage = pause._usage
        if not thresholds or usage.counter is None or usage.counter.live_bytes() < thresholds[0] or not pause.is_on:
            return
        resume(pause)
        if not pause.is_on:
            pause._room.evict_all()

    def pause_now(session: Session) -> None:
        pause, counter = session.pause, session.ledger.usage.counter
        pause._peak_bytes = pause._forward_peak_bytes = pause._forward_bytes = 1 << 50
        pause._begin()
        if limit_bytes is not None and counter is not None:
            thresholds.append(counter.live_bytes() + limit_bytes)
            cast("LimitedCounter", counter).set_limit(thresholds[0], 1 << 62, pause.on_limit)

    with mock.patch.object(Pause, "on_limit", on_limit):
        yield pause_now


def set_pause_limit(limit_bytes: int) -> None:
    """Resume recording in the session of this thread once more bytes than these are live."""
    running_session().pause._set_limit(limit_bytes)


def set_engine_door(engine: Any) -> None:
    """Replace it."""
    cast("Any", torch.autograd.Variable)._execution_engine = engine


def num_saved_hooks() -> int:
    """Return 1 if saved tensors of this thread are given to hooks, else 0."""
    return int(torch._C._autograd._top_saved_tensors_default_hooks(False) is not None)


def empty_everything() -> int:
    """Make all persistent tensors leave that may, whatever the budget. Return how many storages are empty now."""
    session = running_session()
    assert session.room.persistents is not None
    session.room.persistents.evict(0)
    return session.ledger.num_emptied


def is_emptied(tensor: torch.Tensor) -> bool:
    """Return whether the memory of a tensor is freed in place."""
    record = running_session().ledger.find(tensor)
    return record is not None and record.emptied is not None
