"""Restores, after a survey, what the program has reassigned while the survey ran.

[Note: what a survey restores]
The user's code runs in a survey as in a step: it assigns fake tensors to attributes, buffers, `.data` and `.grad`, and
creates optimizer states. After an out-of-memory error in plain torch none of that would have happened. So when a survey
begins, references to the present values are kept, and when it ends:

- a dict, list, deque or set below a module, an optimizer or a GradScaler that has received a tensor of the survey gets
  its earlier contents (of the attributes of a module, only those that are such tensors). Other changes stay, because
  they may come from a `finally` of the program, which would have run after an out-of-memory error, too.
- every `.grad` is what it was.
- every `.data` is what it was when the backward began, if that is a real tensor; else what it was before the survey.
  Until the backward the program may have exchanged tensors for a part of its forward and back again.

Fake tensors in other places (a global variable) are not found: any op on them raises `RuntimeError`, see
`FakeModeForOnce`.

The values are kept by aliases. A storage that only its alias keeps alive is counted as freed: in a real step it is.
"""

from __future__ import annotations

import collections
import weakref
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.nn.parameter import UninitializedTensorMixin  # pyright: ignore[reportAttributeAccessIssue]

from torchdelta._torch.fake import FakeTensor
from torchdelta._torch.modes import Quietly
from torchdelta._torch.storages import storage_address
from torchdelta._torch.tensors import is_leaf
from torchdelta.runtime.record.scan import others_may_train
from torchdelta.runtime.state.instances import instances_of
from torchdelta.runtime.state.kinds import detached, runs_own_ops

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torchdelta.runtime.state.ledger import Ledger
    from torchdelta.runtime.survey.small_values import SmallValues

_MOST_ENTRIES: Final = 10_000  # of a container: a larger one (a vocabulary) is not copied
_OWNERS = (torch.nn.Module, torch.optim.Optimizer, torch.amp.GradScaler)
_CONTAINERS = (dict, list, collections.deque, set)


class _Kept:
    """A real tensor: the object if it still lives, and what it looked at."""

    __slots__ = ("alias", "grad", "has_grad", "reference")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.reference = weakref.ref(tensor)
        self.alias = detached(tensor)
        self.has_grad = False
        self.grad: Any = None

    def get(self) -> torch.Tensor:
        tensor = self.reference()
        return self.alias if tensor is None else tensor

    def has_moved(self, tensor: torch.Tensor) -> bool:
        """Return whether the tensor looks at something else than before."""
        return _view_of(tensor) != _view_of(self.alias)


