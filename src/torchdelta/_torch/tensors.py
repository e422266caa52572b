"""Questions about tensors that torch does not answer in public, or answers with an error.

See `__init__.py` for the rules.
"""

# torch's stubs do not have all that is here.
# pyright: reportAttributeAccessIssue=false, reportPrivateImportUsage=false

from __future__ import annotations

from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch

from torchdelta._torch.storages import storage_behind

if TYPE_CHECKING:
    from collections.abc import Callable

is_in_transform: Callable[[torch.Tensor], bool] = torch._C._functorch.is_functorch_wrapped_tensor


def is_transforming() -> bool:
    """Return whether a transform of `torch.func` runs on this thread: its ops wrap whatever they return."""
    return torch._C._functorch.peek_interpreter_stack() is not None


tensor_num_holders: Callable[[torch.Tensor], int] = torch.Tensor._use_count
# The address of what a Python tensor stands for; `torch.utils.swap_tensors` exchanges those of two tensors.
identity_of: Callable[[torch.Tensor], int] = attrgetter("_cdata")
# Whether a tensor is zeros without memory, as forward-mode derivatives make them.
is_zerotensor: Callable[[torch.Tensor], bool] = torch.Tensor._is_zerotensor
# The tensor that a view looks at, never a view itself; None for a tensor that is no view.
base_of: Callable[[torch.Tensor], torch.Tensor | None] = attrgetter("_base")
# `version_of` for tensors that are known to count: it costs no Python call, and raises on an inference tensor.
counted_version_of: Callable[[torch.Tensor], int] = attrgetter("_version")
# The hooks that run once a leaf's gradient was added into `.grad`, by id; None where there are none.
post_accumulate_hooks_of: Callable[[torch.Tensor], dict[int, Any] | None] = attrgetter("_post_accumulate_grad_hooks")
# The hooks that get a leaf's gradient before it is added into `.grad`, by id; None where there are none.
tensor_hooks_of: Callable[[torch.Tensor], dict[int, Any] | None] = attrgetter("_backward_hooks")


# [Note: questions that raise]
# The library looks at every tensor that an op touches, and at some that nobody touches. Torch answers a few ordinary
# questions with an error, and a training that never asks them must not meet it:
# - `is_leaf` and `grad_fn` of a view that was made in `no_grad`, once its base was written (the optimizers step complex
#   parameters through such views);
# - `_version` of an inference tensor, which counts none;
# - `shape` of a nested tensor;
# - `untyped_storage()` of sparse and other opaque tensors, and of the wrappers of `torch.func`.
# `requires_grad`, `_base` (never a view itself) and `layout` answer for every tensor. What follows asks the others.


def is_leaf(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is a leaf; False for a view of which torch refuses to tell."""
    try:
        return tensor.is_leaf
    except RuntimeError:
        return False


def is_trained_leaf(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is a leaf that wants a gradient; a view of which torch refuses to tell is as its base."""
    if not tensor.requires_grad:
        return False
    try:
        return tensor.is_leaf
    except RuntimeError:
        base = tensor._base
        return base is not None and base.requires_grad and base.is_leaf


def is_trained_leaf_or_view(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is a leaf that wants a gradient, or a view of one."""
    base = tensor._base
    return is_trained_leaf(tensor) or (base is not None and is_trained_leaf(base))


def grad_fn_of(tensor: torch.Tensor) -> Any:
    """Return the node that made a tensor, or None; None as well for a view of which torch refuses to tell."""
    try:
        return tensor.grad_fn
    except RuntimeError:
        return None


def version_of(tensor: torch.Tensor) -> int:
    """Return how often a tensor was written, by torch's count; 0 for an inference tensor, which counts nothing."""
    return 0 if tensor.is_inference() else tensor._version


def sizes_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return the shape of a tensor; of a nested one, which has none, the shape of each part."""
    try:
        return tuple(tensor.shape)
    except RuntimeError:
        return tuple(list(part.shape) for part in tensor.detach().unbind())


def storage_of(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    """Return the storage of a tensor, or None where it has none. See [Note: storages are known by address]."""
    try:
        return storage_behind(tensor)
    except RuntimeError:  # NotImplementedError is one
        return None


conj: Callable[[torch.Tensor], torch.Tensor] = torch._conj
neg_view: Callable[[torch.Tensor], torch.Tensor] = torch._neg_view


def is_dense(tensor: torch.Tensor) -> bool:
    """Return whether a tensor's elements fill their memory without overlap (`is_non_overlapping_and_dense`)."""
    if tensor.is_contiguous():
        return True
    expected = 1
    pairs = zip(tensor.stride(), tensor.shape, strict=True)
    for stride, length in sorted(pair for pair in pairs if pair[1] != 1):
        if stride != expected:
            return False
        expected *= length
    return True
