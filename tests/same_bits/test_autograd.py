"""Same bits under everything that autograd itself lets a user do."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - its name everywhere
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.same_bits.judge import Scope, assert_same_bits, assert_same_error, state_of

if TYPE_CHECKING:
    from collections.abc import Callable


def network() -> nn.Sequential:
    """Make a small net with dropout."""
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Dropout(0.3), nn.Linear(16, 8), nn.GELU(), nn.Linear(8, 1))


@pytest.mark.parametrize("use_reentrant", [False, True], ids=["non-reentrant", "reentrant"])
@pytest.mark.parametrize("preserve_rng_state", [True, False], ids=["rng-kept", "rng-free"])
def test_checkpoint_inside(*, use_reentrant: bool, preserve_rng_state: bool) -> None:
    """Blocks that torch recomputes itself, between blocks that the engine recomputes."""

    def step(scope: Scope) -> dict[str, Any]:
        outer, inner = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.3), nn.Tanh()), network()
        x = torch.randn(4, 8, requires_grad=True)
        if not preserve_rng_state:
            inner.eval()
        with scope():
            hidden = outer(x * 2)
            hidden = checkpoint(inner, hidden, use_reentrant=use_reentrant, preserve_rng_state=preserve_rng_state)
            (hidden.exp() * outer(x.sin())).sum().backward()
        return state_of(outer, inner, x=x.grad)

    assert_same_bits(step)


def test_nested_checkpoints_of_both_kinds() -> None:
    """A checkpoint within a checkpoint, and one kind after the other."""

    def step(scope: Scope) -> dict[str, Any]:
        model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Tanh())
        x = torch.randn(4, 8, requires_grad=True)

        def nested(hidden: torch.Tensor) -> torch.Tensor:
            return checkpoint(model, model(hidden), use_reentrant=False)

        with scope():
            hidden = checkpoint(nested, x * 2, use_reentrant=False)
            checkpoint(model, hidden.sin(), use_reentrant=True).exp().sum().backward()
        return state_of(model, x=x.grad)

    assert_same_bits(step)


class Cube(torch.autograd.Function):
    """A cube that saves an input, an output and an intermediate."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        """Cube, saving both factors."""
        square = x * x
        cube = square * x
        ctx.save_for_backward(x, square, cube)
        return cube

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        """Use all that was saved."""
        _, square, cube = ctx.saved_tensors
        return grads[0] * (3 * square + 0 * cube)


class NumpySquare(torch.autograd.Function):
    """A square that numpy computes, invisible to torch."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        """Square outside torch."""
        square = torch.from_numpy(np.square(x.detach().numpy()))
        ctx.save_for_backward(x, square)
        return square

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        """Differentiate inside torch."""
        x, square = ctx.saved_tensors
        return grads[0] * 2 * x + 0 * square


class InPlaceDouble(torch.autograd.Function):
    """A function that doubles its input in place and says so."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        """Double in place."""
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(_ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        """Double the gradient."""
        return grads[0] * 2


@pytest.mark.parametrize("function", [Cube, NumpySquare, InPlaceDouble])
def test_custom_functions(function: type[torch.autograd.Function]) -> None:
    """Functions of the user, whose results feed ordinary ops and each other."""

    def step(scope: Scope) -> dict[str, Any]:
        x = torch.randn(8, 8, requires_grad=True)
        with scope():
            hidden = function.apply(x * 1.5)
            hidden = function.apply((hidden * hidden.sin()).cos())
            hidden.tanh().mean().backward()
        return {"grad": x.grad}

    assert_same_bits(step)


def test_retain_graph() -> None:
    """The same graph walked three times: what was restored once can be needed again."""

    def step(scope: Scope) -> dict[str, Any]:
        model, x = network(), torch.randn(4, 8, requires_grad=True)
        with scope():
            loss = model(x).sum()
            loss.backward(retain_graph=True)
            loss.backward(retain_graph=True)
            loss.backward()
        return state_of(model, x=x.grad)

    assert_same_bits(step)


def test_backward_through_a_freed_graph() -> None:
    """A second backward without retain_graph is the user's error, and stays the same error."""

    def step(scope: Scope) -> dict[str, Any]:
        model, x = network(), torch.randn(4, 8)
        with scope():
            loss = model(x).sum()
            loss.backward()
            loss.backward()
        return {}

    assert_same_error(step, RuntimeError)


