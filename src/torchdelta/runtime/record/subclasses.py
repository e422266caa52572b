"""Tensor subclasses: which of them run their own ops, what they wrap, and how their ops pass the recorder.

[Note: ops below a subclass]
A dispatch mode is off while it handles an op, so the ops that a subclass runs inside its own `__torch_dispatch__` would
neither be counted nor be given room. An op on a subclass is therefore dispatched a second time with the recorder on,
which declines it. The subclass then handles it, and the ops that it runs on its inner plain tensors reach the recorder
like any others. Autograd saves the subclass itself, which stays on the device; its version is checked as autograd does.

[Note: subclasses without ops of their own]
A subclass that does not override `__torch_dispatch__` (`as_subclass`, `_make_subclass`, `__torch_function__` only) is a
plain tensor with another class. When autograd saves it, it is handled like a plain tensor and gets its class back at
unpack. One that carries attributes stays: they could be anything.

If such a tensor has a graph, autograd makes another tensor of what the unpack hook returns. That one has the class only
where a dispatch mode is on. So once such a tensor was saved, no backward runs without the recorder.
"""

from __future__ import annotations

import enum
import logging
from typing import TYPE_CHECKING, Any

import torch

from torchdelta._torch.fake import FakeTensor, fake_mode
from torchdelta._torch.modes import NoDispatch, NoFunction, TorchDispatchMode, num_modes, pop_mode, push_mode, top_mode
from torchdelta._torch.tensors import is_trained_leaf
from torchdelta.runtime.state.kinds import runs_own_ops

if TYPE_CHECKING:
    from collections.abc import Callable

    from torchdelta.runtime.state.ledger import Ledger


class Way(enum.Enum):
    """What the recorder does with an op."""

    RECORD = "plain tensors: run and record it"
    INSIDE = "a subclass runs it: record the ops inside"
    DECLINE = "the op of a subclass, dispatched a second time: leave it to the subclass"
    RUN = "fake tensors only: pass through"


class PackedSubclass:
    """The object that autograd holds for a saved tensor of another class: its packed content, and the class."""

    __slots__ = ("kind", "packed")

    def __init__(self, packed: Any, kind: type[torch.Tensor] | None = None) -> None:
        self.packed = packed
        self.kind = kind

    def unpack(self, unpack: Callable[[Any], torch.Tensor]) -> torch.Tensor:
        """Return the tensor, without running the class's `__torch_function__`."""
        with NoFunction():
            tensor = unpack(self.packed)
            if self.kind is None:
                return tensor
            with torch.no_grad(), NoDispatch():
                return tensor.as_subclass(self.kind)


class Subclasses:
    """Dispatches the ops of subclasses, and logs once for each class that its saved tensors stay on the device."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._passing: Any = None  # the op that was dispatched a second time and is to be declined
        self._logged: set[str] = set()
        self.were_met = False
        self.need_a_mode = False  # autograd has saved tensors whose class comes back only under a dispatch mode
        self.is_inside = False  # inside the `__torch_dispatch__` of a subclass

    def log_once(self, kind: type, reason: str) -> None:
        """Log once for each class name that its saved tensors stay on the device."""
        self.were_met = True
        name = kind.__name__
        if name not in self._logged:
            self._logged.add(name)
            logging.getLogger("torchdelta").info(
                "tensor subclass %s %s: its saved tensors stay on the device", name, reason
            )

    def way_of(self, func: Any, types: tuple[type, ...]) -> Way:
        """Return what the recorder does with an op that involves a subclass or another mode."""
        if self._passing is func:
            self._passing = None
            return Way.DECLINE
        if fake_mode() is not None:  # only shapes, no memory (DTensor's sharding propagation)
            return Way.RUN
        kinds = [kind for kind in types if runs_own_ops(kind)]
        if not kinds:
            return Way.RECORD
        if all(kind is FakeTensor for kind in kinds):
            return Way.RECORD if self._ledger.surveys else Way.RUN
        self.log_once(kinds[0], "runs its own ops")
        return Way.INSIDE

    def call(self, recorder: TorchDispatchMode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
        """Run an op on a subclass with the recorder on inside. See [Note: ops below a subclass]."""
        was_inside, self.is_inside = self.is_inside, True
        try:
            out = self._dispatch(recorder, func, args, kwargs)
        finally:
            self.is_inside = was_inside
        self._ledger.know_inner(out)
        return out

    def _dispatch(
        self, recorder: TorchDispatchMode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None
    ) -> Any:
        if num_modes():  # a second dispatch would hide this op from other libraries' modes below the recorder
            return func(*args, **(kwargs or {}))
        self._passing = func
        push_mode(recorder)
        try:
            return func(*args, **(kwargs or {}))
        finally:
            self._passing = None
            if top_mode() is recorder:
                pop_mode()

    def pack(
        self, tensor: torch.Tensor, pack: Callable[[torch.Tensor], Any], let_stay: Callable[[torch.Tensor], Any]
    ) -> Any:
        """Pack a saved tensor that is not a plain strided one.

        Args:
            tensor: The tensor that autograd saves.
            pack: Packs a plain tensor, which may be evicted.
            let_stay: Packs a tensor that stays.
        """
        kind = tensor.__class__
        with NoFunction():
            if runs_own_ops(kind):
                if kind is not FakeTensor:
                    self.log_once(kind, "runs its own ops")
                return PackedSubclass(let_stay(tensor))
            if is_trained_leaf(tensor):
                return PackedSubclass(let_stay(tensor))
            if tensor.requires_grad and kind is not torch.Tensor:
                self.were_met = self.need_a_mode = True
            if tensor.layout is not torch.strided or tensor.is_nested:
                return PackedSubclass(let_stay(tensor))
            if tensor.__dict__:
                self.log_once(kind, "carries attributes")
                return PackedSubclass(let_stay(tensor))
            with NoDispatch():
                plain = tensor.detach()  # of the base class, with the same version counter
            return PackedSubclass(pack(plain), kind)
