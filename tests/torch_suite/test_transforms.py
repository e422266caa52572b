"""torch.func, forward-mode derivatives, and stateless calls of modules."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, linearize, stack_module_state, vjp, vmap

from tests.same_bits.judge import Scope, state_of
from tests.torch_suite.budgets import assert_same

# That the budget holds inside a transform is not promised yet: a tight one is asked for apart, at the end.
SCOPES = ("ample", "recompute", "swap")


def leaf(*shape: int) -> torch.Tensor:
    """Draw a leaf that wants a gradient."""
    return torch.randn(*(shape or (32, 32)), requires_grad=True)


def network() -> nn.Sequential:
    """Make a small net."""
    return nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 32), nn.GELU(), nn.Linear(32, 1))


TRANSFORMS: dict[str, Any] = {
    "vmap": lambda f, x: vmap(f)(x),
    "vmap chunked": lambda f, x: vmap(f, chunk_size=5)(x),
    "vmap over columns": lambda f, x: vmap(f, in_dims=1, out_dims=-1)(x),
    "vmap of vmap": lambda f, x: vmap(vmap(f))(x.reshape(4, 8, 32)),
    "grad": lambda f, x: grad(lambda row: f(row).sum())(x[0]),
    "vmap of grad": lambda f, x: vmap(grad(lambda row: f(row).sum()))(x),
    "grad of vmap": lambda f, x: grad(lambda rows: vmap(f)(rows).sum())(x),
    "grad of grad": lambda f, x: grad(lambda row: grad(lambda r: f(r).sum())(row).pow(2).sum())(x[1]),
    "vjp": lambda f, x: vjp(f, x[0])[1](torch.ones(32))[0],
    "jvp": lambda f, x: jvp(f, (x[0],), (torch.ones(32),))[1],
    "linearize": lambda f, x: linearize(f, x[0])[1](torch.ones(32)),
    "jacrev": lambda f, x: jacrev(f)(x[0]),
    "jacfwd": lambda f, x: jacfwd(f)(x[0]),
    "hessian": lambda f, x: hessian(lambda row: f(row).sum())(x[0, :6].repeat(2)),
}


@pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr")  # linearize traces by torch.fx
@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms_between_ordinary_ops(name: str) -> None:
    """The transform's inputs come from ordinary ops, and its result goes on into an ordinary backward."""

    def step(scope: Scope) -> dict[str, Any]:
        x, w = leaf(), leaf(32)
        with scope():
            hidden = (x * 2).sin()
            value = TRANSFORMS[name](lambda row: (row * w[: row.shape[-1]]).sin().exp() * row.mean(), hidden)
            (value.tanh().sum() + (hidden * w).cos().sum()).backward()
        return {"x": x.grad, "w": w.grad, "value": value.detach()}

    assert_same(step, *SCOPES)


def test_an_ensemble_of_stacked_modules() -> None:
    """Vmap over the stacked parameters of several nets, trained by ordinary backward and an optimizer."""

    def step(scope: Scope) -> dict[str, Any]:
        models = [network() for _ in range(3)]
        parameters, buffers = stack_module_state(models)
        base = copy.deepcopy(models[0]).to("meta")
        optimizer = torch.optim.SGD(parameters.values(), lr=0.1)
        x = torch.randn(16, 32)

        def call(parameters: Any, buffers: Any, x: torch.Tensor) -> torch.Tensor:
            return functional_call(base, (parameters, buffers), (x,))

        with scope():
            for _ in range(2):
                out = vmap(call, in_dims=(0, 0, None))(parameters, buffers, x)
                out.pow(2).mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        return dict(parameters)

    assert_same(step, *SCOPES)


def test_gradients_per_sample() -> None:
    """Vmap of grad over a module's parameters, with randomness that differs by sample."""

    def step(scope: Scope) -> dict[str, Any]:
        model, x = nn.Sequential(network(), nn.Dropout(0.5)), torch.randn(8, 32)
        parameters = dict(model.named_parameters())

        def loss(parameters: Any, row: torch.Tensor) -> torch.Tensor:
            return functional_call(model, parameters, (row[None],)).pow(2).sum()

        with scope():
            per_sample = vmap(grad(loss), in_dims=(None, 0), randomness="different")(parameters, x)
        return {name: value.detach() for name, value in per_sample.items()}

    assert_same(step, *SCOPES)


def test_stateless_calls() -> None:
    """Modules called with other parameters and buffers, tied ones included, through which gradients flow."""

    def step(scope: Scope) -> dict[str, Any]:
        model = nn.Sequential(nn.Linear(32, 32), nn.BatchNorm1d(32), nn.Linear(32, 32))
        model[2].weight = model[0].weight
        scale, x = leaf(1), torch.randn(16, 32)
        with scope():
            replaced = {name: parameter * scale for name, parameter in model.named_parameters()}
            buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
            functional_call(model, (replaced, buffers), (x,), tie_weights=True).pow(2).sum().backward()
        return state_of(model, scale=scale.grad, buffers=buffers)

    assert_same(step)


def test_dual_numbers_through_a_module() -> None:
    """Forward-mode derivatives of a module's output with dual parameters, then an ordinary backward of the tangent."""

    def step(scope: Scope) -> dict[str, Any]:
        model, x = network(), torch.randn(16, 32)
        with scope(), forward_ad.dual_level():
            duals = {name: forward_ad.make_dual(p, torch.ones_like(p)) for name, p in model.named_parameters()}
            out = functional_call(model, duals, (x * 2,))
            tangent = forward_ad.unpack_dual(out).tangent
            tangent.pow(2).sum().backward()
        return state_of(model, tangent=tangent)

    assert_same(step)


def test_forward_over_reverse() -> None:
    """A product of the Hessian with a vector, by dual numbers through an ordinary backward."""

    def step(scope: Scope) -> dict[str, Any]:
        x, direction = leaf(), torch.randn(32, 32)
        with scope(), forward_ad.dual_level():
            dual = forward_ad.make_dual(x, direction)
            (first,) = torch.autograd.grad((dual * 2).sin().exp().sum(), dual, create_graph=True)
            product = forward_ad.unpack_dual(first).tangent
        return {"product": product.detach()}

    assert_same(step)


@pytest.mark.parametrize("strategy", ["reverse-mode", "forward-mode"])
def test_the_older_functional_derivatives(strategy: str) -> None:
    """torch.autograd.functional: a Jacobian and a Hessian, vectorised or not."""
    functional = torch.autograd.functional

    def step(scope: Scope) -> dict[str, Any]:
        x = torch.randn(12)
        with scope():
            jacobian = functional.jacobian(lambda x: x.sin() * x.sum(), x, vectorize=True, strategy=strategy)
            curvature = functional.hessian(lambda x: x.sin().exp().sum(), x)
            product = functional.vhp(lambda x: x.pow(3).sum(), x, torch.ones(12))[1]
        return {"jacobian": jacobian, "curvature": curvature, "product": product}

    assert_same(step)


def test_transforms_in_a_tight_budget() -> None:
    """A transform's own saved tensors count towards the budget, so the least budget that an error names is enough."""

    def step(scope: Scope) -> dict[str, Any]:
        x = leaf(64, 64)
        with scope():
            value = grad(lambda x: (x.sin().exp().tanh() * x).sum())((x * 2).sin())
            value.pow(2).sum().backward()
        return {"grad": x.grad}

    assert_same(step, "tight")
