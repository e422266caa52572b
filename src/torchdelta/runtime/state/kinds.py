"""Tensor subclasses: which of them dispatch their own ops, which plain tensors they wrap, how to alias one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from torchdelta._torch.fake import FakeTensor
from torchdelta._torch.modes import NoDispatch, NoFunction
from torchdelta._torch.sparse import parts_of_sparse
from torchdelta._torch.storages import storage_address, tensor_address

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

__all__ = [
    "addressed",
    "byte_alias",
    "detached",
    "inner_tensors",
    "local_part",
    "runs_own_ops",
    "tensors_in",
]

_runs_own_ops: dict[type, bool] = {torch.Tensor: False, torch.nn.Parameter: False}


def runs_own_ops(kind: type[torch.Tensor]) -> bool:
    """Return whether a tensor class has its own `__torch_dispatch__`: then its storage may have no memory."""
    answer = _runs_own_ops.get(kind)
    if answer is None:
        answer = getattr(kind, "__torch_dispatch__", None) is not torch.Tensor.__torch_dispatch__  # pyright: ignore[reportAttributeAccessIssue]
        if "<locals>" not in kind.__qualname__:  # do not keep classes alive that a function creates at each call
            _runs_own_ops[kind] = answer
    return answer


def inner_tensors(tensor: torch.Tensor, *, with_fake: bool = False) -> Iterator[torch.Tensor]:
    """Yield the plain tensors with real storages behind any tensor, and fake ones `with_fake`.

    A plain tensor yields itself. A wrapper yields what `__tensor_flatten__` names, or else its tensor attributes.
    """
    if not runs_own_ops(tensor.__class__):
        yield tensor
        return
    if tensor.__class__ is FakeTensor:
        if with_fake:
            yield tensor
        return
    try:
        with NoDispatch(), NoFunction():
            if tensor.layout is torch.strided and tensor_address(tensor):
                yield tensor.detach()  # made by `_make_subclass`: it has memory of its own
        names, _ = tensor.__tensor_flatten__()  # pyright: ignore[reportAttributeAccessIssue]
        inner = [getattr(tensor, name) for name in names]
    except Exception:  # noqa: BLE001 - third-party code, perhaps on a half-built object
        inner = list(getattr(tensor, "__dict__", {}).values())
    for item in inner:
        if issubclass(type(item), torch.Tensor) and item is not tensor:
            yield from inner_tensors(item, with_fake=with_fake)


def addressed(tensors: Iterable[torch.Tensor]) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield the address of each tensor's storage, with the tensor; of a sparse one those of its indices and values."""
    for tensor in tensors:
        try:
            yield storage_address(tensor), tensor
        except RuntimeError:
            yield from addressed(parts_of_sparse(tensor))


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return what this process has of a tensor: of a DTensor its shard, of any other one the tensor itself."""
    if not runs_own_ops(tensor.__class__):
        return tensor
    inner = list(inner_tensors(tensor, with_fake=True))
    return inner[0] if len(inner) == 1 and inner[0].dtype == tensor.dtype else tensor


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in nested tuples, lists and dicts."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, Mapping):  # such as ModelOutput of transformers
        for item in value.values():
            yield from tensors_in(item)


def byte_alias(storage: torch.UntypedStorage, num_bytes: int | None = None) -> torch.Tensor:
    """Return a uint8 tensor over a storage, or over its first `num_bytes`. It keeps the storage alive."""
    with NoDispatch(), NoFunction(), torch.no_grad():
        length = storage.nbytes() if num_bytes is None else num_bytes
        return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, 0, (length,), (1,))


def detached(tensor: torch.Tensor) -> torch.Tensor:
    """Return an alias of a tensor that shares its version counter but not its graph.

    A subclass that dispatches its own ops uses its own `detach`. If that fails, the tensor itself is returned.
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
    except Exception:  # noqa: BLE001 - third-party code
        return tensor
    return alias if alias.__class__ is kind else tensor
