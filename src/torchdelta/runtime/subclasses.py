"""Tensor subclasses: which of them run their own ops, what they wrap, and how their ops pass the recorder.

[Note: ops below a subclass]
A dispatch mode is off while it handles an op, so what a subclass runs inside its own `__torch_dispatch__` would be
neither counted nor given room. An op on a subclass is therefore dispatched a second time with the recorder on, which
declines it; the subclass takes it, and the ops that it runs on the plain tensors inside come to the recorder like any
others. What autograd saves is the subclass itself: that is kept, with its version checked as autograd would.

[Note: subclasses without ops of their own]
A subclass that leaves `__torch_dispatch__` alone (`as_subclass`, `_make_subclass`, `__torch_function__` only) is a
plain tensor with another class. What autograd saves of it is handled like a plain tensor and gets its class back when
it returns. One that carries attributes is kept: they could be anything.
"""

from __future__ import annotations

import enum
import logging
from typing import TYPE_CHECKING, Any

import torch

from torchdelta import _torch
from torchdelta._torch import (
    NoDispatch,
    NoFunction,
    fake_mode,
    graph_task_id,
    num_modes,
    pop_mode,
    push_mode,
    storage_address,
    top_mode,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torchdelta.runtime.ledger import Ledger
    from torchdelta.runtime.recorder import Recorder
    from torchdelta.runtime.session import Session

_runs_own_ops: dict[type, bool] = {torch.Tensor: False, torch.nn.Parameter: False}


class Way(enum.Enum):
    """What the recorder does with an op."""

    RECORD = "the recorder's own business"
    INSIDE = "a subclass runs it: see the ops inside"
    DECLINE = "that op, dispatched a second time"
    RUN = "nothing real: run it"


def runs_own_ops(kind: type[torch.Tensor]) -> bool:
    """Say whether a tensor class has a `__torch_dispatch__` of its own: then its storage may hold nothing at all."""
    answer = _runs_own_ops.get(kind)
    if answer is None:
        answer = getattr(kind, "__torch_dispatch__", None) is not torch.Tensor.__torch_dispatch__  # pyright: ignore[reportAttributeAccessIssue]
        if "<locals>" not in kind.__qualname__:  # classes made again and again would stay alive in the cache
            _runs_own_ops[kind] = answer
    return answer


def inner_tensors(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the plain tensors with real storages behind any tensor.

    A plain one is its own; a wrapper is asked by the protocol that compilers use, else its attributes are looked at.
    """
    if not runs_own_ops(tensor.__class__):
        yield tensor
        return
    if tensor.__class__ is _torch.FakeTensor:
        return
    try:
        with NoDispatch(), NoFunction():
            if tensor.layout is torch.strided and tensor.data_ptr():
                yield tensor.detach()  # made by `_make_subclass`: the memory is its own
        names, _ = tensor.__tensor_flatten__()  # pyright: ignore[reportAttributeAccessIssue]
        inner = [getattr(tensor, name) for name in names]
    except Exception:  # noqa: BLE001 - somebody's own code, half-built objects among them
        inner = list(getattr(tensor, "__dict__", {}).values())
    for item in inner:
        if issubclass(type(item), torch.Tensor) and item is not tensor:
            yield from inner_tensors(item)


def count(ledger: Ledger, value: Any) -> None:
    """Count the plain tensors behind a tensor, or behind those in a list, that came to be unseen."""
    for item in value if isinstance(value, tuple | list) else (value,):
        if not isinstance(item, torch.Tensor):
            continue
        in_backward = graph_task_id() != -1 and not torch.is_grad_enabled()
        for inner in inner_tensors(item):
            try:
                if storage_address(inner) not in ledger.records:
                    if in_backward and inner is item:
                        ledger.know_by_tensor(inner)
                    else:
                        ledger.know(inner.untyped_storage())
            except RuntimeError:  # sparse and other layouts without a storage
                continue


class Foreign:
    """What autograd holds for a saved tensor of another class: its content, packed, and the class to give back."""

    __slots__ = ("kind", "packed")

    def __init__(self, packed: Any, kind: type[torch.Tensor] | None = None) -> None:
        self.packed = packed
        self.kind = kind

    def unpack(self, unpack: Callable[[Any], torch.Tensor]) -> torch.Tensor:
        """Bring back the tensor; what a class does when its attributes are read is not its business here."""
        with NoFunction():
            tensor = unpack(self.packed)
            if self.kind is None:
                return tensor
            with torch.no_grad(), NoDispatch():
                return tensor.as_subclass(self.kind)


class Subclasses:
    """Lets the ops of subclasses pass, and says once a class that what it saves is kept."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self._passing: Any = None  # the op that was dispatched a second time and is to be declined
        self._told: set[str] = set()
        self.were_met = False
        self.is_inside = False  # an op that a subclass runs, and not the user

    def tell(self, kind: type, reason: str) -> None:
        """Say once a class name that something is kept."""
        self.were_met = True
        name = kind.__name__
        if name not in self._told:
            self._told.add(name)
            logging.getLogger("torchdelta").info(
                "tensor subclass %s %s: what autograd saves of it is kept", name, reason
            )

    def way_of(self, func: Any, types: tuple[type, ...]) -> Way:
        """Say what the recorder does with an op that a subclass or another mode may have a part in."""
        if self._passing is func:
            self._passing = None
            return Way.DECLINE
        if fake_mode() is not None:  # shapes alone (the sharding propagation of DTensor): there is no memory in it
            return Way.RUN
        foreign = [kind for kind in types if runs_own_ops(kind)]
        if not foreign:
            return Way.RECORD
        if all(kind is _torch.FakeTensor for kind in foreign):
            return Way.RECORD if self.session.survey is not None else Way.RUN
        self.tell(foreign[0], "runs its own ops")
        return Way.INSIDE

    def call(self, recorder: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
        """Run an op on a subclass with the recorder on inside. See [Note: ops below a subclass]."""
        was_inside, self.is_inside = self.is_inside, True
        try:
            out = self._dispatch(recorder, func, args, kwargs)
        finally:
            self.is_inside = was_inside
        count(self.session.ledger, out)
        return out

    def _dispatch(self, recorder: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
        if num_modes():  # modes of others below us want to see this op, and a second dispatch would pass them by
            return func(*args, **(kwargs or {}))
        self._passing = func
        push_mode(recorder)
        try:
            return func(*args, **(kwargs or {}))
        finally:
            self._passing = None
            if top_mode() is recorder:
                pop_mode()

    def pack(self, tensor: torch.Tensor) -> Any:
        """Take a saved tensor that is not a plain strided one."""
        saved = self.session.saved
        kind = tensor.__class__
        with NoFunction():
            if runs_own_ops(kind):
                if kind is not _torch.FakeTensor:
                    self.tell(kind, "runs its own ops")
                return Foreign(saved.keep(tensor))
            is_opaque = tensor.layout is not torch.strided or tensor.is_nested
            if is_opaque or (tensor.is_leaf and tensor.requires_grad):
                return Foreign(saved.keep(tensor))
            if tensor.__dict__:
                self.tell(kind, "carries attributes")
                return Foreign(saved.keep(tensor))
            with NoDispatch():
                plain = tensor.detach()  # of the base class, with the same version counter
            return Foreign(saved.pack(plain), kind)


def detached(tensor: torch.Tensor) -> torch.Tensor:
    """Return an alias of a tensor that shares its version counter but not its graph.

    A subclass makes it by its own `detach`; one that cannot gives the tensor itself.
    """
    kind = tensor.__class__
    if not runs_own_ops(kind):
        with NoDispatch(), NoFunction():
            alias = tensor.detach()
            if kind is torch.Tensor or kind is torch.nn.Parameter:
                return alias
            alias = alias.as_subclass(kind)
            vars(alias).update(vars(tensor))
            return alias
    try:
        with torch.no_grad(), NoFunction():
            alias = tensor.detach()
    except Exception:  # noqa: BLE001 - somebody's own code
        return tensor
    return alias if alias.__class__ is kind else tensor
