"""Calls functions and ops that take lists of tensors once for each piece of the lists.

So parameters, gradients and states need not all be on the device at once.

[Note: lists in pieces]
An optimizer with `foreach=True` (the default on CUDA) or `fused=True` takes all parameters, gradients and states at
once. Then all of them have to be here, and the budget cannot be below what they take together. The i-th result depends
only on the i-th tensors of the lists, so the lists may be cut without a change of any bit. A piece takes at most a
sixteenth of the budget, or has one parameter. Two things are cut:

- the functions of `torch.optim` behind `foreach` and `fused` (`_torch/list_functions.py`). A foreach optimizer runs
  about ten list ops, and makes new lists in between: cut by op, everything would leave and come back ten times;
- list ops outside of them, such as those of `clip_grad_norm_` and `GradScaler`.

Other lists stay whole. A parameter that is twice in a list is updated twice, and not in the order of the lists; so is
memory that two of its tensors share. Adafactor takes a default from the first dtype of the list for all. On CUDA, one
tensor that has another dtype or device, or is not contiguous, may send the whole list to kernels that sum in another
order.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch

from torchdelta._torch.storages import storage_address

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["call_in_pieces"]


def call_in_pieces(
    call: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None,
    most_bytes: int,
    *,
    writes_first: bool = False,
) -> Any:
    """Call a function that treats each place of its lists on its own, once for each piece of them.

    Args:
        call: Its first argument is a list of tensors. It returns a list of that length, or None. It may replace
            elements of its lists.
        args: Its arguments. Lists of the first one's length are cut.
        kwargs: Its keyword arguments, cut likewise.
        most_bytes: Most bytes of the tensors of one piece, if it has more than one place.
        writes_first: It writes no list but the first. Otherwise the tensors of any list must not share memory.
    """
    kwargs = kwargs or {}
    length = len(args[0]) if args and _is_list(args[0]) else 0
    values = [*args, *kwargs.values()]
    lists = [value for value in values if _is_list(value) and len(value) == length]
    pieces = list(_pieces(lists, most_bytes)) if length > 1 else []
    is_cut = len(pieces) > 1 and _may_cut(lists, values, length)
    if not is_cut or any(map(_shares_memory, lists[:1] if writes_first else lists)):
        return call(*args, **kwargs)
    results: list[Any] | None = None
    for piece in pieces:
        parts = [list(value[piece]) if _is_list(value) and len(value) == length else value for value in values]
        result = call(*parts[: len(args)], **dict(zip(kwargs, parts[len(args) :], strict=True)))
        for value, part in zip(values, parts, strict=True):
            if part is not value and isinstance(value, list):
                value[piece] = part  # SGD puts new momentum buffers into its list
        if result is not None:
            results = [*(results or ()), *result]
    return results


def _is_list(value: Any) -> bool:
    return isinstance(value, list | tuple)


def _may_cut(lists: list[Any], arguments: list[Any], length: int) -> bool:
    """Return whether all that belongs to one place is in lists, and the tensors of each list are alike."""
    for value in arguments:
        if isinstance(value, torch.Tensor) and value.dim() == 1 and value.numel() == length:
            return False  # maybe one number for each place
    for values in lists:
        tensors = [value for value in values if isinstance(value, torch.Tensor)]
        if not all(tensor.layout is torch.strided for tensor in tensors):
            return False
        if not all(tensor.device.type == "cpu" or tensor.is_contiguous() for tensor in tensors):
            return False
        if len({(tensor.dtype, tensor.device) for tensor in tensors}) > 1:
            return False
    return True


def _shares_memory(values: Any) -> bool:
    """Return whether two tensors of a list may have bytes in common, or are one."""
    spans = sorted(_span_of(value) for value in values if isinstance(value, torch.Tensor))
    return any(a[0] == b[0] and b[1] < a[2] for a, b in pairwise(spans))


def _span_of(tensor: torch.Tensor) -> tuple[int, int, int]:
    """Return the address of a tensor's storage, and from which byte to which of it the tensor may reach."""
    first = int(tensor.storage_offset())
    steps = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    end = first + int(steps) + 1 if tensor.numel() else first
    return storage_address(tensor), first * tensor.itemsize, end * tensor.itemsize


def _pieces(lists: list[Any], most_bytes: int) -> Iterator[slice]:
    begin, piece_bytes = 0, 0
    length = len(lists[0])
    for place in range(length):
        values = [values[place] for values in lists]
        size_bytes = sum(value.numel() * value.itemsize for value in values if isinstance(value, torch.Tensor))
        if place > begin and piece_bytes + size_bytes > most_bytes:
            yield slice(begin, place)
            begin, piece_bytes = place, 0
        piece_bytes += size_bytes
    yield slice(begin, length)
