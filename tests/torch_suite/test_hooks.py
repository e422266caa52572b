"""Hooks of every kind that torch lets a user put on tensors, nodes and modules."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from torch import nn

from tests.same_bits.judge import Scope, state_of
from tests.torch_suite.budgets import assert_same


def leaf(*shape: int) -> torch.Tensor:
    """Draw a leaf that wants a gradient, large enough to be worth evicting."""
    return torch.randn(*(shape or (64, 64)), requires_grad=True)


def test_tensor_hooks_that_replace_and_observe_gradients() -> None:
    """Hooks run in their order, see what the one before returned, and may be removed in between."""

    def step(scope: Scope) -> dict[str, Any]:
        x, seen = leaf(), []
        with scope():
            for _ in range(2):
                hidden = (x * 2).sin()
                first = hidden.register_hook(lambda grad: grad * 3)
                hidden.register_hook(lambda grad: seen.append(grad.clone()))
                hidden.register_hook(lambda grad: grad.new_zeros(grad.shape).add_(grad).neg())
                removed = hidden.register_hook(lambda _grad: torch.zeros(1))
                removed.remove()
                loss = hidden.pow(2).sum()
                loss.backward(retain_graph=True)
                first.remove()
                loss.backward()
        return {"grad": x.grad, "seen": seen}

    assert_same(step)


def test_node_prehooks_and_posthooks() -> None:
    """Hooks on nodes of the graph replace what enters and leaves them."""

    def step(scope: Scope) -> dict[str, Any]:
        x, order = leaf(), []
        with scope():
            hidden = (x * 2).sin()
            loss = (hidden * hidden).sum()
            hidden.grad_fn.register_prehook(lambda grads: order.append("pre") or tuple(grad * 2 for grad in grads))
            hidden.grad_fn.register_hook(
                lambda inputs, _outputs: order.append("post") or tuple(grad + 1 for grad in inputs)
            )
            loss.backward()
        return {"grad": x.grad, "order": order}

    assert_same(step)


def test_hooks_after_accumulation() -> None:
    """A hook after accumulation may take the gradient away, and the step goes on."""

    def step(scope: Scope) -> dict[str, Any]:
        model, taken = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64)), []

        def take(parameter: torch.Tensor) -> None:
            taken.append(parameter.grad.clone())
            parameter.grad = None

        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(take)
        with scope():
            for _ in range(2):
                model(torch.randn(64, 64)).pow(2).sum().backward()
        return state_of(model, taken=taken)

    assert_same(step)


@pytest.mark.parametrize("mode", ["all", "any"])
def test_hooks_on_several_gradients(mode: Any) -> None:
    """A multi-gradient hook runs once, when all or any of its tensors have theirs."""

    def step(scope: Scope) -> dict[str, Any]:
        x, seen = leaf(), []
        with scope():
            a, b = (x * 2).sin(), (x * 3).cos()
            torch.autograd.graph.register_multi_grad_hook((a, b), seen.append, mode=mode)
            (a * b).sum().backward()
        return {"grad": x.grad, "seen": seen}

    assert_same(step)


def test_module_hooks_of_every_kind() -> None:
    """Forward and backward hooks and prehooks, with keyword arguments, that change what passes through."""

    def step(scope: Scope) -> dict[str, Any]:
        model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))
        model[0].register_forward_pre_hook(lambda _module, args: (args[0] * 0.5,))
        model[1].register_forward_hook(lambda _module, _args, _kwargs, out: out.sin(), with_kwargs=True)
        model[2].register_full_backward_pre_hook(lambda _module, grads: (grads[0] * 2,))
        model[0].register_full_backward_hook(lambda _module, grads, _outs: (None if grads[0] is None else -grads[0],))
        model.register_forward_hook(lambda _module, _args, out: out * 3, always_call=True)
        x = leaf()
        with scope():
            model(x * 1.5).pow(2).sum().backward()
        return state_of(model, x=x.grad)

    assert_same(step)


def test_a_hook_that_runs_a_backward_of_its_own() -> None:
    """A gradient hook that runs another backward, of a graph made in the scope and of one made in the hook."""

    def step(scope: Scope) -> dict[str, Any]:
        x, y, z = leaf(), leaf(), leaf()
        with scope():
            other = (y * 2).sin().pow(2).sum()

            def inner(grad: torch.Tensor) -> torch.Tensor:
                other.backward()
                with torch.enable_grad():
                    (z * grad.detach()).sin().sum().backward()
                return grad * y.grad

            hidden = (x * 2).tanh()
            hidden.register_hook(inner)
            hidden.pow(2).sum().backward()
        return {"x": x.grad, "y": y.grad, "z": z.grad}

    assert_same(step)


@pytest.mark.parametrize("where", ["tensor", "node", "module", "accumulated"])
def test_hooks_that_raise_and_training_that_goes_on(where: str) -> None:
    """An exception in a hook ends the backward; the next step in the same scope is plain torch's."""

    def fail(*_args: Any) -> None:
        raise ValueError("raised by the user's hook")

    def step(scope: Scope) -> dict[str, Any]:
        model, x, messages = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64)), leaf(), []
        with scope():
            hidden = model[:2](x)
            handle: Any
            if where == "tensor":
                handle = hidden.register_hook(fail)
            elif where == "node":
                handle = hidden.grad_fn.register_prehook(fail)
            elif where == "module":
                handle = model[2].register_full_backward_hook(fail)
            else:
                handle = model[0].weight.register_post_accumulate_grad_hook(fail)
            try:
                model[2](hidden).sum().backward()
            except ValueError as error:
                messages.append(str(error))
            handle.remove()
            del hidden, handle
            model.zero_grad()
            model(x).pow(2).sum().backward()
        return state_of(model, x=x.grad, messages=messages)

    assert_same(step)


def test_retained_gradients_of_views_and_of_what_is_written() -> None:
    """retain_grad on a tensor that is written in place later belongs to its new content."""

    def step(scope: Scope) -> dict[str, Any]:
        x = leaf()
        with scope():
            hidden = x * 2
            hidden.retain_grad()
            row = hidden[0]
            row.retain_grad()
            hidden.mul_(3)
            hidden.retain_grad()
            (hidden.sin().sum() + row.cos().sum()).backward()
        return {"x": x.grad, "hidden": hidden.grad, "row": row.grad}

    assert_same(step)


def test_hooks_on_leaves_through_torch_save() -> None:
    """A gradient hook that serializes what it sees with torch.save and continues with what it loads."""

    def through_bytes(grad: torch.Tensor) -> torch.Tensor:
        stream = io.BytesIO()
        torch.save(grad, stream)
        stream.seek(0)
        return torch.load(stream) * 2

    def step(scope: Scope) -> dict[str, Any]:
        x = leaf()
        x.register_hook(through_bytes)
        with scope():
            (x * 2).sin().exp().sum().backward()
        return {"x": x.grad}

    assert_same(step)
