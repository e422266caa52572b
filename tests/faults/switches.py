"""Switches that take one safety out of the runtime, for negative controls: a test that cannot fail proves nothing.

Each safety is held by one function of the runtime, which a switch replaces.

    with disabled("rng-replay"):
        ...  # replayed random ops draw new numbers
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

from torchdelta.errors import TierError, TierFullError
from torchdelta.runtime import interrupts
from torchdelta.runtime.memory import outage, retry, room
from torchdelta.runtime.memory.transfers import Transfers
from torchdelta.runtime.record import recorder
from torchdelta.runtime.session import Session
from torchdelta.runtime.state import tape
from torchdelta.runtime.state.ledger import Ledger

if TYPE_CHECKING:
    from collections.abc import Callable, Generator


@dataclass(frozen=True)
class Switch:
    """The function that holds a safety, and what runs in its place while the safety is off."""

    owner: Any
    function: str
    replacement: Callable[..., Any]


def _raise(_outage: outage.Outage, _clock: int, error: Exception) -> None:
    raise error


def _raise_when_full(transfers: Transfers, error: TierError, *_: object) -> None:
    if isinstance(error, TierFullError):
        raise error
    transfers.outage.begin(transfers.ledger.clock, error)


SWITCHES = {
    # A replayed random op draws whatever numbers come next.
    "rng-replay": Switch(tape, "with_random_state", lambda *_: contextlib.nullcontext()),
    # A replayed batch norm updates the running statistics once more.
    "batch-norm-stats": Switch(recorder, "statistics_of", lambda *_: []),
    # An error of the tier ends the step.
    "tier-failure": Switch(outage.Outage, "begin", _raise),
    # A full tier ends the step.
    "tier-full": Switch(Transfers, "note_failed_start", _raise_when_full),
    # A tier that failed once is never tried again.
    "tier-retry": Switch(outage, "pause_ops", lambda _: 1 << 62),
    # The scope stays on in a forked child.
    "fork": Switch(Session, "leave_child", lambda _: None),
    # An out-of-memory error inside an op ends the step.
    "oom-retry": Switch(retry, "is_out_of_memory", lambda _: False),
    # Saved tensors that autograd has let go of still count.
    "release": Switch(Ledger, "unsave", lambda *_: None),
    # Signals are handled at once, wherever they arrive.
    "interrupts": Switch(interrupts, "must_wait", lambda *_: False),
    # What only reference cycles hold stays.
    "garbage": Switch(room, "collect_garbage", lambda _: 0),
}


def switch_off(name: str, patch: pytest.MonkeyPatch) -> None:
    """Take one safety out until the patch is undone; in a process of its own, for good.

    Raises:
        ValueError: No safety has this name.
    """
    if name not in SWITCHES:
        msg = f"no safety is called {name!r}; there are {', '.join(SWITCHES)}"
        raise ValueError(msg)
    switch = SWITCHES[name]
    patch.setattr(switch.owner, switch.function, switch.replacement)


@contextlib.contextmanager
def disabled(name: str) -> Generator[None]:
    """Take one safety out for a while.

    Raises:
        ValueError: No safety has this name.
    """
    with pytest.MonkeyPatch.context() as patch:
        switch_off(name, patch)
        yield
