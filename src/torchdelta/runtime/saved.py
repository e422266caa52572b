"""Saved tensors: what autograd keeps for backward goes through `pack` and comes back through `unpack`.

[Note: a saved tensor follows its storage]
Pack runs BEFORE the op that saves has finished, and that op may still write the tensor (the noise of `rrelu`,
batch-norm statistics) without bumping its version. Eager would read the new content in backward, so a handle follows
its storage to newer contents (`Buffer.successor`) as long as the version is the one at pack time; a bumped version
raises eager's own error. The version is read from a probe that shares the tensor's counter and holds no bytes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from torchdelta._torch import NoDispatch, NoFunction, Quietly
from torchdelta.config import SavedBuffer
from torchdelta.errors import ConfigError
from torchdelta.runtime import faults
from torchdelta.runtime.action import Action
from torchdelta.runtime.buffer import Buffer, View
from torchdelta.runtime.interrupts import destructor, enter, leave_unraising, shielded
from torchdelta.runtime.subclasses import detached

if TYPE_CHECKING:
    from collections.abc import Callable

    from torchdelta.runtime.session import Session

_PLAIN_TYPES = {torch.Tensor, torch.nn.Parameter}
_empty: dict[torch.dtype, torch.Tensor] = {}
_unchanging = torch.empty(0)
_ACTIONS = {"recompute": Action.DROP, "swap": Action.SWAP, "keep": None}


class Handle:
    """What autograd holds in place of a saved tensor."""

    __slots__ = ("probe", "session", "version", "view")

    def __init__(self, session: Session, buffer: Buffer, tensor: torch.Tensor) -> None:
        self.session = session
        self.view = View(buffer, tensor)
        self.version = tensor._version
        if session.survey is not None:
            self.probe = _unchanging
            self.version = _unchanging._version
            return
        dtype = tensor.dtype
        with NoDispatch(), NoFunction():
            probe = tensor.detach()
            empty = _empty.get(dtype)
            if empty is None or empty.device != tensor.device:
                empty = _empty[dtype] = torch.empty(0, dtype=dtype, device=tensor.device)
            probe.data = empty
        self.probe = probe

    @destructor
    def __del__(self) -> None:
        outer = enter()
        try:
            session = getattr(self, "session", None)
            if session is not None and hasattr(self, "probe"):
                session.saved.dropped(self.view.buffer)
        finally:
            leave_unraising(outer)


class Pinned:
    """What autograd holds for a tensor that stays: parameters, leaves, numbers.

    Its version is checked as autograd would.
    """

    __slots__ = ("tensor", "version")

    def __init__(self, tensor: torch.Tensor) -> None:
        # A node that saves its own output must not hold the output's graph: that would be a cycle which no collector
        # sees. The alias shares the version.
        if tensor.is_leaf:
            self.tensor = tensor
        else:
            self.tensor = detached(tensor)
        self.version = tensor._version


class SavedTensors:
    """The pack and unpack hooks of a session."""

    def __init__(self, session: Session, decisions: str | Callable[[SavedBuffer], str] | None) -> None:
        self.session = session
        self.ledger = session.ledger
        self.residency = session.residency
        self.decisions = decisions
        self.plain_types = frozenset(_PLAIN_TYPES)
        self.least_bytes = 0 if decisions is not None else self.residency.least_eviction_bytes

    @shielded
    def pack(self, tensor: torch.Tensor) -> Any:
        """Take a tensor that autograd saves."""
        if tensor.__class__ not in self.plain_types or tensor.layout is not torch.strided or tensor.is_nested:
            return self.session.subclasses.pack(tensor)
        session = self.session
        session.steps.on_save()
        if (
            not tensor.shape
            or (tensor.is_leaf and tensor.requires_grad)
            or tensor.device != self.ledger.device
            or tensor._is_zerotensor()
        ):
            return self.keep(tensor)
        record = self.ledger.find(tensor)
        buffer = record.current if record is not None else None
        if buffer is None:
            buffer = self.ledger.view_of(tensor).buffer
        if buffer.is_pinned or buffer.size_bytes < self.least_bytes:
            return self.keep(tensor)
        if buffer.num_saved == 0:
            session.counters.kept_bytes += buffer.size_bytes
        buffer.num_saved += 1
        session.num_handles += 1
        handle = Handle(session, buffer, tensor)
        buffer.last_used = self.ledger.clock
        session.counters.num_saved += 1
        buffer.save_order = session.counters.num_saved
        if self.ledger.trace is not None:
            self.ledger.trace.on_save(buffer, handle.view)
        if buffer.strong is None and (buffer.copy is None or self.residency.resident(buffer) is not None):
            self.ledger.hold(buffer, tensor)
        if buffer.strong is not None and buffer.op is not None and session.survey is None:
            # The alias has a counter of its own; the probe shares the user's, and tells of writes that nobody recorded.
            buffer.witness, buffer.witness_version = handle.probe, handle.version
        if self.decisions is not None:
            self._carry_out(buffer, self._decide(buffer, tensor))
        return handle

    def keep(self, tensor: torch.Tensor) -> Pinned:
        """Leave a tensor where it is."""
        if self.ledger.trace is not None:
            self.ledger.trace.on_pin(tensor)
        return Pinned(tensor)

    def _decide(self, buffer: Buffer, tensor: torch.Tensor) -> Action | None:
        decisions = self.decisions
        if isinstance(decisions, str):
            return _ACTIONS[decisions]
        assert decisions is not None
        saved = SavedBuffer(
            index=self.session.steps.next_saved_index(),
            op=buffer.origin,
            module=self.session.modules.current(),
            shape=tuple(tensor.shape),
            dtype=str(tensor.dtype).removeprefix("torch."),
            size_bytes=buffer.size_bytes,
        )
        answer = decisions(saved)
        if answer not in _ACTIONS:
            msg = (
                f"decisions returned {answer!r} for {saved.op or 'a tensor'}: "
                "it must return 'recompute', 'swap' or 'keep'"
            )
            raise ConfigError(msg)
        return _ACTIONS[answer]

    def _carry_out(self, buffer: Buffer, action: Action | None) -> None:
        if action is None:
            return
        self.residency.evict(buffer, action, lazily=True)

    def on_resaved(self, buffer: Buffer) -> None:
        """A saved buffer was written in place: its new content is under the same decision."""
        if isinstance(self.decisions, str):
            self._carry_out(buffer, _ACTIONS[self.decisions])

    @shielded
    def unpack(self, packed: Any) -> torch.Tensor:
        """Give back a saved tensor, bringing its content back when it is away."""
        if packed.__class__ is Handle:
            return self._unpack(packed)
        if packed.__class__ is Pinned:
            if packed.tensor._version != packed.version:
                raise RuntimeError(
                    _modified(packed.tensor.dtype, tuple(packed.tensor.shape), packed.tensor._version, packed.version)
                )
            if self.ledger.trace is not None:
                self.ledger.trace.on_unpack(packed.tensor)
            return packed.tensor
        return packed.unpack(self.unpack)

    def _unpack(self, handle: Handle) -> torch.Tensor:
        view = handle.view
        version = handle.probe._version
        if version != handle.version:
            raise RuntimeError(_modified(view.dtype, tuple(view.shape), version, handle.version))
        buffer = view.buffer
        while buffer.successor is not None:
            buffer = buffer.successor
        with Quietly():
            tensor = view.on(self.residency.bring(buffer))
        if tensor.is_meta and self.session.survey is not None:
            tensor = self.session.survey.view(tensor)
        if self.ledger.trace is not None:
            self.ledger.trace.on_unpack(tensor)
        if self.residency.away and self.residency.prefetches:
            self.residency.prefetch(buffer.save_order)
        return tensor

    def dropped(self, buffer: Buffer) -> None:
        """A handle is gone: the last one lets its buffer go."""
        if faults.is_disabled("release"):
            return
        session = self.session
        session.num_handles -= 1
        following: Buffer | None = buffer
        while following is not None:
            following.num_saved -= 1
            if following.num_saved == 0:
                if self.ledger.trace is not None:
                    self.ledger.trace.on_unsave(following)
                following.fetching = None
                if following.op is not None:
                    self.ledger.let_go(following)
                    following.copy = None
            following = following.successor
        if session.num_handles == 0:
            session.on_last_handle()


def _modified(dtype: torch.dtype, shape: tuple[int, ...], version: int, expected: int) -> str:
    return (
        "one of the variables needed for gradient computation has been modified by an inplace operation: "
        f"[{dtype} {list(shape)}] is at version {version}; expected version {expected} instead."
    )
