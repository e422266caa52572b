"""Modules as users change them: copies, parametrizations, normalised weights, TorchScript, nested tensors."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune

from tests.same_bits.judge import Scope, state_of
from tests.sampling import sample
from tests.torch_suite.budgets import assert_same


def network() -> nn.Sequential:
    """Make a small net with normalisation and dropout."""
    return nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Tanh(), nn.Dropout(0.3), nn.Linear(64, 64))


def through_pickle(model: nn.Module) -> nn.Module:
    """Copy a model by way of pickle's bytes."""
    return pickle.loads(pickle.dumps(model))  # noqa: S301 - written one call before


def through_state(model: nn.Module) -> nn.Module:
    """Copy a model by way of a saved state."""
    stream = io.BytesIO()
    torch.save(model.state_dict(), stream)
    stream.seek(0)
    other = network()
    other.load_state_dict(torch.load(stream, weights_only=True))
    return other


@pytest.mark.parametrize(
    "copied", sample([copy.deepcopy, through_pickle, through_state], 1), ids=["deepcopy", "pickle", "state"]
)
def test_models_copied_between_steps(copied: Any) -> None:
    """Training goes on with a copy that was made in the scope, while a graph of the original is alive."""

    def step(scope: Scope) -> dict[str, Any]:
        model, x = network(), torch.randn(64, 64)
        with scope():
            loss = model(x).pow(2).mean()
            loss.backward(retain_graph=True)
            other = copied(model)
            for _ in range(2):
                optimizer = torch.optim.AdamW(other.parameters())
                other(x).pow(2).mean().backward()
                optimizer.step()
            loss.backward()
        return state_of(model, other)

    # Loading sets storages, which the search for the least budget cannot try on fake tensors.
    assert_same(step, *(("ample", "recompute", "swap") if copied is through_state else ()))


class Symmetric(nn.Module):
    """A parametrization by a symmetric matrix."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Mirror the upper triangle."""
        return x.triu() + x.triu(1).mT


def _symmetric(layer: nn.Linear) -> nn.Module:
    parametrize.register_parametrization(layer, "weight", Symmetric())
    return layer


@pytest.mark.parametrize(
    "wrap",
    [
        _symmetric,
        parametrizations.weight_norm,
        parametrizations.spectral_norm,
        parametrizations.orthogonal,
        lambda layer: prune.l1_unstructured(layer, "weight", 0.5),
    ],
    ids=["symmetric", "weight_norm", "spectral_norm", "orthogonal", "pruned"],
)
def test_parametrized_weights(wrap: Any) -> None:
    """Weights that are computed at every use, with and without the cache, over two steps and an evaluation."""

    def step(scope: Scope) -> dict[str, Any]:
        model, x = nn.Sequential(wrap(nn.Linear(64, 64)), nn.Tanh(), wrap(nn.Linear(64, 64))), torch.randn(64, 64)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with scope():
            for _ in range(2):
                model(x).pow(2).mean().backward()
                optimizer.step()
                with parametrize.cached():
                    (model(x) * model(x * 2)).mean().backward()
                optimizer.zero_grad()
            model.eval()
            model(x).pow(2).mean().backward()
        return state_of(model)

    assert_same(step)


@pytest.mark.filterwarnings("ignore")  # TorchScript is deprecated, and says so
@pytest.mark.parametrize("kind", ["scripted", "traced"])
def test_torchscript_modules(kind: str) -> None:
    """A scripted and a traced module among ordinary layers."""

    def step(scope: Scope) -> dict[str, Any]:
        inner, outer, x = nn.Sequential(nn.Linear(64, 64), nn.Tanh()), nn.Linear(64, 64), torch.randn(64, 64)
        compiled = torch.jit.script(inner) if kind == "scripted" else torch.jit.trace(inner, x)
        # Its optimizer fuses by what it has seen in earlier calls, and plain would not equal itself.
        with torch.jit.optimized_execution(should_optimize=False), scope():
            for _ in range(3):
                compiled(outer(x).sin()).exp().mean().backward()
        return state_of(inner, outer)

    assert_same(step)


@pytest.mark.filterwarnings("ignore")  # nested tensors are a prototype, and say so
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=["strided", "jagged"])
def test_nested_tensors(layout: torch.layout) -> None:
    """Sequences of several lengths as one nested tensor, through a layer and back to padded ones."""

    def step(scope: Scope) -> dict[str, Any]:
        layer, rows = nn.Linear(64, 64), [torch.randn(length, 64, requires_grad=True) for length in (5, 30, 17)]
        with scope():
            nested = torch.nested.as_nested_tensor([row * 2 for row in rows], layout=layout)
            hidden = torch.nn.functional.gelu(layer(nested))
            torch.nested.to_padded_tensor(hidden, 0.0).pow(2).sum().backward()
        return state_of(layer, rows=[row.grad for row in rows])

    # A budget that is too small tries the rest of the step on fake tensors, which cannot be nested ones of this layout.
    assert_same(step, *(("ample", "recompute", "swap") if layout is torch.strided else ()))


def test_lazy_modules() -> None:
    """Parameters that get their shape, and their storage, in the first call inside the scope."""

    def step(scope: Scope) -> dict[str, Any]:
        model = nn.Sequential(nn.LazyLinear(64), nn.Tanh(), nn.LazyBatchNorm1d(), nn.LazyLinear(8))
        x = torch.randn(64, 64)
        with scope():
            model(x)
            optimizer = torch.optim.Adam(model.parameters())
            for _ in range(2):
                model(x).pow(2).mean().backward()
                optimizer.step()
        return state_of(model)

    assert_same(step)


def test_modules_moved_between_dtypes() -> None:
    """A module converted in the scope, and one that is emptied onto meta and filled again."""

    def step(scope: Scope) -> dict[str, Any]:
        model, x = network(), torch.randn(64, 64)
        with scope():
            model(x).pow(2).mean().backward()
            model.double()
            model(x.double()).pow(2).mean().backward()
            model.zero_grad()
            state = model.state_dict()
            other = network().to("meta").to_empty(device="cpu")
            other.load_state_dict(state)
            other(x).pow(2).mean().backward()
        return state_of(model, other)

    assert_same(step)


def test_buffers_written_in_the_forward() -> None:
    """A module that updates a running mean in place and uses it in the same forward."""

    class Running(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mean: torch.Tensor
            self.register_buffer("mean", torch.zeros(64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.mean.lerp_(x.detach().mean(0), 0.1)
            return (x - self.mean) * self.mean.clone().exp()

    def step(scope: Scope) -> dict[str, Any]:
        model, x = nn.Sequential(nn.Linear(64, 64), Running(), nn.Tanh(), Running()), torch.randn(64, 64)
        with scope():
            for _ in range(3):
                model(x).exp().mean().backward()
        return state_of(model)

    assert_same(step)
