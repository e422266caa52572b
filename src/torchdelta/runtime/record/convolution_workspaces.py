"""Estimates of what convolutions on CPU allocate and free again while they run: copies in oneDNN's own layouts.

See workspaces.py for what the two estimates are for. Measured with torch 2.13 on one processor (AVX2), on 1, 2 and 4
threads: ResNet-50's shapes, pictures of 3 channels, outputs of 3 channels, strides, dilations, groups, patches, 1 and 3
dimensions, transposed ones, gradients that are dense, expanded or parts of other tensors.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch

from torchdelta._torch.device import has_half_convolutions, is_mkldnn_enabled

if TYPE_CHECKING:
    from torchdelta.aten.facts import OpFacts

__all__ = ["possible_convolution_bytes", "reordered_bytes"]

_PICTURE_DIM: Final = 4
_TRANSPOSED_POSITION: Final = 6  # of the argument of `convolution` and `_convolution`
_LEAST_CHANNELS: Final = 8  # oneDNN's layouts have a multiple of 8 or 16 channels: matters where there are few
_SCRATCH_BYTES: Final = 72 * 1024  # oneDNN's scratch memory for a convolution of a few elements was 2 to 68 KiB
# The backward of a convolution over inputs with fewer rows than its kernel covers copies the weight for each thread:
# 4.00 to 4.15 times where the weight has 64 KiB or more.
_FEW_ROWS_COPIES: Final = 4


def reordered_bytes(args: tuple[Any, ...], output_bytes: int) -> int:
    """Estimate the workspace of an op that reorders (`OpFacts.reorders`) on CPU: a blocked copy of each plain tensor.

    Measured on convolutions of ResNet-50 shapes (torch 2.13, oneDNN): 0.5 to 1.2 times inputs plus outputs, and almost
    nothing in channels-last.
    """
    tensors = [a for a in args if isinstance(a, torch.Tensor)]
    if (
        not tensors
        or tensors[0].device.type != "cpu"
        or tensors[0].dim() != _PICTURE_DIM
        or not is_mkldnn_enabled()
        or _is_channels_last(tensors[0])
    ):
        return 0
    return output_bytes + sum(map(_size_bytes, tensors))


def possible_convolution_bytes(
    facts: OpFacts, args: tuple[Any, ...], tensors: list[torch.Tensor], output_bytes: int
) -> int:
    """Return what a convolution may take beyond `reordered_bytes`, as far as it was ever measured.

    Args:
        facts: A forward convolution, or its backward.
        args: Its arguments.
        tensors: Those of them that are tensors on the CPU.
        output_bytes: Of its outputs.
    """
    is_backward = facts.base_name == "convolution_backward"
    x, weight = (args[1], args[2]) if is_backward else (args[0], args[1])
    if tensors[0].dtype in (torch.bfloat16, torch.float16):
        return _SCRATCH_BYTES + _possible_half_bytes(x, weight, tensors, 0 if is_backward else output_bytes)
    if _is_channels_last(tensors[0]):
        return _SCRATCH_BYTES + 2 * _size_bytes(weight)
    pictures = [args[0], x] if is_backward else [x]
    most_bytes = sum(map(_blocked_bytes, pictures)) + _size_bytes(weight)
    if not is_backward:
        num_outputs = max(1, weight.shape[0])
        most_bytes += output_bytes * max(1, _LEAST_CHANNELS // num_outputs)
    takes_transposed = facts.base_name in {"convolution", "_convolution"}
    if is_backward or (takes_transposed and args[_TRANSPOSED_POSITION]):
        most_bytes *= 2  # a dense copy of the gradient, and the input's gradient in both layouts
    if is_backward and x.dim() == _PICTURE_DIM and (weight.shape[2] - 1) * args[6][0] >= x.shape[2]:
        most_bytes += _FEW_ROWS_COPIES * torch.get_num_threads() * _size_bytes(weight)
    foreseen_bytes = reordered_bytes(args, 0 if is_backward else output_bytes)
    return max(0, most_bytes - foreseen_bytes) + _SCRATCH_BYTES


def _possible_half_bytes(x: torch.Tensor, weight: torch.Tensor, tensors: list[torch.Tensor], output_bytes: int) -> int:
    """Return what a convolution in half precision may take: it is computed in float32 without instructions for it."""
    most_bytes = 2 * (output_bytes + sum(map(_size_bytes, tensors)))
    if not has_half_convolutions(x.dtype):
        # The input is unfolded: a column for each position of the kernel.
        most_bytes += _size_bytes(x) * weight.shape[2:].numel()
    return most_bytes


def _blocked_bytes(picture: torch.Tensor) -> int:
    """Return the bytes of a picture in one of oneDNN's layouts, which fill up few channels."""
    num_channels = picture.shape[1] if picture.dim() > 1 else 1
    return _size_bytes(picture) * max(1, _LEAST_CHANNELS // max(1, num_channels))


def _is_channels_last(tensor: torch.Tensor) -> bool:
    is_picture = tensor.dim() == _PICTURE_DIM
    return is_picture and tensor.is_contiguous(memory_format=torch.channels_last) and not tensor.is_contiguous()


def _size_bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()
