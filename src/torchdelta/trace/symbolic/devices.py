"""What a step does otherwise on CUDA than on the CPU tensors that stand in for it.

[Note: corrected device differences]
Fake tensors are on CPU, since autograd cannot run for a device that is not there. Of what a CUDA step does otherwise
these are put right, by calling the op that torch calls on CUDA; its output has the right shapes without a kernel:

- `dropout` makes `native_dropout`, which saves a bool mask; on CPU it draws and saves a mask of the input's dtype.
- `scaled_dot_product_attention` chooses a kernel: flash attention for float16 and bfloat16 without a mask, the
  memory-efficient one else (a bool mask becomes an additive one first), plain products where neither can. The rule
  follows `sdp_utils.cpp` for a card of compute capability 8.0 or more; cuDNN's kernel is never chosen.
- An LSTM is computed step by step, as GRUs and plain RNNs are anyway, and not in oneDNN's one op, which hides what it
  multiplies and saves.
- Optimizers and gradient clipping take the `_foreach_` ops, whose temporaries are as large as all parameters.
- Autocast casts what CUDA's does, to and fro, weights once: see [Note: CUDA's casts on CPU] in `_torch/autocast.py`.

Not corrected: recurrent layers (cuDNN's are one op, here they are many; on CPU an LSTM is oneDNN's one op, which is
priced too low), an autocast context that was made before tracing on a machine without CUDA (torch warns, and turns it
off), a gradient scaler for CUDA on such a machine (likewise), the statistics of a CPU's layer norm of halves by a
float32 weight (torch's fake kernel has them in halves, they are float32), and memory formats that cuDNN would choose
otherwise.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from torchdelta._torch.autocast import cuda_autocast_on_cpu
from torchdelta._torch.symbolic import foreach_on_cpu, foreach_on_fake, without_onednn

if TYPE_CHECKING:
    from collections.abc import Generator

aten = torch.ops.aten
functional = torch.nn.functional
_attention = functional.scaled_dot_product_attention
_dropout = functional.dropout
_dropout_op = torch.dropout
_MAX_FLASH_WIDTH = 256


@contextlib.contextmanager
def acting_as(device: str) -> Generator[None]:
    """Make a step on CPU tensors call what it would call on a device: `"cpu"` or `"cuda"`."""
    if device == "cpu":
        with foreach_on_fake():
            yield
        return
    # Two doors: the names in torch's module, through which its own layers call, and a mode for whoever has imported the
    # functions themselves. A mode alone is off inside of the torch functions that it sees.
    replaced = {_attention.__name__: _cuda_attention, _dropout.__name__: _cuda_dropout}
    originals = {name: getattr(functional, name) for name in replaced}
    for name, function in replaced.items():
        setattr(functional, name, function)
    try:
        with foreach_on_cpu(), foreach_on_fake(), without_onednn(), cuda_autocast_on_cpu(), _OnCuda():
            yield
    finally:
        for name, function in originals.items():
            setattr(functional, name, function)


class _OnCuda(TorchFunctionMode):
    """Replaces the functions whose choice of op depends on the device."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        kwargs = kwargs or {}
        if func is _dropout:
            return _cuda_dropout(*args, **kwargs)
        if func is _dropout_op:
            return _dropped(*args, **kwargs)
        if func is _attention:
            return _cuda_attention(*args, **kwargs)
        return func(*args, **kwargs)


def _cuda_dropout(
    input: torch.Tensor,  # noqa: A002 - torch's own name
    p: float = 0.5,
    training: bool = True,
    inplace: bool = False,
) -> torch.Tensor:
    return _dropout(input, p, training, inplace=True) if inplace else _dropped(input, p, training)


def _dropped(input: torch.Tensor, p: float, train: bool) -> torch.Tensor:  # noqa: A002 - torch's own name
    # `is_fused_kernel_acceptable` in Dropout.cpp.
    if train and 0 < p < 1 and input.numel() > 0:
        return torch.native_dropout(input, p, True)[0]
    return _dropout_op(input, p, train)


def _cuda_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    if torch.is_autocast_enabled("cpu"):  # before the kernel is chosen
        dtype = torch.get_autocast_dtype("cpu")
        query, key, value = (_lowered(tensor, dtype) for tensor in (query, key, value))
        attn_mask = None if attn_mask is None else _lowered(attn_mask, dtype)
    is_plain = query.dim() == key.dim() == value.dim() == 4 and query.shape[-1] == value.shape[-1]
    has_same_heads = query.dim() == 4 and query.shape[1] == key.shape[1] == value.shape[1]
    is_half = query.dtype in {torch.float16, torch.bfloat16}
    if is_plain and is_half and attn_mask is None and query.shape[-1] <= _MAX_FLASH_WIDTH:
        width = query.shape[-1]
        missing = -width % 8
        if missing:  # `pad_last_dim`
            query, key, value = (torch.nn.functional.pad(t, (0, missing)) for t in (query, key, value))
        used = scale if scale is not None else width**-0.5
        output = aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, False, scale=used)[0]
        return output[..., :width]
    if is_plain and has_same_heads and (is_half or query.dtype == torch.float32):
        if attn_mask is not None:
            attn_mask = _additive(attn_mask, query).expand(*query.shape[:3], key.shape[2])
        needs_statistics = query.requires_grad or key.requires_grad or value.requires_grad
        arguments = (query, key, value, attn_mask, needs_statistics, dropout_p, is_causal)
        return aten._scaled_dot_product_efficient_attention(*arguments, scale=scale)[0]
    with sdpa_kernel(SDPBackend.MATH):
        return _attention(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)


def _lowered(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() and tensor.dtype != torch.float64 else tensor


def _additive(mask: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    """Turn a bool mask into one that is added (`convert_boolean_attn_mask`)."""
    if mask.dtype != torch.bool:
        return mask
    zero = torch.zeros((), dtype=query.dtype)
    return torch.where(mask, zero, zero - torch.inf)
