"""Estimates of what ops on CPU allocate and free again while they run, for the first run of an op on new shapes.

From the second run on the measured workspace is used. Without the C++ modules nothing is measured, so the estimates
hold for every run. An estimate that is too low lets an op pass the budget, one that is too high refuses budgets in
which the op fits. So there are two: `estimated_bytes` is exact or nearly, and room for it is required; `possible_bytes`
depends on the processor or on strides, and room for it is made only as far as anything can leave. Plans count both.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch

from torchdelta.runtime.record.convolution_workspaces import possible_convolution_bytes, reordered_bytes

if TYPE_CHECKING:
    from collections.abc import Callable

    from torchdelta.aten.facts import OpFacts

__all__ = ["copied_matrix_bytes", "estimated_bytes", "possible_bytes"]

_FLOAT_BYTES: Final = 4  # of float32, in which sums of smaller dtypes are computed
_ONEDNN_BYTES: Final = 72 * 1024  # scratch memory
_KEY_BLOCK: Final = 512
_INDEX_BYTES: Final = 8  # of int64
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

    Convolutions copy into layouts of their own; products in a half precision for which the processor has no
    instructions are computed in float32, as means in half precision are; many kernels copy inputs that are not
    contiguous, and backward kernels expanded gradients.
    """
    tensors = [a for a in args if isinstance(a, torch.Tensor) and a.device.type == "cpu"]
    if not tensors or tensors[0].layout is not torch.strided or any(map(_is_nested, tensors)):
        return 0
    name = facts.base_name
    if facts.reorders:
        return possible_convolution_bytes(facts, args, tensors, output_bytes)
    if name in _PRODUCTS and _is_half(tensors[0]):
        return _ONEDNN_BYTES + 2 * (output_bytes + sum(map(_size_bytes, tensors)))
    if name == "mean" and _is_half(tensors[0]):
        return tensors[0].numel() * _FLOAT_BYTES
    estimate = _POSSIBLE.get(name)
    if estimate is not None:
        return estimate(tensors, args, output_bytes)
    if name.endswith(("_backward", "_backward_data")):
        return sum(_size_bytes(tensor) for tensor in tensors if tensor.layout is torch.strided and 0 in tensor.stride())
    return 0


def _copied(tensors: list[torch.Tensor], _args: Any = (), _output_bytes: int = 0) -> int:
    """Return the bytes of contiguous copies of what is not contiguous."""
    return sum(
        _size_bytes(tensor) for tensor in tensors if tensor.layout is torch.strided and not tensor.is_contiguous()
    )


def _one_copied(tensors: list[torch.Tensor], args: Any, output_bytes: int) -> int:
    """Return the bytes of the first tensor, which is copied in any case, and of other contiguous copies."""
    return _size_bytes(tensors[0]) + _copied(tensors, args, output_bytes)


def _in_channels_last(tensors: list[torch.Tensor], _args: Any, output_bytes: int) -> int:
    """Return the bytes of the input and of the output in channels-last."""
    return _size_bytes(tensors[0]) + output_bytes


def _masked_rows(tensors: list[torch.Tensor], _args: Any, _output_bytes: int) -> int:
    """Return the bytes of the booleans with which a softmax finds rows that are masked out: by element, and by row."""
    x = tensors[0]
    return x.numel() + x.numel() // max(1, x.shape[-1] if x.dim() else 1)


