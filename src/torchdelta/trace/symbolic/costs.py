"""What an op costs, read off its arguments: FLOPs, bytes that it moves, memory that it takes inside itself.

FLOPs are those of matrix products, convolutions and attention, by torch's own table (`torch.utils.flop_counter`), which
counts a multiply-add as two, and by the same formula for the attention kernel of the CPU, which the table lacks. The
backward of a convolution is counted here: torch's formula leaves its groups out of the weight's gradient, so that a
depthwise convolution came to as many times too many as it has channels.

[Note: workspaces]
What a kernel allocates inside itself cannot be seen on fake tensors. The rule, which is ours and an estimate:
on CUDA a matrix product takes cuBLAS' workspace of torch's default configuration (8,519,680 bytes), a convolution a
copy of what it reads and makes, at most 128 MiB (at batches that are priced from two others too: `scale`); on CPU a
convolution in a plain layout takes three quarters of all that it reads and makes, for copies in oneDNN's blocked
layouts (0.5 to 1.2 times were measured: docs/design/0003), in channels-last nothing. The backward of the CTC loss
makes a second table like the one that its forward saved. Everything else takes none. It stands in `workspace_bytes` and
not in the buffers, so that who wants the tensors alone has them.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.utils.flop_counter import flop_registry

from torchdelta._torch.ops import schema_of
from torchdelta.trace.model import Product
from torchdelta.trace.scale import CONVOLUTION_WORKSPACE_BYTES

if TYPE_CHECKING:
    from collections.abc import Sequence

_PRODUCTS: Final = frozenset({"mm", "addmm", "bmm", "baddbmm", "addbmm", "mv", "addmv", "_scaled_mm"})
_CONVOLUTIONS: Final = frozenset({"convolution", "convolution_backward"})
_CUBLAS_BYTES: Final = 8_519_680

# They read of their first argument only what they give, not all of it.
_GATHERS: Final = frozenset({"embedding", "index_select", "gather", "index", "nll_loss_forward", "nll_loss2d_forward"})
# They allocate and write nothing.
_ALLOCATIONS: Final = frozenset({"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"})

_CPU_ATTENTION: Final = "_scaled_dot_product_flash_attention_for_cpu"


def flops_of(func: Any, args: Sequence[Any], kwargs: dict[str, Any], output: Any) -> tuple[int, str]:
    """Return the FLOPs of an op and the dtype that it multiplies: 0 and "" for all but products of matrices."""
    packet = func.overloadpacket
    if packet is torch.ops.aten.convolution_backward:
        return _convolution_backward_flops(*args[:3], is_transposed=args[7], output_mask=args[10]), _dtype_name(args)
    name = schema_of(func).name.removeprefix("aten::")
    count = flop_registry.get(packet)
    if count is not None:
        try:
            return int(count(*args, **kwargs, out_val=output)), _dtype_name(args)
        except AssertionError:  # torch 2.11 cannot count attention with fewer key heads than query heads
            if not name.startswith("_scaled_dot_product"):
                raise
            first, num_products = (1, 5) if name.endswith("_backward") else (0, 2)
            return _attention_flops(*args[first : first + 3], num_products=num_products), _dtype_name(args)
    if name == "_grouped_mm":
        left, right = args[:2]
        # Of a stack of matrices against one that is cut into groups, each meets its own part only.
        num_groups = left.shape[0] if left.dim() == 3 and right.dim() == 2 else 1
        return 2 * left.numel() * right.shape[-1] // num_groups, _dtype_name(args)
    if name == _CPU_ATTENTION:
        return _attention_flops(*args[:3], num_products=2), _dtype_name(args)
    if name == f"{_CPU_ATTENTION}_backward":
        return _attention_flops(*args[1:4], num_products=5), _dtype_name(args)
    if name in {"mv", "dot"}:
        return 2 * args[0].numel(), _dtype_name(args)
    if name == "addmv":
        return 2 * args[1].numel(), _dtype_name(args)
    return 0, ""


def product_of(base_name: str, args: Sequence[Any], flops: int) -> Product | None:
    """Return the sizes of what an op multiplies, None for what multiplies nothing or in another way."""
    tensors = [argument for argument in args if isinstance(argument, torch.Tensor)]
    if not flops or not tensors:
        return None
    if base_name == "convolution":
        return _convolution_sizes(args[1], flops, args[8], is_transposed=args[6])
    if base_name == "convolution_backward":
        num_gradients = max(int(args[10][0]) + int(args[10][1]), 1)
        return _convolution_sizes(args[2], flops // num_gradients, args[9], is_transposed=args[7])
    if "attention" in base_name:
        query, key = args[1:3] if "backward" in base_name else args[:2]
        *outer, num_queries, width = query.shape
        return Product(groups=math.prod(outer), rows=num_queries, columns=key.shape[-2], inner=width)
    if base_name in _PRODUCTS and len(tensors) >= 2:
        left, right = tensors[-2:]
        outer = math.prod(left.shape[:-2])
        columns = right.shape[-1] if right.dim() > 1 else 1
        return Product(groups=outer, rows=left.shape[-2], columns=columns, inner=left.shape[-1])
    return None


def _convolution_sizes(weight: torch.Tensor, flops: int, groups: int, *, is_transposed: bool) -> Product:
    """Return the sizes of a convolution of so many FLOPs: these and the weight give the number of positions."""
    first, second, *taps = weight.shape
    inner, columns = (first // groups, second) if is_transposed else (second, first // groups)
    window = math.prod(taps)
    rows = flops // max(2 * groups * inner * columns * window, 1)
    return Product(groups=groups, rows=rows, columns=columns, inner=inner, window=window)


def layout_of(tensors: Sequence[torch.Tensor]) -> str:
    """Return "channels_last" if the first tensor of 4 or 5 dimensions has its channels innermost in memory."""
    for tensor in tensors:
        if tensor.dim() in {4, 5}:
            inside = torch.channels_last if tensor.dim() == 4 else torch.channels_last_3d
            is_last = tensor.is_contiguous(memory_format=inside) and not tensor.is_contiguous()
            return "channels_last" if is_last else ""
    return ""


def moved_bytes(
    base_name: str,
    tensors: Sequence[torch.Tensor],
    outputs: Sequence[torch.Tensor],
    written: Sequence[torch.Tensor],
    unread: torch.Tensor | None,
) -> int:
    """Return the bytes that an op reads and writes: each view in full, what is expanded once.

    `written` are those of its arguments that it writes, `unread` one that it overwrites without reading it.
    """
    if base_name in _ALLOCATIONS:
        return 0
    made_bytes = sum(_view_bytes(tensor) for tensor in outputs if not any(tensor is one for one in written))
    read_bytes = [_view_bytes(tensor) for tensor in tensors if tensor is not unread]
    if base_name in _GATHERS and read_bytes:
        read_bytes[0] = min(read_bytes[0], made_bytes)
    return made_bytes + sum(read_bytes) + sum(_view_bytes(tensor) for tensor in written)


def workspace_bytes(base_name: str, args: Sequence[Any], outputs: Sequence[torch.Tensor], *, device: str) -> int:
    """Return what an op takes inside itself, by rule: see [Note: workspaces]."""
    if base_name == "_ctc_loss_backward":
        return _view_bytes(args[6])
    if base_name in _CONVOLUTIONS:
        tensors = [argument for argument in args if isinstance(argument, torch.Tensor)]
        around_bytes = sum(_view_bytes(tensor) for tensor in (*tensors, *outputs))
        if device != "cpu":
            return min(around_bytes, CONVOLUTION_WORKSPACE_BYTES)
        is_blocked = any(tensor.dim() == 4 and _is_channels_last(tensor) for tensor in tensors)
        return 0 if is_blocked else around_bytes * 3 // 4
    return _CUBLAS_BYTES if device == "cuda" and base_name in _PRODUCTS else 0


def _is_channels_last(tensor: torch.Tensor) -> bool:
    return tensor.is_contiguous(memory_format=torch.channels_last) and not tensor.is_contiguous()


def _view_bytes(tensor: torch.Tensor) -> int:
    count = 1
    for length, stride in zip(tensor.shape, tensor.stride(), strict=True):
        count *= length if stride else min(length, 1)
    return count * tensor.dtype.itemsize


def _convolution_backward_flops(
    grad_output: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    is_transposed: bool,
    output_mask: Sequence[bool],
) -> int:
    """Count the gradients of input and weight, each as many multiply-adds as forward; that of the bias is a sum.

    Each position of the output (of the input, if transposed) meets each element of the weight once a sample: the weight
    has the channels of one group only, so that groups need no factor of their own.
    """
    positions = math.prod((x if is_transposed else grad_output).shape[2:])
    return 2 * x.shape[0] * positions * weight.numel() * (int(output_mask[0]) + int(output_mask[1]))


def _attention_flops(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, num_products: int) -> int:
    *outer, num_queries, width = query.shape
    return num_products * 2 * math.prod(outer) * num_queries * key.shape[-2] * ((width + value.shape[-1]) // 2)


def _dtype_name(args: Sequence[Any]) -> str:
    # addmm and baddbmm start with what they add, which has the same dtype.
    for argument in args:
        if isinstance(argument, torch.Tensor):
            return str(argument.dtype).removeprefix("torch.")
    return ""
