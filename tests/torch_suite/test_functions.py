"""torch.autograd.Function with everything that its context offers, and torch's own examples of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.autograd.function import once_differentiable

from tests.same_bits.judge import Scope, seed_everything
from tests.torch_suite.budgets import assert_same, assert_same_failure


def leaf(*shape: int) -> torch.Tensor:
    """Draw a leaf that wants a gradient."""
    return torch.randn(*(shape or (64, 64)), requires_grad=True)


class SortedValues(torch.autograd.Function):
    """A sort whose second output is marked as not differentiable, with its steps split by setup_context."""

    @staticmethod
    def forward(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Sort the last dimension."""
        values, order = x.sort()
        return values, order

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Save the order."""
        del inputs
        ctx.mark_non_differentiable(output[1])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(output[1])

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        """Put the gradients back where the values came from."""
        (order,) = ctx.saved_tensors
        return torch.zeros_like(grads[0]).scatter(-1, order, grads[0])


class OnlyWhatIsNeeded(torch.autograd.Function):
    """A product that asks which inputs need a gradient, and saves only what those need."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Multiply."""
        ctx.save_for_backward(y if ctx.needs_input_grad[0] else None, x if ctx.needs_input_grad[1] else None)
        return x * y

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Differentiate by the inputs that need it."""
        y, x = ctx.saved_tensors
        return (grads[0] * y if y is not None else None), (grads[0] * x if x is not None else None)


class Once(torch.autograd.Function):
    """A sine whose derivative cannot be differentiated again."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        """Save the input and keep another tensor as an attribute."""
        ctx.save_for_backward(x)
        ctx.factor = x.cos()
        return x.sin()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        """Use both."""
        (x,) = ctx.saved_tensors
        return grads[0] * ctx.factor + 0 * x


class Dirty(torch.autograd.Function):
    """A function that writes one input in place and saves its new content."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Exponentiate in place."""
        ctx.mark_dirty(x)
        x.add_(y).exp_()
        ctx.save_for_backward(x)
        return x

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Multiply by what was written."""
        (out,) = ctx.saved_tensors
        return grads[0] * out, grads[0] * out


class Cube(torch.autograd.Function):
    """A cube with a rule for vmap made by torch, a forward derivative, and a backward that can be differentiated."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the cube and its derivative, which backward reuses."""
        return x**3, 3 * x**2

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Save for both directions."""
        ctx.save_for_backward(inputs[0], output[1])
        ctx.save_for_forward(inputs[0], output[1])

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        """Differentiate both outputs."""
        x, derivative = ctx.saved_tensors
        return grads[0] * derivative + grads[1] * 6 * x

    @staticmethod
    def jvp(ctx: Any, *tangents: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Push a tangent forward."""
        x, derivative = ctx.saved_tensors
        return tangents[0] * derivative, tangents[0] * 6 * x


def test_outputs_marked_as_not_differentiable() -> None:
    """An integer output, gradients that are not materialised, and an unused differentiable output."""

    def step(scope: Scope) -> dict[str, Any]:
        x = leaf()
        with scope():
            values, order = SortedValues.apply((x * 2).sin())
            unused, _ = SortedValues.apply(x * 3)
            (values.exp() * order).sum().backward()
        return {"grad": x.grad, "order": order, "unused": unused.detach()}

    assert_same(step)


@pytest.mark.parametrize("needs", [(True, False), (False, True), (True, True)], ids=["first", "second", "both"])
def test_functions_that_save_what_is_needed(needs: tuple[bool, bool]) -> None:
    """A saved None stays None, whichever input needs its gradient."""

    def step(scope: Scope) -> dict[str, Any]:
        x, y = leaf().requires_grad_(needs[0]), leaf().requires_grad_(needs[1])
        with scope():
            OnlyWhatIsNeeded.apply(x * 2, (y * 2).sin()).tanh().sum().backward()
        return {"x": x.grad, "y": y.grad}

    assert_same(step)


