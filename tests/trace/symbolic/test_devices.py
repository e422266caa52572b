"""Which kernels a step on CUDA would choose, and that torch is as it was afterwards."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import dropout, scaled_dot_product_attention

from torchdelta.trace.symbolic import trace_step
from torchdelta.trace.symbolic.devices import acting_as

EFFICIENT = "aten._scaled_dot_product_efficient_attention.default"
FLASH = "aten._scaled_dot_product_flash_attention.default"


class Attention(nn.Module):
    """Attention with what is asked for."""

    def __init__(self, dtype: torch.dtype, mask: str, kv_heads: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones((), dtype=dtype))
        self.mask = mask
        self.kv_heads = kv_heads

    def forward(self, query: torch.Tensor) -> torch.Tensor:
        """Attend to itself, through an imported function."""
        query = query * self.weight
        key = query[:, : self.kv_heads]
        mask = {
            "none": None,
            "bool": torch.ones(16, 16, dtype=torch.bool),
            "added": torch.zeros(16, 16).to(query.dtype),
        }
        return scaled_dot_product_attention(
            query, key, key, attn_mask=mask[self.mask], enable_gqa=self.kv_heads != query.shape[1]
        )


def names_of(dtype: torch.dtype, mask: str, kv_heads: int, device: str = "cuda") -> set[str]:
    """The attention ops and softmaxes of a step."""
    function: Any = lambda: (Attention(dtype, mask, kv_heads), torch.zeros(2, 4, 16, 8, dtype=dtype))  # noqa: E731
    trace = trace_step(function, device=device, optimizer="none")
    return {op.name for op in trace.ops if op.phase == "forward" and ("attention" in op.name or "softmax" in op.name)}


@pytest.mark.parametrize(
    ("dtype", "mask", "kv_heads", "kernel"),
    [
        (torch.float32, "none", 4, EFFICIENT),
        (torch.float32, "bool", 4, EFFICIENT),
        (torch.float32, "added", 4, EFFICIENT),
        (torch.bfloat16, "none", 4, FLASH),
        (torch.float16, "none", 2, FLASH),
        (torch.bfloat16, "added", 4, EFFICIENT),
        (torch.float32, "none", 2, "aten._safe_softmax.default"),
        (torch.float64, "none", 4, "aten._safe_softmax.default"),
    ],
)
def test_attention_on_cuda(dtype, mask, kv_heads, kernel):
    """Half precision without a mask is flash attention, else the memory-efficient kernel if it can, else products."""
    assert names_of(dtype, mask, kv_heads) == {kernel}


def test_attention_on_cpu():
    """The CPU has a kernel of its own."""
    assert names_of(torch.float32, "none", 4, "cpu") == {"aten._scaled_dot_product_flash_attention_for_cpu.default"}


def recurrent(kind: Any) -> Any:
    """A function that makes a recurrent layer and a batch of four times eight steps for it."""
    return lambda: (kind(16, 32), torch.zeros(8, 4, 16))


def test_an_lstm_on_cuda_is_priced():
    """Its products are counted as a GRU's are (four gates for three), and what its gates save is there."""
    lstm, gru = (trace_step(recurrent(kind), optimizer="none") for kind in (nn.LSTM, nn.GRU))
    flops_lstm, flops_gru = (sum(op.flops for op in trace.ops) for trace in (lstm, gru))
    assert flops_lstm == pytest.approx(flops_gru * 4 / 3, rel=0.02)
    gates_bytes = 8 * 4 * 4 * 32 * 4
    assert sum(buffer.size_bytes for buffer in lstm.buffers if buffer.saved and buffer.birth_op >= 0) > gates_bytes


def test_torch_is_left_as_it_was():
    """The replaced functions are back, after an error as well; dropout in eval mode and in place are torch's own."""
    before = (nn.functional.dropout, nn.functional.scaled_dot_product_attention, torch.dropout)
    onednn = torch.backends.mkldnn.enabled
    x = torch.ones(64)
    with acting_as("cuda"):
        assert nn.functional.dropout is not before[0]
        assert torch.equal(nn.functional.dropout(x, 0.5, training=False), x)
        assert dropout(x.clone(), 0.5, inplace=True).unique().tolist() == [0, 2]
        assert torch.dropout(x, 0.5, train=True).unique().tolist() == [0, 2]
        assert not torch.backends.mkldnn.enabled
    with pytest.raises(ZeroDivisionError), acting_as("cuda"):
        _ = 1 // 0
    assert (nn.functional.dropout, nn.functional.scaled_dot_product_attention, torch.dropout) == before
    assert torch.backends.mkldnn.enabled == onednn


@pytest.mark.parametrize(
    ("device", "num_threads", "is_recomputable"), [("cpu", 1, True), ("cpu", 2, False), ("cuda", 1, False)]
)
def test_sums_in_varying_order_are_not_recomputable(device: str, num_threads: int, *, is_recomputable: bool):
    """On CUDA, and on a CPU with several threads, many elements are added to one place in any order."""

    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            places = (torch.zeros(x.numel(), dtype=torch.int64, device=x.device),)
            return (self.weight * 2).index_put(places, x, accumulate=True).sin()

    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        trace = trace_step(lambda: (Sum(), torch.ones(40_000)), device=device, optimizer="none")
    finally:
        torch.set_num_threads(before)
    (op,) = (op for op in trace.ops if op.name == "aten.index_put.default")
    assert op.recomputable == is_recomputable
