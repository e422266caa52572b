"""Writes that the recorder does not see, or sees only in part: never a silently wrong gradient."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.same_bits.judge import (
    DECISIONS,
    DEVICE,
    Scope,
    assert_same_bits,
    assert_same_error,
    differences,
    plain_outcome,
    run,
)
from torchdelta import Config, MemoryBudget
from torchdelta._torch.modes import NoDispatch
from torchdelta._torch.tensors import version_of
from torchdelta.errors import TorchdeltaError

if TYPE_CHECKING:
    from collections.abc import Callable


class Tagged(torch.Tensor):
    """A subclass that runs its ops on the plain tensors inside."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with NoDispatch():
            plain = [a.as_subclass(torch.Tensor) if isinstance(a, Tagged) else a for a in args]
            return func(*plain, **(kwargs or {}))


class Doubling(torch.nn.Module):
    """Writes its input."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mul_(2.0).sum()


def product_step(write: Callable[[torch.Tensor], object]) -> Callable[[Scope], dict[str, Any]]:
    """Make a step in which an op's result is written by `write` before it is saved."""

    def step(scope: Scope) -> dict[str, Any]:
        x, w = torch.arange(4096.0) / 4096, torch.ones(4096, requires_grad=True)
        with scope():
            hidden = x * 3
            write(hidden)
            loss = (hidden * w).sum()
            del hidden
            loss.backward()
        return {"grad": w.grad}

    return step


def test_a_compiled_module_that_writes_its_input() -> None:
    """The region is opaque, but what it did to its arguments is seen."""
    assert_same_bits(product_step(torch.compile(Doubling(), backend="eager")))


def test_a_subclass_op_that_writes_a_plain_tensor() -> None:
    """The op runs below the recorder."""
    other = torch.ones(4096).as_subclass(Tagged)
    assert_same_bits(product_step(lambda hidden: hidden.add_(other)))


@pytest.mark.parametrize("decisions", [*DECISIONS.values(), None])
def test_a_number_changed_in_place(decisions: Any) -> None:
    """A 0-dim tensor is kept as the object it is; the replay must read what it was when the op ran."""

    def step(scope: Scope) -> dict[str, Any]:
        x, w = torch.arange(1_000_000.0) / 1e6, torch.ones(1_000_000, requires_grad=True)
        gain = torch.full((), 2.0).clone()
        with scope():
            scaled = x * gain
            loss = (scaled * w).sum()
            del scaled
            gain.add_(1)
            torch.empty(2_300_000).fill_(0)  # presses the product out
            loss.backward()
        return {"grad": w.grad, "gain": gain}

    plain = plain_outcome(step)
    budget = "1TiB" if decisions is not None else 24_500_000
    assert not differences(plain, run(step, lambda: MemoryBudget(budget, Config(decisions=decisions, tier="memory"))))


@pytest.mark.parametrize("kind", DECISIONS)
def test_a_source_changed_after_the_scope(kind: str) -> None:
    """The scope sees nothing any more: the old content, or an error, but never the new content."""

    def step(scope: Scope) -> dict[str, Any]:
        x, w = torch.arange(4096.0) / 4096, torch.ones(4096, requires_grad=True)
        with scope():
            hidden = x * 3
            loss = ((hidden + 1) * w).sum()
        hidden.add_(100)
        loss.backward()
        return {"grad": w.grad}

    outcome = run(step, lambda: MemoryBudget("1TiB", Config(decisions=DECISIONS[kind], tier="memory")))
    assert not differences(plain_outcome(step), outcome) or issubclass(outcome.raised or type(None), TorchdeltaError)


@pytest.mark.parametrize("is_training", [True, False])
def test_batch_norm_that_says_what_it_writes(is_training: bool) -> None:
    """The functional batch norm with declared writes is replayed like the one that hides them."""

    def step(scope: Scope) -> dict[str, Any]:
        weight, bias = torch.ones(16, requires_grad=True), torch.zeros(16, requires_grad=True)
        mean, variance = torch.zeros(16), torch.ones(16)
        x, gain = torch.randn(8, 16, 8, 8), torch.ones(8, 16, 8, 8, requires_grad=True)
        with scope():
            normed = torch.ops.aten._native_batch_norm_legit(
                x * gain, weight, bias, mean, variance, is_training, 0.1, 1e-5
            )[0]
            loss = (normed * gain).sum()
            del normed
            loss.backward()
        return {"grads": (weight.grad, bias.grad, gain.grad), "statistics": (mean, variance)}

    assert_same_bits(step)


@pytest.mark.parametrize("foreach", [True, False])
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
def test_a_graph_older_than_an_optimizer_step(optimizer: Any, *, foreach: bool) -> None:
    """Ops on lists of tensors lose their version bump below any dispatch mode; eager's error must come all the same."""

    def step(scope: Scope) -> dict[str, Any]:
        model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh(), torch.nn.Linear(64, 64))
        stepping = optimizer(model.parameters(), lr=0.1, foreach=foreach)
        x = torch.randn(64, 64)
        with scope():
            older = model(x).square().mean()
            model(x).square().mean().backward()
            stepping.step()
            older.backward()
        return {}

    assert_same_error(step, RuntimeError)


def test_lists_of_tensors_count_one_version_a_write() -> None:
    """No more and no less than plain, also for what is written twice."""

    def step(scope: Scope) -> dict[str, Any]:
        tensors = [torch.ones(4), torch.ones(4)]
        with scope():
            torch._foreach_add_(tensors, 1)
            torch._foreach_mul_([tensors[0]], 2)
            # CUDA's kernel that writes zeros counts no version in plain torch.
            (torch._foreach_zero_ if DEVICE != "cuda" else torch._foreach_neg_)([tensors[1][:2]])
            tensors[0].add_(1)
        return {"versions": [version_of(tensor) for tensor in tensors], "tensors": tensors}

    assert_same_bits(step)
