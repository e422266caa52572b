"""Saved tensors: autograd saves a tensor through `pack` and reads it in backward through `unpack`.

[Note: a saved tensor follows its storage]
Pack runs BEFORE the op that saves has finished, and that op may still write the tensor (the noise of `rrelu`,
batch-norm statistics) without bumping its version. Eager would read the new content in backward. So a handle follows
its storage to newer contents (`Buffer.successor`) while the version equals the one at pack time; a bumped version
raises eager's own error. The version is read from a probe that shares the tensor's counter and holds no bytes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from torchdelta._torch.modes import (
    NoDispatch,
    NoFunction,
    Quietly,
    pop_function_mode,
    push_function_mode,
    top_function_mode,
)
from torchdelta._torch.storages import address_of, storage_address, storage_num_holders
from torchdelta._torch.tensors import counted_version_of, identity_of, is_leaf, is_trained_leaf, is_zerotensor, sizes_of
from torchdelta.config import SavedBuffer
from torchdelta.errors import ConfigError, SavedTensorError
from torchdelta.runtime.interrupts import destructor, enter, leave
from torchdelta.runtime.memory.costs import resident
from torchdelta.runtime.policies.base import Action
from torchdelta.runtime.record.shared_gradients import keep_apart
from torchdelta.runtime.state.buffer import View
from torchdelta.runtime.state.kinds import detached

if TYPE_CHECKING:
    from collections.abc import Callable

    from torchdelta.modules import ModulePaths
    from torchdelta.runtime.follow.follower import Follower
    from torchdelta.runtime.memory.restore import Restorer
    from torchdelta.runtime.record.subclasses import Subclasses
    from torchdelta.runtime.state.buffer import Buffer
    from torchdelta.runtime.state.ledger import Ledger
    from torchdelta.runtime.state.steps import StepTracker

_PLAIN_TYPES = {torch.Tensor, torch.nn.Parameter}
_empty: dict[torch.dtype, torch.Tensor] = {}
_unchanging = torch.empty(0)
_ACTIONS = {"recompute": Action.RECOMPUTE, "swap": Action.SWAP, "keep": None}


class Handle:
    """The object that autograd holds in place of a saved tensor."""

    __slots__ = ("ledger", "probe", "save", "version", "view")

    def __init__(self, ledger: Ledger, buffer: Buffer, tensor: torch.Tensor) -> None:
        self.ledger = ledger
        self.view = View(buffer, tensor)
        self.save = -1  # its number among the saves of the step
        self.version = counted_version_of(tensor)
        if ledger.surveys:
            self.probe = _unchanging
            self.version = counted_version_of(_unchanging)
            return
        dtype = tensor.dtype
        with NoDispatch(), NoFunction():
            probe = tensor.detach()
            empty = _empty.get(dtype)
            if empty is None or empty.device != tensor.device:
                empty = _empty[dtype] = torch.empty(0, dtype=dtype, device=tensor.device)
            probe.data = empty
        self.probe = probe

    @classmethod
    def of(cls, ledger: Ledger, view: View, probe: torch.Tensor, version: int) -> Handle:
        """Return the handle of a tensor that does not exist any more; `probe` shares its version counter."""
        handle = cls.__new__(cls)
        handle.ledger, handle.view, handle.save, handle.version = ledger, view, -1, version
        handle.probe = probe
        return handle

    @destructor
    def __del__(self) -> None:
        if hasattr(self, "probe"):  # else it was never counted
            self.ledger.unsave(self.view.buffer)


class Staying:
    """The object that autograd holds for a tensor that stays: parameters, leaves, scalars.

    Its version is checked at unpack, as autograd does.
    """

    __slots__ = ("identity", "tensor", "version")

    def __init__(self, tensor: torch.Tensor) -> None:
        # A node that saves its own output must not hold the output's graph: that would be a cycle which the garbage
        # collector cannot see. The alias shares the version.
        self.tensor = tensor if is_leaf(tensor) else detached(tensor)
        self.version = counted_version_of(tensor)
        self.identity = identity_of(self.tensor)


class SavedTensors:
    """The pack and unpack hooks of a session.

    Args:
        restorer: Brings back evicted buffers; knows the ledger, the room and the device.
        steps: The position in the training step.
        subclasses: Packs saved tensors that are not plain.
        modules: Names the module whose forward runs.
        decisions: One decision for all saved buffers, or a function that decides; None: the policy decides when room is
            needed.
        follower: Carries a program out.
    """

    def __init__(
        self,
        restorer: Restorer,
        steps: StepTracker,
        subclasses: Subclasses,
        modules: ModulePaths,
        decisions: str | Callable[[SavedBuffer], str] | None,
        follower: Follower,
    ) -> None:
        self.restorer = restorer
        self.follower = follower
        self.room = restorer.room
        self.ledger = restorer.ledger
        self.device = restorer.device
        self.counters = restorer.room.counters
        self.observing = self.ledger.observing
        self.steps = steps
        self.subclasses = subclasses
        self.modules = modules
        self.decisions = decisions
        self.plain_types = frozenset(_PLAIN_TYPES)
        self.least_bytes = 0 if decisions is not None else self.room.least_eviction_bytes
        self.persistents = self.room.persistents
        self.program_modes: tuple[object, ...] = ()  # function modes that are on in backward for the program's code
        self.fake_view: Callable[[torch.Tensor], torch.Tensor] | None = None  # in a survey
        self.num_elsewhere = 0  # tensors saved on another device of the same kind, which the budget does not limit

    def pack(self, tensor: torch.Tensor) -> Any:
        """Return what autograd holds for a tensor that it saves."""
        outer = enter()
        try:
            return self._pack(tensor)
        finally:
            leave(outer)

    def _pack(self, tensor: torch.Tensor) -> Any:
        if not self.device.counts_exactly and self.device.is_off():
            return Staying(tensor)
        if self.steps.is_adopting and self.device.streams is not None:  # made on a stream that nobody has noted
            return self.let_stay(tensor)
        if tensor.__class__ not in self.plain_types or tensor.layout is not torch.strided or tensor.is_nested:
            return self.subclasses.pack(tensor, self.pack, self.let_stay)
        self.steps.on_save()
        if not tensor.shape or is_trained_leaf(tensor) or is_zerotensor(tensor):
            return self.let_stay(tensor)
        if tensor.device != self.ledger.device:
            self.num_elsewhere += tensor.device.type == self.ledger.device.type
            return self.let_stay(tensor)
        record = self.ledger.find(tensor)
        buffer = record.current if record is not None else None
        if buffer is None:
            buffer = self.ledger.view_of(tensor).buffer
        if buffer.stays or buffer.size_bytes < self.least_bytes:
            return self.let_stay(tensor)
        return self._take(buffer, tensor)

    def _take(self, buffer: Buffer, tensor: torch.Tensor) -> Handle:
        ledger = self.ledger
        if buffer.num_saved == 0 and not ledger.surveys:
            buffer.has_left = False
            self.counters.saved_bytes += buffer.size_bytes
        self.counters.num_saved += 1
        ledger.save(buffer)
        handle = Handle(ledger, buffer, tensor)
        self.observing.observer.on_save(buffer, handle.view)
        if buffer.strong is None and (buffer.copy is None or resident(buffer) is not None):
            ledger.hold(buffer, tensor)
        if buffer.strong is not None and buffer.op is not None and not ledger.surveys:
            # The alias has its own version counter; the probe shares the tensor's, and so shows unrecorded writes.
            ledger.watch(buffer, handle.probe, handle.version)
        handle.save = self.follower.on_save(buffer, handle.view)
        if self.decisions is not None:
            self._carry_out(buffer, self._decide(buffer, tensor))
        return handle

    def let_stay(self, tensor: torch.Tensor) -> Staying:
        """Let autograd hold the tensor itself, which then stays on the device."""
        observer = self.observing.observer
        if observer.wants_every_op and not is_zerotensor(tensor):  # which has no memory
            observer.on_stay(tensor)
        return Staying(tensor)

    def raise_modified(self, tensor: torch.Tensor, expected: int) -> None:
        """Raise eager's error for a saved tensor that was written since.

        Raises:
            RuntimeError: Always.
        """
        raise RuntimeError(_modified(tensor.dtype, sizes_of(tensor), counted_version_of(tensor), expected))

    def _decide(self, buffer: Buffer, tensor: torch.Tensor) -> Action | None:
        decisions = self.decisions
        if isinstance(decisions, str):
            return _ACTIONS[decisions]
        assert decisions is not None
        saved = SavedBuffer(
            index=self.steps.next_saved_index(),
            op=buffer.origin,
            module=self.modules.current(),
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
        if action is not None:
            self.room.evict(buffer, action, lazily=True)

    def on_resaved(self, buffer: Buffer) -> None:
        """Apply the decision again to a saved buffer that was written in place."""
        if isinstance(self.decisions, str):
            self._carry_out(buffer, _ACTIONS[self.decisions])

    def unpack(self, packed: Any) -> torch.Tensor:
        """Return a saved tensor, after bringing its content back if it was evicted.

        Raises:
            RuntimeError: It was modified in place after it was saved (eager's own message).
        """
        outer = enter()
        modes: list[Any] = []
        while (mode := top_function_mode()) is not None and mode in self.program_modes:
            modes.append(mode)
            pop_function_mode()
        try:
            return self._unpack(packed)
        finally:
            while modes:
                push_function_mode(modes.pop())
            leave(outer)

    def _unpack(self, packed: Any) -> torch.Tensor:
        if packed.__class__ is Handle:
            with self.device.locked():
                return self._unpack_handle(packed)
        if packed.__class__ is Staying:
            if identity_of(packed.tensor) != packed.identity:  # where autograd itself saves it, the exchange raises
                msg = "a saved tensor was exchanged by torch.utils.swap_tensors before its backward"
                raise SavedTensorError(msg)
            if counted_version_of(packed.tensor) != packed.version:
                shape = sizes_of(packed.tensor)
                version = counted_version_of(packed.tensor)
                raise RuntimeError(_modified(packed.tensor.dtype, shape, version, packed.version))
            observer = self.observing.observer
            if observer.wants_every_op:
                observer.on_unpack(packed.tensor)
            if self.persistents is not None:
                self.persistents.lock((packed.tensor,))
            return packed.tensor
        return packed.unpack(self.unpack)

    def _unpack_handle(self, handle: Handle) -> torch.Tensor:
        view = handle.view
        version = counted_version_of(handle.probe)
        if version != handle.version:
            raise RuntimeError(_modified(view.dtype, tuple(view.shape), version, handle.version))
        buffer = view.buffer
        while buffer.successor is not None:
            buffer = buffer.successor
        follower = self.follower
        if follower.is_following:
            follower.before_unpack(handle.save, view.buffer)
        with Quietly():
            storage = self.restorer.bring(buffer)
            own = buffer.witness if buffer.op is None and buffer.witness is not buffer.strong else None
            is_shared = not self.ledger.surveys and _is_held_by_others(buffer, storage)
            tensor = own if own is not None and _is_as_saved(own, view, storage) else view.on(storage)
        if is_shared:
            keep_apart(tensor)
        if tensor.is_meta and self.fake_view is not None:
            tensor = self.fake_view(tensor)
        self.observing.observer.on_unpack(tensor, handle.save)
        if not follower.is_following:
            self.restorer.prefetch(buffer.save_order)
        if self.persistents is not None:
            self.persistents.lock((tensor,))
        return tensor


def _is_held_by_others(buffer: Buffer, storage: torch.UntypedStorage) -> bool:
    """Return whether the program may hold the storage of a buffer. Its Python object is one of its holders."""
    if buffer.strong is not None:
        return not buffer.is_held_by_us_alone()
    return storage_num_holders(address_of(storage)) > 1


def _is_as_saved(own: torch.Tensor, view: View, storage: torch.UntypedStorage) -> bool:
    """Return whether a tensor of the program is the one that was saved, so that it is returned as without a budget.

    If a node returns it as the gradient of a leaf, autograd copies it, because the program holds it. A new tensor on
    its storage would become the leaf's `.grad`, and writes to that would change the program's tensor.
    """
    return (
        own.__class__ is torch.Tensor
        and is_leaf(own)
        and not own.requires_grad
        and own.dtype == view.dtype
        and own.shape == view.shape
        and own.stride() == view.stride
        and own.storage_offset() == view.offset
        and view.flags is None
        and not own.is_conj()
        and not own.is_neg()
        and storage_address(own) == address_of(storage)
    )


def _modified(dtype: torch.dtype, shape: tuple[Any, ...], version: int, expected: int) -> str:
    return (
        "one of the variables needed for gradient computation has been modified by an inplace operation: "
        f"[{dtype} {list(shape)}] is at version {version}; expected version {expected} instead."
    )
