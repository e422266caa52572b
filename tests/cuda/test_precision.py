"""Precision on CUDA: autocast, scaled gradients, TF32, and the switches that change between forward and backward."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - its name everywhere
from torch import nn

from tests.same_bits.judge import Scope, assert_same_bits, state_of

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.cuda


@pytest.fixture(autouse=True)
def _switches() -> Iterator[None]:
    """Put the global switches back."""
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32, torch.backends.cudnn.benchmark
    yield
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32, torch.backends.cudnn.benchmark = before


def network() -> nn.Sequential:
    """Make a net of convolutions and products."""
    return nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(inplace=True), nn.Conv2d(32, 32, 3, stride=2),
        nn.GELU(), nn.Dropout(0.1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10),
    )  # fmt: skip


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    """Draw pictures and labels."""
    return torch.randn(8, 3, 32, 32), torch.randint(0, 10, (8,))


@pytest.mark.parametrize("is_backward_inside", [True, False])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_autocast_with_a_scaler(dtype: torch.dtype, *, is_backward_inside: bool) -> None:
    """Casts are recorded as the ops that they are, and a replay adds none of its own."""

    def step(scope: Scope) -> dict[str, Any]:
        model = network()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        scaler = torch.amp.GradScaler("cuda", init_scale=2.0**10)
        with scope():
            for _ in range(3):
                pictures, labels = batch()
                with torch.autocast("cuda", dtype):
                    loss = F.cross_entropy(model(pictures), labels)
                    if is_backward_inside:
                        scaler.scale(loss).backward()
                if not is_backward_inside:
                    scaler.scale(loss).backward()
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
        return state_of(model, scale=scaler.get_scale(), loss=loss.detach())

    assert_same_bits(step)


def test_switches_that_change_before_backward() -> None:
    """Forward ran with TF32 and the backward runs without: what is recomputed of the forward uses TF32 again."""

    def step(scope: Scope) -> dict[str, Any]:
        model = network()
        with scope():
            for allows in (True, False):
                torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = allows
                pictures, labels = batch()
                loss = F.cross_entropy(model(pictures), labels)
                torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = not allows
                loss.backward()
        return state_of(model)

    assert_same_bits(step)


def test_tuned_convolutions() -> None:
    """With `cudnn.benchmark` the algorithm is chosen at the first meeting of a shape, and a replay meets the same."""
    torch.backends.cudnn.benchmark = True

    def step(scope: Scope) -> dict[str, Any]:
        model = network().to(memory_format=torch.channels_last)
        with scope():
            for _ in range(3):
                pictures, labels = batch()
                F.cross_entropy(model(pictures), labels).backward()
        return state_of(model)

    assert_same_bits(step)


def test_casts_inside_of_an_op() -> None:
    """`nn.Bilinear` multiplies in the low precision inside its kernel, where autocast looks off to a mode."""

    def step(scope: Scope) -> dict[str, Any]:
        model = nn.Bilinear(16, 16, 8)
        with scope(), torch.autocast("cuda", torch.bfloat16):
            model(torch.randn(32, 16), torch.randn(32, 16)).float().pow(2).mean().backward()
        return state_of(model)

    assert_same_bits(step)
