"""Every optimizer of torch's database, its implementations, complex parameters and sparse gradients."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import nn

from tests.same_bits.judge import Scope, Step, state_of
from tests.sampling import sample
from tests.torch_suite.budgets import assert_same, verdicts


@functools.cache
def optimizer_infos() -> tuple[Any, ...]:
    """List every optimizer that torch ships with inputs for."""
    from torch.testing._internal.common_optimizers import optim_db

    return tuple(optim_db)


def optimizer_step(info: Any, options: dict[str, Any], dtype: torch.dtype, *, sparse: bool = False) -> Step:
    """Make three steps of one optimizer with given options."""

    def step(scope: Scope) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(5)
        table = nn.Embedding(10, 4, sparse=True)
        weight = nn.Parameter(torch.randn(8, 6, dtype=dtype, generator=generator))
        bias = nn.Parameter(torch.randn(6, dtype=dtype, generator=generator))
        if info.optim_cls is torch.optim.Muon:  # which takes matrices alone
            bias = bias.detach()
        x = torch.randn(3, 8, dtype=dtype, generator=generator)
        parameters = [table.weight] if sparse else [p for p in (weight, bias) if p.requires_grad]
        optimizer = info.optim_cls(parameters, **options)
        losses = []

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            if sparse:
                loss = table(torch.tensor([1, 3, 1])).pow(2).sum()
            else:
                loss = (x @ weight + bias).tanh().abs().pow(2).sum()
            loss.backward()
            return loss

        with scope():
            for _ in range(3):
                loss = optimizer.step(closure) if info.step_requires_closure else closure()
                if not info.step_requires_closure:
                    optimizer.step()
                losses.append(loss.detach())
        state = [list(entry.values()) for entry in optimizer.state_dict()["state"].values()]
        return {"parameters": parameters, "gradients": [p.grad for p in parameters], "losses": losses, "state": state}

    return step


def judged(dtype: torch.dtype, *, sparse: bool, everything: bool = True) -> dict[str, Any]:
    """Return what differs for each optimizer, its inputs and implementations."""
    found: dict[str, Any] = {}
    for info in optimizer_infos():
        if sparse and not (info.supports_sparse or info.only_supports_sparse_grads):
            continue
        if not sparse and (info.only_supports_sparse_grads or (dtype.is_complex and not info.supports_complex)):
            continue
        inputs = info.optim_inputs_func(device="cpu")
        for options in inputs if everything else inputs[:1]:
            for implementation in ({}, *({name: True} for name in info.supported_impls)):
                if implementation.get("differentiable") or (sparse and implementation) or "fused" in implementation:
                    continue
                step = optimizer_step(info, options.kwargs | implementation, dtype, sparse=sparse)
                differing = verdicts(step, "ample", "recompute")
                if differing:
                    found[f"{info.name} {options.desc} {implementation}"] = differing
    return found


def test_the_database_is_the_whole_one() -> None:
    """The promise speaks of every optimizer; a filter that drops many must not pass unseen."""
    assert len(optimizer_infos()) >= 14


@pytest.mark.rest
def test_every_optimizer_with_its_default_options() -> None:
    """Parameters, gradients, losses and states of three steps, for the loop and the foreach implementation."""
    assert judged(torch.float32, sparse=False, everything=False) == {}


@pytest.mark.filterwarnings("ignore")  # combinations of options that torch warns of
@pytest.mark.parametrize("dtype", sample([torch.float32, torch.float64], 0, 1))
def test_every_optimizer_with_every_option(dtype: torch.dtype) -> None:
    """All inputs of the database: learning rates as tensors, weight decay, maximisation and others."""
    assert judged(dtype, sparse=False) == {}


@pytest.mark.filterwarnings("ignore")
def test_every_optimizer_of_complex_parameters() -> None:
    """Optimizers view complex parameters as real ones and write these in place."""
    assert judged(torch.complex64, sparse=False, everything=False) == {}


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # said once a process
def test_every_optimizer_of_sparse_gradients() -> None:
    """Optimizers that take the sparse gradient of an embedding, SparseAdam included."""
    assert judged(torch.float32, sparse=True, everything=False) == {}


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_sparse_gradients_beside_dense_ones(kind: Any) -> None:
    """An embedding with sparse gradients below a dense net, each with its optimizer, with accumulation."""

    def step(scope: Scope) -> dict[str, Any]:
        table, net = kind(200, 64, sparse=True), nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 8))
        sparse, dense = torch.optim.SparseAdam(table.parameters()), torch.optim.AdamW(net.parameters())
        rows = torch.randint(0, 200, (32, 6))
        with scope():
            for _ in range(2):
                for _ in range(2):
                    net(table(rows)).pow(2).mean().backward()
                sparse.step()
                dense.step()
                sparse.zero_grad()
                dense.zero_grad()
            net(table(rows)).pow(2).mean().backward()
        return state_of(table, net)

    assert_same(step)
