"""What an impossible budget is answered with."""

from __future__ import annotations

import copy
import errno
import gc
import os
import warnings
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.runtime.advice import Run, follow
from tests.runtime.parts import scoped_library
from tests.runtime.programs import mlp, running, same_bits, train
from torchdelta import BudgetError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

BATCHES = [np.full((64, 64), number, np.float32) for number in range(8)]


def _least_budget_bytes(budget_bytes: int) -> int:
    torch.manual_seed(0)
    model, x = mlp(64, 4), torch.randn(256, 64)
    exact = pytest.raises(BudgetError, match=r"This run needs [0-9]")
    with warnings.catch_warnings(action="error"), running(budget_bytes, policy="recompute-only"), exact as kept:
        train(model, x)
    return kept.value.least_budget_bytes


def test_filters_that_raise_do_not_end_a_survey() -> None:
    """Torch warns of what it does itself with fake tensors: an impossible budget has its exact answer all the same."""
    torch.manual_seed(0)
    model, x = mlp(64, 4), torch.randn(256, 64)
    gc.collect()
    with running() as (budget, session):
        beside_bytes = session.ledger.usage.live_bytes - sum(p.nbytes for p in model.parameters()) - x.nbytes
        expected = train(model, x)
    del model, x
    gc.collect()
    least_bytes = _least_budget_bytes(beside_bytes + (budget.summary().peak_bytes - beside_bytes) // 5)
    gc.collect()  # what the error's traceback held
    torch.manual_seed(0)
    model, x = mlp(64, 4), torch.randn(256, 64)
    with running(least_bytes + 64, policy="recompute-only"):  # and the loss of the first step, which the second meets
        assert same_bits(train(model, x), expected)


def weighted_batches() -> tuple[nn.Module, Callable[[], torch.Tensor]]:
    """Return a loss that saves eight batches, which no op can recompute."""
    model = nn.ParameterList([torch.ones(64, 64)])
    return model, lambda: torch.stack([(model[0] * torch.from_numpy(batch.copy())).sum() for batch in BATCHES]).sum()


def test_the_named_budget_holds_with_batches_of_numpy() -> None:
    """Their memory is not the allocator's, and a survey meets some of them for the first time."""
    run = Run(make_optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01))
    followed = follow(weighted_batches, run, 100 << 10)
    assert len(followed.named_bytes) <= 1


@pytest.fixture
def opaque() -> Iterator[Callable[[torch.Tensor], torch.Tensor]]:
    """Define a custom op, which is never recomputed."""
    with scoped_library("torchdelta_survey", "DEF") as library:
        library.define("opaque(Tensor x) -> Tensor")
        library.impl("opaque", lambda x: x * 1, "CPU")
        torch.library.register_fake("torchdelta_survey::opaque", torch.empty_like, lib=library)

        class Opaque(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
                del ctx
                return torch.ops.torchdelta_survey.opaque(x)

            @staticmethod
            def backward(ctx: Any, *gradients: Any) -> Any:
                del ctx
                return gradients[0]

        yield Opaque.apply


def _opaque_layers(
    opaque: Callable[[torch.Tensor], torch.Tensor], num_layers: int, width: int
) -> tuple[nn.Module, Callable[[], torch.Tensor]]:
    model, x = nn.ParameterList([torch.ones(width, width)]), torch.ones(width, width)

    def loss_of() -> torch.Tensor:
        hidden = x * model[0]
        for _ in range(num_layers):
            hidden = opaque(hidden) * model[0]
        return hidden.sum()

    return model, loss_of


def test_the_named_budget_holds_with_a_full_disk(
    opaque: Callable[[torch.Tensor], torch.Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ran full before the budget was found to be too small: what stays for that reason is counted."""
    size_bytes, num_layers, num_on_disk = 64 << 10, 8, 3
    allocate = os.posix_fallocate

    def allocate_until_full(file: int, offset: int, length: int) -> None:
        if offset + length > num_on_disk * size_bytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        allocate(file, offset, length)

    monkeypatch.setattr(os, "posix_fallocate", allocate_until_full)

    def layers() -> tuple[nn.Module, Callable[[], torch.Tensor]]:
        return _opaque_layers(opaque, num_layers, width=128)

    run = Run(make_optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01))
    gc.collect()
    with running() as (_, session):
        beside_bytes = session.ledger.usage.total_bytes
    options: dict[str, Any] = {"tier": "disk", "swap_dir": tmp_path}
    followed = follow(layers, run, beside_bytes + 5 * size_bytes, **options)
    assert len(followed.named_bytes) == 1
    assert followed.named_bytes[0] - beside_bytes >= (num_layers - num_on_disk) * size_bytes


@pytest.mark.parametrize("num_on_tier", [0, 3, 8])
def test_the_named_budget_holds_with_a_small_tier(
    num_on_tier: int, opaque: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    """What does not fit into the tier stays on the device: the least budget counts it."""
    size_bytes, num_layers = 16 << 10, 8

    def layers() -> tuple[nn.Module, Callable[[], torch.Tensor]]:
        return _opaque_layers(opaque, num_layers, width=64)

    run = Run(make_optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01))
    gc.collect()
    with running() as (_, session):
        beside_bytes = session.ledger.usage.total_bytes
    budget_bytes, host_budget = beside_bytes + 5 * size_bytes, max(1, num_on_tier * size_bytes)
    if num_on_tier < num_layers:
        blames_tier = pytest.raises(BudgetError, match="with a larger host_budget")
        with blames_tier, running(budget_bytes, host_budget=host_budget):
            run.train(*layers())
        del blames_tier
    followed = follow(layers, run, budget_bytes, host_budget=host_budget)
    assert len(followed.named_bytes) == 1
    assert followed.named_bytes[0] - beside_bytes >= (num_layers - num_on_tier) * size_bytes
    assert followed.peak_bytes >= 0.75 * followed.named_bytes[0]


def test_deep_copies_do_not_end_a_survey() -> None:
    """Programs copy counters, buffers and weights in a step; torch refuses a copy that becomes a fake tensor."""

    def copying() -> tuple[nn.Module, Callable[[], torch.Tensor]]:
        model, x = mlp(64, 4), torch.randn(256, 64)
        model.register_buffer("scale", torch.full((64,), 2.0))
        leaf = torch.ones(64, requires_grad=True)

        def loss_of() -> torch.Tensor:
            hidden = model(x)
            number, scale, weight, ours, again = copy.deepcopy(
                [torch.tensor(3), model.scale, model[0].weight, leaf, leaf]
            )
            assert number.item() == 3
            assert ours is again
            assert ours.requires_grad
            return (hidden * scale * ours).square().mean() + weight.sum()

        return model, loss_of

    run = Run(make_optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01))
    gc.collect()
    with running() as (_, session):
        beside_bytes = session.ledger.usage.total_bytes
    followed = follow(copying, run, beside_bytes + (200 << 10))
    assert len(followed.named_bytes) == 1


def test_a_metric_in_inference_mode() -> None:
    """Between a forward and its backward: the ops there run on fake tensors, too, not on memory that is not there."""
    w = torch.ones(64, 64, requires_grad=True)
    x, labels = torch.ones(64, 64), torch.zeros(64, dtype=torch.int64)

    def step() -> None:
        logits = x @ w
        with torch.inference_mode():
            (logits.argmax(-1) == labels).float().mean()
            logits.sum(0)
        logits.logsumexp(-1).sum().backward()

    with running(1), pytest.raises(BudgetError, match=r"This run needs [0-9]"):
        step()