def test_double_backward() -> None:
    """A gradient penalty: the first backward is recorded and differentiated itself."""

    def step(scope: Scope) -> dict[str, Any]:
        model, x = network(), torch.randn(4, 8, requires_grad=True)
        with scope():
            value = model(x).sum()
            (grad,) = torch.autograd.grad(value, x, create_graph=True)
            (value + grad.pow(2).sum()).backward()
        return state_of(model, x=x.grad)

    assert_same_bits(step)


@pytest.mark.parametrize("norm", [nn.BatchNorm2d, partial(nn.GroupNorm, 2)], ids=["batch norm", "group norm"])
def test_third_derivative_of_a_convolution(norm: Callable[[int], nn.Module]) -> None:
    """Derivatives of derivatives, with a norm in the middle."""
    if norm is nn.BatchNorm2d and tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 14):
        pytest.skip("torch has no third derivative of batch norm any more")

    def step(scope: Scope) -> dict[str, Any]:
        model = nn.Sequential(nn.Conv2d(2, 4, 3), norm(4), nn.Softplus(), nn.Conv2d(4, 1, 3))
        x = torch.randn(2, 2, 6, 6, requires_grad=True)
        with scope():
            (first,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
            (second,) = torch.autograd.grad(first.pow(2).sum(), x, create_graph=True)
            second.pow(2).sum().backward()
        return state_of(model, x=x.grad)

    assert_same_bits(step)


def test_hooks_on_tensors_and_modules() -> None:
    """Hooks that change gradients, keep activations, and draw random numbers in backward."""

    def step(scope: Scope) -> dict[str, Any]:
        model, x, seen = network(), torch.randn(4, 8), []
        model[1].register_forward_hook(lambda _module, _args, output: output * 1.5)
        model[3].register_full_backward_hook(lambda _module, grads, _outputs: (grads[0] * torch.rand(1),))
        with scope():
            hidden = model[:3](x)
            hidden.register_hook(lambda grad: grad.clamp(-0.1, 0.1))
            hidden.retain_grad()
            model[3:](hidden).sum().backward()
            seen.append(hidden.grad)
        return state_of(model, seen=seen)

    assert_same_bits(step)


def test_gradients_of_chosen_inputs_only() -> None:
    """autograd.grad for one input, unused ones allowed, and a frozen half of the net."""

    def step(scope: Scope) -> dict[str, Any]:
        model, x, unused = network(), torch.randn(4, 8, requires_grad=True), torch.randn(1, requires_grad=True)
        model[0].requires_grad_(requires_grad=False)
        with scope():
            grads = torch.autograd.grad(model(x.sin()).sum(), [x, unused, model[3].weight], allow_unused=True)
        return {"grads": grads}

    assert_same_bits(step)


def test_functional_transforms() -> None:
    """torch.func.grad, vjp, jacrev, vmap and jvp inside the scope, their results feeding an ordinary backward."""

    def step(scope: Scope) -> dict[str, Any]:
        w, x = torch.randn(8, 8, requires_grad=True), torch.randn(5, 8)

        def value(row: torch.Tensor) -> torch.Tensor:
            return (row @ w).sin().sum()

        with scope():
            hidden = x * 1.5
            batched = torch.vmap(lambda row: (row @ w).sin())(hidden)
            per_sample = torch.vmap(torch.func.grad(value))(hidden)
            _, pullback = torch.func.vjp(value, hidden[0])
            jacobian = torch.func.jacrev(lambda row: (row @ w).cos())(hidden[1])
            _, tangent = torch.func.jvp(value, (hidden[2],), (torch.ones(8),))
            loss = batched.exp().sum() + per_sample.pow(2).sum() + pullback(torch.tensor(2.0))[0].sum()
            (loss + jacobian.sum() + tangent * (w * 2).tanh().sum()).backward()
        return {"loss": loss, "grad": w.grad}

    assert_same_bits(step)


def test_functional_call_with_other_parameters() -> None:
    """A module run on parameters that are results of ops, as meta-learning does."""

    def step(scope: Scope) -> dict[str, Any]:
        model, x = network(), torch.randn(4, 8)
        with scope():
            inner = dict(model.named_parameters())
            for _ in range(2):
                loss = torch.func.functional_call(model, inner, (x,)).pow(2).mean()
                grads = torch.autograd.grad(loss, list(inner.values()), create_graph=True)
                inner = {name: p - 0.1 * g for (name, p), g in zip(inner.items(), grads, strict=True)}
            torch.func.functional_call(model, inner, (x,)).pow(2).mean().backward()
        return state_of(model)

    assert_same_bits(step)


def test_forward_mode_derivative() -> None:
    """Dual numbers in the scope, beside an ordinary backward."""

    def step(scope: Scope) -> dict[str, Any]:
        model, x = network().eval(), torch.randn(4, 8)
        with scope():
            with torch.autograd.forward_ad.dual_level():
                dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
                tangent = torch.autograd.forward_ad.unpack_dual(model(dual)).tangent
            tangent.pow(2).sum().backward()
        return state_of(model, tangent=tangent)

    assert_same_bits(step)


def _by_grad(outputs: torch.Tensor, leaf: torch.Tensor) -> None:
    (leaf.grad,) = torch.autograd.grad(outputs, leaf)


def _by_the_engine(outputs: torch.Tensor, leaf: torch.Tensor, *, names: bool) -> None:
    """Call it as some programs do (Megatron-LM in its `custom_backward`)."""
    del leaf
    run: Any = cast("Any", torch.autograd.Variable)._execution_engine.run_backward  # noqa: SLF001 - what they call
    start = (outputs,), (torch.ones(()),)
    if names:
        run(
            tensors=start[0],
            grad_tensors=start[1],
            keep_graph=False,
            create_graph=False,
            inputs=(),
            allow_unreachable=True,
            accumulate_grad=True,
        )
    else:
        run(*start, False, False, (), True, True)


STARTS: dict[str, Callable[[torch.Tensor, torch.Tensor], None]] = {
    "method": lambda loss, _leaf: loss.backward(),
    "function": lambda loss, _leaf: torch.autograd.backward(loss),
    "grad": _by_grad,
    "engine": partial(_by_the_engine, names=False),
    "engine, by name": partial(_by_the_engine, names=True),
}


@pytest.mark.parametrize("is_in_hook", [False, True], ids=["alone", "in-a-hook"])
@pytest.mark.parametrize("start", STARTS)
def test_ways_to_start_a_backward(start: str, *, is_in_hook: bool) -> None:
    """Each one runs the formulas that no mode changes, and adds gradients up in place."""

    def step(scope: Scope) -> dict[str, Any]:
        x, y = torch.rand(64, 64, requires_grad=True), torch.rand(64, 64, requires_grad=True)
        with scope():
            loss = (x * 2).prod(0).sum() + (x.sin().exp() * x).sum()
            if is_in_hook:
                product = y.sin() * y
                product.register_hook(lambda _: STARTS[start](loss, x))
                product.sum().backward()
            else:
                STARTS[start](loss, x)
        return {"x": x.grad, "y": y.grad}

    assert_same_bits(step)


def test_users_own_saved_tensor_hooks() -> None:
    """Hooks that the user pushes inside the scope win for their region."""

    def step(scope: Scope) -> dict[str, Any]:
        model, x = network(), torch.randn(4, 8)
        with scope():
            hidden = model[:3](x)
            with torch.autograd.graph.save_on_cpu():
                hidden = model[3:5](hidden * 2)
            with torch.autograd.graph.saved_tensors_hooks(lambda t: t.double(), lambda t: t.float()):
                model[5:](hidden.sin()).sum().backward()
        return state_of(model)

    assert_same_bits(step)


def test_saved_tensor_changed_in_place() -> None:
    """Changing what autograd saved is the user's error; an evicted tensor must not hide it."""

    def step(scope: Scope) -> dict[str, Any]:
        x = torch.randn(8, 8, requires_grad=True)
        with scope():
            hidden = x * 2
            result = hidden.sin()
            hidden.add_(1)
            result.sum().backward()
        return {"grad": x.grad}

    assert_same_error(step, RuntimeError)


def test_parameter_changed_in_place() -> None:
    """Changing a parameter between forward and backward is an error where it was saved."""

    def step(scope: Scope) -> dict[str, Any]:
        model, x = network(), torch.randn(4, 8)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with scope():
            loss = F.mse_loss(model(x), torch.zeros(4, 1))
            loss.backward(retain_graph=True)
            optimizer.step()
            loss.backward()
        return state_of(model)

    assert_same_error(step, RuntimeError)


@pytest.mark.filterwarnings("ignore")  # anomaly mode announces itself, and the place of the failure
def test_anomaly_mode() -> None:
    """Anomaly detection reports the same failure."""

    def step(scope: Scope) -> dict[str, Any]:
        x = torch.zeros(4, requires_grad=True)
        with scope(), torch.autograd.detect_anomaly(check_nan=True):
            (x * 2).sqrt().mul(0).sum().backward()
        return {"grad": x.grad}

    assert_same_error(step, RuntimeError)