def test_a_function_that_is_differentiable_once() -> None:
    """Its backward runs, also beside a node that holds a tensor as an attribute of its context."""

    def step(scope: Scope) -> dict[str, Any]:
        x = leaf()
        with scope():
            Once.apply(Once.apply(x * 2).exp()).sum().backward()
        return {"grad": x.grad}

    assert_same(step)


def test_differentiating_it_twice_stays_the_same_error() -> None:
    """A second derivative of a function that is differentiable once is torch's own error."""

    def step(scope: Scope) -> dict[str, Any]:
        x = leaf()
        with scope():
            (first,) = torch.autograd.grad(Once.apply(x * 2).sum(), x, create_graph=True)
            first.sum().backward()
        return {}

    assert_same_failure(step, RuntimeError)


def test_functions_that_write_their_inputs() -> None:
    """What is saved is the written content, also where a view of it is used and it is written again."""

    def step(scope: Scope) -> dict[str, Any]:
        x, y = leaf(), leaf(64)
        with scope():
            hidden = (x * 0.1).sin()
            written = Dirty.apply(hidden, y)
            loss = written[::2].cos().sum() + hidden.sum()
            loss.backward(retain_graph=True)
            loss.backward()
        return {"x": x.grad, "y": y.grad}

    assert_same(step)


def test_writing_what_a_function_saved_stays_an_error() -> None:
    """A function's saved tensors are checked for later writes as those of torch's own nodes are."""

    def step(scope: Scope) -> dict[str, Any]:
        x = leaf()
        with scope():
            hidden = (x * 2).sin()
            out = OnlyWhatIsNeeded.apply(hidden, x)
            hidden.add_(1)
            out.sum().backward()
        return {}

    assert_same_failure(step, RuntimeError)


def test_functions_under_every_transform() -> None:
    """A function with a rule for vmap and a forward derivative, under each of the two, and differentiated twice."""

    def step(scope: Scope) -> dict[str, Any]:
        x = leaf()
        with scope():
            cube = Cube.apply((x * 2).sin())[0]
            (first,) = torch.autograd.grad(cube.sum(), x, create_graph=True)
            mapped = torch.vmap(lambda row: Cube.apply(row)[0])(x.cos())
            nested = torch.func.grad(lambda row: Cube.apply(row)[0].sum())(x.tan().clamp(-1, 1))
            _, tangent = torch.func.jvp(lambda row: Cube.apply(row)[0], (x * 1.5,), (torch.ones_like(x),))
            (first.pow(2).sum() + mapped.sum() + nested.sum() + tangent.sum()).backward()
        return {"grad": x.grad}

    assert_same(step)


def test_exceptions_in_backward() -> None:
    """A function whose backward raises ends the backward, and the next step is plain torch's."""

    class Fail(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x)
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *_grads: torch.Tensor) -> torch.Tensor:
            raise ValueError(tuple(ctx.saved_tensors[0].shape))

    def step(scope: Scope) -> dict[str, Any]:
        x, messages = leaf(), []
        with scope():
            for _ in range(2):
                try:
                    Fail.apply((x * 2).sin()).exp().sum().backward()
                except ValueError as error:
                    messages.append(str(error))
                (x * 2).sin().exp().sum().backward()
        return {"grad": x.grad, "messages": messages}

    assert_same(step)


def database_functions() -> list[Any]:
    """List torch's own examples of functions."""
    from torch.testing._internal.autograd_function_db import autograd_function_db

    return autograd_function_db


@pytest.mark.rest
def test_torch_s_own_functions() -> None:
    """Each example of torch's database of functions, twice differentiated where it can be."""
    found: dict[str, Any] = {}
    for info in database_functions():
        seed_everything()
        for index, sample in enumerate(info.sample_inputs("cpu", torch.float32, requires_grad=True)):
            for kind, verdict in _judge_function(info, sample).items():
                found[f"{info.name}[{index}] {kind}"] = verdict
    assert found == {}


def _judge_function(info: Any, sample: Any) -> dict[str, Any]:
    from tests.same_bits.op_database import operator_step
    from tests.torch_suite.budgets import verdicts

    step = operator_step(info.op, (sample.input, sample.args, sample.kwargs))
    return verdicts(step, "ample", "recompute", "swap")
