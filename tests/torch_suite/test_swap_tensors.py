"""`torch.utils.swap_tensors`, and the conversions of modules that use it."""

from __future__ import annotations

import copy
import weakref
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from tests.runtime.parts import running_session
from tests.runtime.programs import UNLIMITED
from tests.same_bits.judge import Scope, state_of
from tests.torch_suite.budgets import assert_same, assert_same_failure
from torchdelta import MemoryBudget
from torchdelta.errors import SavedTensorError

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def _conversions_swap() -> Iterator[None]:
    torch.__future__.set_swap_module_params_on_conversion(True)
    yield
    torch.__future__.set_swap_module_params_on_conversion(False)


def network() -> nn.Sequential:
    """Make a small net."""
    return nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))


def train(model: nn.Module, x: torch.Tensor, num_steps: int) -> None:
    """Train for some steps with a new optimizer."""
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(num_steps):
        model(x).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)


@pytest.mark.usefixtures("_conversions_swap")
def test_conversions_between_steps() -> None:
    """Parameters and gradients change their dtype in place, and training goes on."""

    def step(scope: Scope) -> dict[str, Any]:
        model, x = network(), torch.randn(64, 64)
        with scope():
            for dtype in (torch.float64, torch.float32, torch.bfloat16):
                train(model, x, 3)
                model.to(dtype)
                x = x.to(dtype)
            train(model, x, 2)
        return state_of(model)

    # An impossible step on fake tensors cannot go on with converted parameters, so no least budget is searched.
    assert_same(step, "ample", "recompute", "swap")


@pytest.mark.usefixtures("_conversions_swap")
def test_states_that_are_loaded_by_swapping() -> None:
    """`load_state_dict` exchanges parameters with those that it loads."""

    def step(scope: Scope) -> dict[str, Any]:
        model, x = network(), torch.randn(64, 64)
        with scope():
            train(model, x, 2)
            saved = copy.deepcopy(model.state_dict())
            train(model, x, 2)
            model.load_state_dict(saved)
            train(model, x, 2)
        return state_of(model)

    assert_same(step, "ample", "recompute", "swap")


def test_gradients_that_are_swapped_in_their_hook() -> None:
    """A hook puts another content into the gradient, under the eyes of those who hold it."""

    def step(scope: Scope) -> dict[str, Any]:
        model, x, taken = network(), torch.randn(64, 64), []

        def hook(parameter: torch.Tensor) -> None:
            gradient = parameter.grad
            parameter.grad = None
            other = torch.full_like(gradient, 0.5)
            torch.utils.swap_tensors(gradient, other)
            taken.extend((gradient, other))

        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(hook)
        with scope():
            for _ in range(3):
                model(x).pow(2).mean().backward()
        return {**state_of(model), "taken": taken}

    assert_same(step, "ample", "recompute", "swap")


def test_records_follow_the_exchanged_storages() -> None:
    """Each storage stays counted until it dies, whichever tensor holds it."""
    p, x = nn.Parameter(torch.ones(1 << 10)), torch.ones(1 << 12)
    with MemoryBudget(UNLIMITED):
        ledger = running_session().ledger
        (p * 2).sum().backward()
        gradient = p.grad
        assert gradient is not None
        p.grad = None
        other = x * 2
        torch.utils.swap_tensors(gradient, other)
        assert (gradient[0].item(), other.numel()) == (2.0, 1 << 10)
        for tensor in (gradient, other):
            record = ledger.find(tensor)
            assert record is not None
            assert record.size_bytes == tensor.nbytes
            assert not weakref.getweakrefs(tensor)
            del record
        before_bytes = ledger.usage.live_bytes
        del gradient, tensor
        assert ledger.usage.live_bytes == before_bytes - (4 << 12)
        del other
        assert ledger.usage.live_bytes == before_bytes - (4 << 12) - (4 << 10)


def test_weak_references_of_others_still_forbid_it() -> None:
    """What plain torch refuses is refused, with the same words."""

    def step(scope: Scope) -> dict[str, Any]:
        t1, t2 = torch.ones(4), torch.zeros(4)
        reference = weakref.ref(t2)
        with scope():
            torch.utils.swap_tensors(t1, t2)
        return {"reference": reference()}

    assert_same_failure(step, RuntimeError)


def test_what_a_replay_reads_is_exchanged_before_it() -> None:
    """The version counter of what a replay reads goes to the other tensor, and is looked up there."""

    def step(scope: Scope) -> dict[str, Any]:
        x, w = torch.randn(64, 64), torch.randn(64, 64, requires_grad=True)
        other = torch.zeros(64, 64).add_(1).add_(1)
        with scope():
            loss = (x + w).tanh().sum()  # plain torch saves the result of `tanh` only
            torch.utils.swap_tensors(x, other)
            loss.backward()
        return {"w": w.grad, "x": x, "other": other}

    assert_same(step)


def test_a_leaf_exchanged_before_its_backward_is_an_error() -> None:
    """Plain torch refuses the exchange; under the hooks of a budget the backward does."""
    x = torch.randn(8, 8, requires_grad=True)
    w = nn.Parameter(torch.randn(8, 8))
    with MemoryBudget(UNLIMITED):
        y = x @ w
        torch.utils.swap_tensors(w, nn.Parameter(torch.zeros(8, 8)))
        with pytest.raises(SavedTensorError, match="exchanged"):
            torch.autograd.grad(y.sum(), x)


def test_parameters_are_exchanged_after_a_scope() -> None:
    """No weak reference of ours outlives it, while its summary may still be read."""
    model = nn.Linear(64, 64)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with MemoryBudget(UNLIMITED) as budget:
        for _ in range(4):
            model(torch.randn(8, 64)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    torch.utils.swap_tensors(model.weight, nn.Parameter(torch.zeros(64, 64)))
    assert not model.weight.any()
    assert budget.summary().num_steps == 4
