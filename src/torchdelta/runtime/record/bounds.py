"""The most that ops take whose output size depends on the content of their inputs.

No meta kernel tells the size of such an output, and the size of one does not tell the next. The bounds hold for any
content. What is allocated besides the outputs was measured on CPU (torch 2.13).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch

from torchdelta._torch.modes import Quietly

if TYPE_CHECKING:
    from collections.abc import Callable

    from torchdelta.aten.facts import OpFacts

__all__ = ["most_bytes"]

_INDEX_BYTES: Final = 8  # of int64
_MASKS: Final = (torch.bool, torch.uint8)


def most_bytes(facts: OpFacts, args: tuple[Any, ...]) -> tuple[int, int] | None:
    """Return the most bytes of an op's outputs and of its workspace; None if nothing limits them, or for another op."""
    bound = _BOUNDS.get(facts.base_name)
    if bound is None or not facts.name.startswith("aten."):
        return None
    try:
        return bound(args)
    except Exception:  # noqa: BLE001 - the op will raise the same error, which the user should see
        return None


def _nonzero(args: tuple[Any, ...]) -> tuple[int, int]:
    x = args[0]
    return x.numel() * x.dim() * _INDEX_BYTES, 0


def _masked_select(args: tuple[Any, ...]) -> tuple[int, int]:
    x, mask = args[:2]
    shape = torch.broadcast_shapes(x.shape, mask.shape)
    num_elements = shape.numel()
    return num_elements * x.element_size(), num_elements * max(2, len(shape)) * _INDEX_BYTES


def _index(args: tuple[Any, ...]) -> tuple[int, int] | None:
    """Let each mask select all, or as many as an index beside it has."""
    x, indices = args[:2]
    tensors = [index for index in indices if index is not None]
    masks = [tensor for tensor in tensors if tensor.dtype in _MASKS]
    if not masks:
        return None
    lengths = [tensor.shape[-1] for tensor in tensors if tensor.dtype not in _MASKS and tensor.dim()]
    num_selected = next((length for length in lengths if length > 1), max(mask.numel() for mask in masks))
    with Quietly():
        positions = torch.empty(num_selected, dtype=torch.int64, device="meta")
        numbers: list[torch.Tensor | None] = []
        for index in indices:
            if index is None:
                numbers.append(None)
            elif index.dtype in _MASKS:
                numbers += [positions] * index.dim()
            else:
                numbers.append(torch.empty(index.shape, dtype=torch.int64, device="meta"))
        output = torch.ops.aten.index.Tensor(torch.empty(x.shape, dtype=x.dtype, device="meta"), numbers)
    return output.numel() * x.element_size(), sum(mask.numel() * mask.dim() for mask in masks) * _INDEX_BYTES


def _unique(args: tuple[Any, ...]) -> tuple[int, int]:
    """Return the elements, and two numbers for each where they are asked for; the op sorts a copy."""
    size_bytes, numbers_bytes = _size_bytes(args[0]), args[0].numel() * _INDEX_BYTES
    return size_bytes + sum(map(bool, args[2:4])) * numbers_bytes, size_bytes + 2 * numbers_bytes


def _unique_dim(args: tuple[Any, ...]) -> tuple[int, int]:
    """Return the slices, and two numbers for each, asked for or not; the op copies the slices twice."""
    size_bytes, numbers_bytes = _size_bytes(args[0]), args[0].shape[args[1]] * _INDEX_BYTES
    return size_bytes + 2 * numbers_bytes, 2 * (size_bytes + numbers_bytes)


def _unique_consecutive(args: tuple[Any, ...]) -> tuple[int, int]:
    dim = next(iter(args[3:]), None)
    if dim is not None:
        return _unique_dim((args[0], dim))
    return _size_bytes(args[0]) + sum(map(bool, args[1:3])) * args[0].numel() * _INDEX_BYTES, 0


def _size_bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


# By the name of the op. `bincount` and `repeat_interleave` have none: a single element may make any number.
_BOUNDS: Final[dict[str, Callable[[tuple[Any, ...]], tuple[int, int] | None]]] = {
    "nonzero": _nonzero,
    "masked_select": _masked_select,
    "index": _index,
    "unique_dim": _unique_dim,
    "unique_consecutive": _unique_consecutive,
    **dict.fromkeys(("_unique", "_unique2"), _unique),
}