def _products_of_a_batch(tensors: list[torch.Tensor], args: Any, output_bytes: int) -> int:
    """Return the bytes of contiguous copies, and of one matrix of each operand."""
    matrices_bytes = sum(_size_bytes(tensor) // max(1, tensor.shape[0]) for tensor in tensors if tensor.dim())
    return _copied(tensors, args, output_bytes) + matrices_bytes


def _whole_numbers(tensors: list[torch.Tensor], _args: Any, _output_bytes: int) -> int:
    """Return the bytes of whole numbers as int64, in which they are added up."""
    x = tensors[0]
    return 0 if x.is_floating_point() or x.is_complex() else x.numel() * _INDEX_BYTES


def _converted(tensors: list[torch.Tensor], _args: Any, _output_bytes: int) -> int:
    """Return the bytes of tensors that kernels on CPU first convert to the common dtype."""
    tensors = [tensor for tensor in tensors if tensor.dim()] or tensors  # numbers do not change the dtype of tensors
    dtype = tensors[0].dtype
    try:
        for tensor in tensors[1:]:
            dtype = torch.promote_types(dtype, tensor.dtype)
    except RuntimeError:
        return 0  # the op will raise its own error
    return sum(tensor.numel() * dtype.itemsize for tensor in tensors if tensor.dtype != dtype)


def _positions_of_masks(_tensors: list[torch.Tensor], args: Any, _output_bytes: int) -> int:
    """Return the bytes of the positions that the masks among some indices select, if they select all."""
    indices = args[1] if len(args) > 1 and isinstance(args[1], (list, tuple)) else ()
    masks = [index for index in indices if isinstance(index, torch.Tensor) and index.dtype == torch.bool]
    return sum(mask.numel() * mask.dim() * _INDEX_BYTES for mask in masks if mask.device.type == "cpu")


def _scores(query: torch.Tensor, key: torch.Tensor) -> tuple[int, int]:
    """Return the queries of a block of flash attention on CPU, and the scores of a block of queries and keys.

    The sizes of blocks are those of torch 2.13.
    """
    num_queries = query.shape[-2]
    num_queries = min(num_queries, 256 if num_queries >= 768 else 64 if num_queries >= 192 else 32)
    return num_queries, num_queries * min(_KEY_BLOCK, key.shape[-2])


def _attention(tensors: list[torch.Tensor], args: Any, output_bytes: int) -> int:
    """Return what flash attention on CPU takes for each thread.

    Measured at 256 and 1,024 tokens on 1 and 2 threads (torch 2.13): exact but for some 64 bytes.
    """
    num_queries, scores = _scores(args[0], args[1])
    numbers = scores + num_queries * (args[0].shape[-1] + 2)
    return torch.get_num_threads() * numbers * _FLOAT_BYTES + _copied(tensors, args, output_bytes)


def _attention_backward(tensors: list[torch.Tensor], args: Any, output_bytes: int) -> int:
    """Return the same of the backward: two blocks of scores for each thread."""
    _, scores = _scores(args[1], args[2])
    return torch.get_num_threads() * 2 * scores * _FLOAT_BYTES + _copied(tensors, args, output_bytes)


# What ops may take beyond `estimated_bytes`, by the name of the op. Measured (torch 2.13); of others it is not known.
_POSSIBLE: Final[dict[str, Callable[[list[torch.Tensor], Any, int], int]]] = {
    "_scaled_dot_product_flash_attention_for_cpu": _attention,
    "_scaled_dot_product_flash_attention_for_cpu_backward": _attention_backward,
    "_safe_softmax": _masked_rows,
    "logsumexp": _one_copied,
    "sum": _whole_numbers,
    **dict.fromkeys(("upsample_nearest2d", "upsample_bilinear2d", "_upsample_bilinear2d_aa"), _in_channels_last),
    **dict.fromkeys(("index", "index_put", "_index_put_impl_"), _positions_of_masks),
    **dict.fromkeys(("add", "sub", "mul", "div"), _converted),
    **dict.fromkeys(("im2col", "col2im"), _one_copied),
    **dict.fromkeys(("bmm", "baddbmm"), _products_of_a_batch),
    **dict.fromkeys(("native_layer_norm", "native_group_norm", "_softmax", "_log_softmax", "avg_pool2d"), _copied),
    **dict.fromkeys(("index_select", "pixel_shuffle", "pixel_unshuffle"), _copied),
    **dict.fromkeys(("native_layer_norm_backward", "native_group_norm_backward", "avg_pool2d_backward"), _copied),
    **dict.fromkeys(("_softmax_backward_data", "_log_softmax_backward_data"), _copied),
    "max_pool2d_with_indices_backward": _copied,
}


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