class ProgramState:
    """What the program has when a survey begins.

    Args:
        ledger: Counts the storages.
        mode: The fake-tensor mode of the survey.
        values: The tensors that the survey computes for real.
    """

    def __init__(self, ledger: Ledger, mode: Any, values: SmallValues) -> None:
        self._ledger = ledger
        self._mode = mode
        self._values = values
        self._tensors: dict[int, _Kept] = {}
        self._containers: dict[int, tuple[Any, Any]] = {}  # by id: the container, and its contents
        self._attributes: set[int] = set()  # ids of containers that are the attributes of a module
        # Those of another thread may change at any moment.
        self._is_alone = not others_may_train()
        with Quietly():
            for owner in instances_of(*_OWNERS):
                attributes = vars(owner)
                self._attributes.add(id(attributes))
                self._attributes.update(id(attributes.get(name)) for name in ("_parameters", "_buffers"))
                self._keep_container(attributes)
            for leaf in instances_of(torch.Tensor):
                if leaf.requires_grad and is_leaf(leaf) and _is_plain(leaf):
                    self._keep_leaf(leaf)

    def _keep_container(self, container: Any) -> None:
        if id(container) in self._containers or len(container) > _MOST_ENTRIES:
            return
        self._containers[id(container)] = (container, None)  # it may contain itself
        if isinstance(container, dict):
            contents: Any = {key: self._keep(value) for key, value in list(container.items())}
        else:
            contents = [self._keep(value) for value in list(container)]
        self._containers[id(container)] = (container, contents)

    def _keep(self, value: Any) -> Any:
        if issubclass(type(value), _CONTAINERS):
            self._keep_container(value)
        elif type(value) is tuple:
            for item in value:
                self._keep(item)
        elif issubclass(type(value), torch.Tensor) and not value.requires_grad and _is_plain(value):
            kept = self._keep_tensor(value)
            return kept if type(value) is torch.Tensor else value
        return value

    def _keep_tensor(self, tensor: torch.Tensor) -> _Kept:
        kept = self._tensors.get(id(tensor))
        if kept is None or kept.reference() is not tensor:
            kept = self._tensors[id(tensor)] = _Kept(tensor)
        return kept

    def _keep_leaf(self, leaf: torch.Tensor) -> None:
        if not (self._is_alone or self._was_used(leaf)):
            return
        kept = self._keep_tensor(leaf)
        kept.has_grad = True
        kept.grad = self._keep(leaf.grad)

    def _was_used(self, leaf: torch.Tensor) -> bool:
        """Return whether an op of this thread has read a leaf."""
        record = self._ledger.find(leaf)
        return record is not None and record.current is not None

    def discount(self) -> None:
        """Count storages as freed that only an alias of this object keeps alive."""
        for kept in self._tensors.values():
            self._ledger.suspend_alias(kept.alias)

    def note_backward_start(self) -> None:
        """Accept the real tensors that the program has exchanged so far. See [Note: what a survey restores]."""
        with Quietly():
            for kept in self._tensors.values():
                tensor = kept.reference()
                if tensor is not None and tensor.is_meta == kept.alias.is_meta and kept.has_moved(tensor):
                    kept.alias = detached(tensor)

    def restore(self) -> None:
        """Undo what the program has assigned since."""
        with Quietly():
            for kept in self._tensors.values():
                self._restore_tensor(kept)
            for container, contents in self._containers.values():
                if contents is not None and self._holds_made(container, depth=0):
                    self._restore_container(container, contents)
        self._tensors.clear()
        self._containers.clear()

    def _restore_tensor(self, kept: _Kept) -> None:
        tensor = kept.reference()
        if tensor is None:
            return
        is_ours = self._is_alone or tensor.is_meta != kept.alias.is_meta
        if is_ours and kept.has_moved(tensor):
            tensor.data = kept.alias
        if kept.has_grad:
            grad = _value_of(kept.grad)
            if tensor.grad is not grad:
                tensor.grad = grad

    def _restore_container(self, container: Any, contents: Any) -> None:
        if id(container) in self._attributes:
            for key in [key for key, value in container.items() if self._holds_made(value, depth=1)]:
                if key in contents:
                    container[key] = _value_of(contents[key])
                else:
                    del container[key]
            return
        container.clear()
        if isinstance(container, dict):
            container.update({key: _value_of(value) for key, value in contents.items()})
        else:
            add: Callable[[Iterable[Any]], None] = getattr(container, "update", None) or container.extend
            add([_value_of(value) for value in contents])

    def _holds_made(self, value: Any, *, depth: int) -> bool:
        """Return whether a value is or contains a tensor that the survey made; known containers answer themselves."""
        kind = type(value)
        if kind is FakeTensor:
            return value.fake_mode is self._mode
        if issubclass(kind, torch.Tensor) and self._values.has(value):
            return True
        if issubclass(kind, torch.Tensor):  # `.data` of a tensor that looks at a fake one is of the tensor's class
            record = self._ledger.find(value) if value.is_meta and _is_plain(value) else None
            return record is not None and record.is_fake
        if not issubclass(kind, (*_CONTAINERS, tuple)) or (depth and id(value) in self._containers):
            return False
        if len(value) > _MOST_ENTRIES:
            return False
        items = value.values() if issubclass(kind, dict) else value
        return any(self._holds_made(item, depth=depth + 1) for item in list(items))


def drop_fake_gradients(leaves: Iterable[torch.Tensor]) -> None:
    """Remove fake gradients from leaves: the engine may add one where the survey ended in the middle of a backward."""
    for leaf in leaves:
        if is_leaf(leaf) and isinstance(leaf.grad, FakeTensor):
            leaf.grad = None


def _is_plain(tensor: torch.Tensor) -> bool:
    """Return whether a tensor looks at one storage."""
    kind = type(tensor)
    if runs_own_ops(kind) or issubclass(kind, UninitializedTensorMixin) or tensor.layout is not torch.strided:
        return False
    try:
        return not tensor.is_nested and bool(storage_address(tensor))
    except RuntimeError:  # the wrappers of torch.func have no storage
        return False


def _view_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    return storage_address(tensor), tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype


def _value_of(kept: Any) -> Any:
    return kept.get() if type(kept) is _Kept else kept
