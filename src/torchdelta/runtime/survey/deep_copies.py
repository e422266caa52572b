"""`copy.deepcopy` of real tensors in a survey.

Torch copies the memory of a tensor and puts it into a new empty tensor. In a survey that one is fake, and torch raises:
a copy has to be of the same class. So here it gets a copy without memory, as from `clone`.
"""

from __future__ import annotations

import copy
import threading
from typing import TYPE_CHECKING, Any

import torch

from torchdelta._torch.doors import patch_deep_copies
from torchdelta._torch.tensors import is_leaf

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["allow_deep_copies"]


def allow_deep_copies() -> Callable[[], None]:
    """Let this thread copy real tensors while a survey runs; returns what undoes it."""
    thread_id = threading.get_ident()

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def deepcopy(tensor: torch.Tensor, memo: dict[int, Any]) -> Any:
            is_ours = type(tensor) is torch.Tensor and threading.get_ident() == thread_id
            if not is_ours or not is_leaf(tensor) or id(tensor) in memo:  # torch refuses inner nodes of a graph
                return original(tensor, memo)
            memo[id(tensor)] = copied = tensor.detach().clone()
            if tensor.requires_grad:
                copied.requires_grad_()
            if tensor.grad is not None:
                copied.grad = copy.deepcopy(tensor.grad, memo)
            vars(copied).update(copy.deepcopy(vars(tensor), memo))
            return copied

        return deepcopy

    return patch_deep_copies(make)
