"""torch's attention kernels on CUDA: seeds and offsets of their dropout are replayed, whichever kernel runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - its name everywhere
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from tests.same_bits.judge import Scope, assert_same_bits, state_of

pytestmark = pytest.mark.cuda


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("dropout", [0.0, 0.2])
@pytest.mark.parametrize(
    "backend",
    [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.MATH],
    ids=lambda backend: backend.name.lower(),
)
def test_attention(backend: SDPBackend, dropout: float, *, is_causal: bool) -> None:
    """Forward is recomputed or swapped with its random state; a kernel that cannot run here is skipped."""

    def step(scope: Scope) -> dict[str, Any]:
        qkv, out = nn.Linear(256, 768), nn.Linear(256, 256)
        with scope():
            for _ in range(2):
                x = torch.randn(4, 128, 256)
                with torch.autocast("cuda", torch.bfloat16), sdpa_kernel(backend):
                    q, k, v = qkv(x).view(4, 128, 3, 4, 64).permute(2, 0, 3, 1, 4)
                    mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=is_causal)
                    loss = out(mixed.transpose(1, 2).reshape(4, 128, 256)).float().pow(2).mean()
                loss.backward()
        return state_of(qkv, out)

    assert_same_bits(step)
