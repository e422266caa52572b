"""Estimates of what ops on CPU allocate and free again while they run, for the first run of an op on new shapes.

From the second run on the measured workspace is used. An estimate that is too low lets the first run pass the budget,
one that is too high refuses budgets in which the op fits. So there are two: `estimated_bytes` is exact or nearly, and
room for it is required; `possible_bytes` depends on the processor or on strides, and room for it is made only as far
as anything can leave.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch

from torchdelta._torch.device import has_half_convolutions, is_mkldnn_enabled

if TYPE_CHECKING:
    from torchdelta.aten.facts import OpFacts

__all__ = ["copied_matrix_bytes", "estimated_bytes", "possible_bytes", "reordered_bytes"]

_CONVOLUTION_DIM: Final = 4
_FLOAT_BYTES: Final = 4  # of float32, in which sums of smaller dtypes are computed
# oneDNN's scratch memory for a convolution of a few elements was 2 to 68 KiB.
_ONEDNN_BYTES: Final = 72 * 1024
# The backward of a convolution over inputs with fewer rows than its kernel covers copies the weight for each thread.
# Measured at 1, 2 and 4 threads on 24 shapes (torch 2.13, AVX2): 4.00 to 4.15 where the weight has 64 KiB or more.
_FEW_ROWS_COPIES: Final = 4
_PRODUCTS: Final = frozenset({"mm", "addmm", "bmm", "baddbmm", "linear", "mkldnn_linear"})
_NO_REDUCTION, _MEAN = 0, 1
# Losses that are computed for each element in a buffer of its own, and then reduced: the element-sized buffers that
# they allocate where they reduce and where they do not, and the position of the argument that names the reduction. The
# output of a reduction may keep such a buffer as its storage (`mse_loss`). Measured (torch 2.13), exact to the byte.
_LOSSES: Final = {
    "mse_loss": (2, 0, 2),
    "smooth_l1_loss": (2, 0, 2),
    "huber_loss": (1, 0, 2),
    "binary_cross_entropy": (1, 0, 3),
    "binary_cross_entropy_with_logits": (2, 1, 4),
    "soft_margin_loss": (1, 0, 2),
}


def estimated_bytes(facts: OpFacts, args: tuple[Any, ...], output_bytes: int) -> int:
    """Return the workspace for which room has to be made before an op runs for the first time."""
    if facts.name.startswith("aten.native_batch_norm_backward."):
        return _batch_norm_workspace_bytes(args)
    if facts.copies_strided:
        return copied_matrix_bytes(args)
    if facts.name.startswith("aten.mkldnn_rnn_layer"):
        return _lstm_workspace_bytes(args, is_backward="backward" in facts.name)
    if facts.base_name in _LOSSES and not any(_is_nested(a) for a in args):
        return _loss_bytes(facts, args)
    if facts.reorders:
        # The outputs of a convolution's backward are as large as its inputs, which are counted already.
        return reordered_bytes(args, 0 if _is_backward_convolution(facts) else output_bytes)
    return 0


def possible_bytes(facts: OpFacts, args: tuple[Any, ...], output_bytes: int) -> int:
    """Return what an op may take beyond `estimated_bytes`.

    The backward of a convolution over few rows copies its weight for each thread.
    Convolutions and products in a half precision for which the processor has no instructions are computed in float32;
    those of oneDNN have scratch memory; means in half precision are computed in float32; backward kernels copy
    expanded gradients.
    """
    tensors = [a for a in args if isinstance(a, torch.Tensor) and a.device.type == "cpu"]
    if not tensors or tensors[0].layout is not torch.strided or any(map(_is_nested, tensors)):
        return 0
    if facts.reorders or (facts.base_name in _PRODUCTS and _is_half(tensors[0])):
        outputs_bytes = 0 if _is_backward_convolution(facts) else output_bytes
        extra_bytes = 2 * (outputs_bytes + sum(map(_size_bytes, tensors))) if _is_half(tensors[0]) else 0
        if facts.reorders and _is_half(tensors[0]) and not has_half_convolutions(tensors[0].dtype):
            # The input is unfolded: a column for each position of the kernel.
            x, weight = tensors[-2:] if _is_backward_convolution(facts) else tensors[:2]
            extra_bytes += _size_bytes(x) * weight.shape[2:].numel()
        return _ONEDNN_BYTES + extra_bytes + _few_rows_bytes(facts, args)
    if facts.base_name == "mean" and _is_half(tensors[0]):
        return tensors[0].numel() * _FLOAT_BYTES
    if facts.base_name.endswith(("_backward", "_backward_data")):
        return sum(_size_bytes(tensor) for tensor in tensors if tensor.layout is torch.strided and 0 in tensor.stride())
    return 0


def _loss_bytes(facts: OpFacts, args: tuple[Any, ...]) -> int:
    num_reduced, num_plain, position = _LOSSES[facts.base_name]
    x, target = args[0], args[1]
    if x.device.type != "cpu":
        return 0
    reduction = args[position] if len(args) > position else _MEAN
    num_elements = x.numel() if x.shape == target.shape else torch.broadcast_shapes(x.shape, target.shape).numel()
    size_bytes = (num_plain if reduction == _NO_REDUCTION else num_reduced) * num_elements * x.element_size()
    if reduction == _MEAN and _is_half(x):
        size_bytes += num_elements * _FLOAT_BYTES
    return size_bytes


def _is_nested(value: Any) -> bool:
    """Return whether a value is a nested tensor: its layout is strided, but it has no strides."""
    return isinstance(value, torch.Tensor) and value.is_nested


def _is_half(tensor: torch.Tensor) -> bool:
    return tensor.dtype in (torch.bfloat16, torch.float16)


def _is_backward_convolution(facts: OpFacts) -> bool:
    return facts.base_name == "convolution_backward"


def _size_bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def reordered_bytes(args: tuple[Any, ...], output_bytes: int) -> int:
    """Estimate the workspace of an op that reorders (`OpFacts.reorders`) on CPU: a blocked copy of each plain tensor.

    Measured on convolutions of ResNet-50 shapes (torch 2.13, oneDNN): 0.5 to 1.2 times inputs plus outputs, and almost
    nothing in channels-last.
    """
    tensors = [a for a in args if isinstance(a, torch.Tensor)]
    if (
        not tensors
        or tensors[0].device.type != "cpu"
        or tensors[0].dim() != _CONVOLUTION_DIM
        or not is_mkldnn_enabled()
    ):
        return 0
    if tensors[0].is_contiguous(memory_format=torch.channels_last) and not tensors[0].is_contiguous():
        return 0
    return output_bytes + sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _few_rows_bytes(facts: OpFacts, args: tuple[Any, ...]) -> int:
    """Return what the backward of a convolution takes for its weight if the kernel covers more rows than there are."""
    if not _is_backward_convolution(facts):
        return 0
    x, weight, dilation = args[1], args[2], args[6]
    if x.dim() != _CONVOLUTION_DIM or (weight.shape[2] - 1) * dilation[0] < x.shape[2]:
        return 0
    copies_bytes = _FEW_ROWS_COPIES * torch.get_num_threads() * _size_bytes(weight)
    return copies_bytes + 2 * (_size_bytes(x) + _size_bytes(args[0]))


def copied_matrix_bytes(args: tuple[Any, ...]) -> int:
    """Return the bytes of the matrices that a product copies on CPU: those with neither dense rows nor dense columns.

    An expanded matrix is one: the gradient of a sum, with which many a backward begins. Exact to the byte (torch 2.13).
    """
    copied_bytes = 0
    for matrix in args[-2:]:
        if not isinstance(matrix, torch.Tensor) or matrix.dim() != 2 or matrix.device.type != "cpu":
            return 0
        if matrix.layout is not torch.strided:
            return 0
        (num_rows, num_columns), (row, column) = matrix.shape, matrix.stride()
        has_dense_rows = column == 1 and row >= max(1, num_columns)
        has_dense_columns = row == 1 and column >= max(1, num_rows)
        if not has_dense_rows and not has_dense_columns:
            copied_bytes += matrix.numel() * matrix.element_size()
    return copied_bytes


def _batch_norm_workspace_bytes(args: tuple[Any, ...]) -> int:
    """Estimate the workspace of batch norm's backward on CPU: a second copy of its input's gradient.

    Measured on inputs of 2 to 5 dimensions in both layouts (torch 2.13): exact to the byte, and almost nothing where
    the incoming gradient is expanded (stride 0), as that of a sum is.
    """
    gradient, x = args[0], args[1]
    if x.device.type != "cpu" or 0 in gradient.stride():
        return 0
    return x.numel() * x.element_size()


def _lstm_workspace_bytes(args: tuple[Any, ...], *, is_backward: bool) -> int:
    """Estimate the workspace of oneDNN's LSTM: its weights in another layout, and its gates.

    Measured on 7 shapes (torch 2.13): the weights, 4.0 to 4.3 times the hidden states (5.3 to 5.6 in backward), 14 KiB.
    """
    x, weights = args[0], args[1:3]
    states_bytes = x.numel() // x.shape[-1] * x.element_size() * weights[1].shape[-1]
    weights_bytes = sum(weight.numel() * weight.element_size() for weight in weights)
    return weights_bytes + int(states_bytes * (5.6 if is_backward else 4.3)) + 14336
