"""What a graph can be: deep, differentiated twice, checkpointed, watched for anomalies, cut by modes and by errors."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - its name everywhere
from torch import nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from tests.same_bits.judge import Scope, state_of
from tests.torch_suite.budgets import assert_same, assert_same_failure


def leaf(*shape: int) -> torch.Tensor:
    """Draw a leaf that wants a gradient."""
    return torch.randn(*(shape or (64, 64)), requires_grad=True)


def network() -> nn.Sequential:
    """Make a small net with dropout."""
    return nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Dropout(0.3), nn.Linear(64, 64), nn.GELU())


@pytest.mark.rest
@pytest.mark.parametrize("names", [("ample",), ("recompute",), ("swap",)], ids=lambda names: names[0])
def test_ten_thousand_ops_in_a_row(names: tuple[str, ...]) -> None:
    """A chain of ten thousand ops needs no recursion, forward, backward, or when it dies."""

    def step(scope: Scope) -> dict[str, Any]:
        x = leaf(8)
        with scope():
            hidden = x * 1
            for _ in range(5_000):
                hidden = (hidden * 1.0001).sin()
            hidden.sum().backward()
            abandoned = x * 1
            for _ in range(1_000):
                abandoned = abandoned.cos()
        return {"grad": x.grad}

    assert_same(step, *names)


@pytest.mark.rest
def test_a_deep_chain_that_is_in_place() -> None:
    """A thousand ops in place on one storage, saved by a few of them, replay in their order."""

    def step(scope: Scope) -> dict[str, Any]:
        x = leaf(64)
        with scope():
            hidden = x * 1
            for index in range(1_000):
                hidden.mul_(1.001)
                if index % 250 == 0:
                    hidden = hidden.sin()
            hidden.exp().sum().backward()
        return {"grad": x.grad}

    assert_same(step)


def test_one_tensor_that_many_nodes_save() -> None:
    """Hundreds of nodes save the same tensor, and gradients of all of them meet in one leaf."""

    def step(scope: Scope) -> dict[str, Any]:
        x = leaf()
        with scope():
            hidden = (x * 2).sin()
            total = sum((hidden * hidden * factor).sum() for factor in range(200))
            total.backward()
        return {"grad": x.grad}

    assert_same(step)


def test_graphs_of_graphs() -> None:
    """create_graph through convolutions and normalisations, and a backward of the gradient's norm, twice."""

    def step(scope: Scope) -> dict[str, Any]:
        model = nn.Sequential(nn.Conv2d(2, 8, 3), nn.GroupNorm(2, 8), nn.SiLU(), nn.Conv2d(8, 2, 3))
        x = leaf(4, 2, 16, 16)
        with scope():
            for _ in range(2):
                loss = model(x * 2).pow(2).mean()
                gradients = torch.autograd.grad(loss, [x, *model.parameters()], create_graph=True)
                penalty = sum(gradient.pow(2).sum() for gradient in gradients)
                (loss + penalty).backward()
        return state_of(model, x=x.grad)

    assert_same(step)


@pytest.mark.filterwarnings("ignore:Using backward")
def test_backward_with_create_graph() -> None:
    """backward(create_graph=True) leaves gradients that are part of a graph, and these are differentiated."""

    def step(scope: Scope) -> dict[str, Any]:
        x = leaf()
        with scope():
            (x * 2).sin().exp().sum().backward(create_graph=True)
            first = x.grad
            x.grad = None
            first.pow(2).sum().backward()
        gradient = x.grad.detach()
        x.grad = None
        return {"first": first.detach(), "second": gradient}

    assert_same(step)


@pytest.mark.filterwarnings("ignore:None of the inputs")  # the innermost of the reentrant ones
@pytest.mark.parametrize("use_reentrant", [False, True], ids=["non-reentrant", "reentrant"])
def test_checkpoints_in_checkpoints(*, use_reentrant: bool) -> None:
    """Checkpoints three deep, with randomness, beside blocks that are not checkpointed."""

    def step(scope: Scope) -> dict[str, Any]:
        model, other, x = network(), network(), leaf()

        def nested(x: torch.Tensor, depth: int = 2) -> torch.Tensor:
            hidden = model(x)
            return checkpoint(nested, hidden, depth - 1, use_reentrant=use_reentrant) if depth else hidden

        with scope():
            for _ in range(2):
                hidden = checkpoint(nested, other(x * 2), use_reentrant=use_reentrant)
                hidden = checkpoint_sequential(other, 2, hidden, use_reentrant=use_reentrant)
                F.dropout(hidden).pow(2).sum().backward()
        return state_of(model, other, x=x.grad)

    assert_same(step)


def test_an_error_inside_a_checkpoint() -> None:
    """An exception from a checkpointed function in its second run, and the next step without it."""

    def step(scope: Scope) -> dict[str, Any]:
        model, x, runs = network(), leaf(), []

        def fails_in_backward(hidden: torch.Tensor) -> torch.Tensor:
            runs.append(len(runs))
            if len(runs) == 2:
                raise ValueError("second run")
            return model(hidden)

        with scope():
            with contextlib.suppress(ValueError):
                checkpoint(fails_in_backward, (x * 2).sin(), use_reentrant=False).sum().backward()
            checkpoint(fails_in_backward, (x * 2).sin(), use_reentrant=False).sum().backward()
        return state_of(model, x=x.grad, runs=runs)

    assert_same(step)


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_anomaly_mode_around_a_whole_step() -> None:
    """A step without anomalies under the detector, forward and backward, second derivative included."""

    def step(scope: Scope) -> dict[str, Any]:
        model, x = network(), leaf()
        with scope(), torch.autograd.set_detect_anomaly(mode=True):
            (first,) = torch.autograd.grad(model(x).pow(2).sum(), x, create_graph=True)
            first.pow(2).sum().backward()
        return state_of(model, x=x.grad)

    assert_same(step, "ample", "recompute", "swap")


@pytest.mark.filterwarnings("ignore")  # the detector announces itself, and the place of the failure
def test_anomalies_in_a_second_derivative() -> None:
    """The detector finds a not-a-number that the second derivative makes."""

    def step(scope: Scope) -> dict[str, Any]:
        x = torch.zeros(64, 64, requires_grad=True)
        with scope(), torch.autograd.detect_anomaly():
            (first,) = torch.autograd.grad(x.pow(1.5).sum(), x, create_graph=True)
            (first * 0 / x).sum().backward()
        return {}

    assert_same_failure(step, RuntimeError)


def test_inference_mode_between_training_steps() -> None:
    """Evaluation in inference mode and without gradients, whose results are used in training as copies."""

    def step(scope: Scope) -> dict[str, Any]:
        model, x = network(), leaf()
        with scope():
            for _ in range(2):
                with torch.inference_mode():
                    target = model(x)
                with torch.no_grad():
                    other = model(x)
                hidden = model(x * 2)
                with torch.inference_mode():
                    looked_at = hidden.sin().sum()
                (hidden - target.clone()).pow(2).sum().add((hidden * other).sum()).backward()
        return state_of(model, x=x.grad, looked_at=looked_at.clone())

    assert_same(step)


def test_saving_an_inference_tensor_stays_an_error() -> None:
    """An inference tensor cannot be saved for backward, in a budget as without one."""

    def step(scope: Scope) -> dict[str, Any]:
        x = leaf()
        with scope():
            with torch.inference_mode():
                constant = torch.ones(64, 64)
            (x * 2 * constant).sum().backward()
        return {}

    assert_same_failure(step, RuntimeError)


def test_requires_grad_switched_on_and_off() -> None:
    """Layers frozen and thawed between steps and inside one, and leaves that become such by detach_."""

    def step(scope: Scope) -> dict[str, Any]:
        model, x = network(), leaf()
        with scope():
            for frozen in (True, False, True):
                model[0].requires_grad_(not frozen)
                x.requires_grad_(frozen)
                hidden = model(x.sin())
                model[3].requires_grad_(requires_grad=frozen)
                cut = (hidden * 2).detach_().requires_grad_()
                (cut.exp().sum() + hidden.pow(2).sum()).backward()
        return state_of(model, x=x.grad, cut=cut.grad)

    assert_same(step)


def test_graph_freed_in_parts() -> None:
    """Half of a graph is freed by one backward; using it again is torch's error, the other half still works."""

    def step(scope: Scope) -> dict[str, Any]:
        x, messages = leaf(), []
        with scope():
            hidden = (x * 2).sin()
            left, right = hidden.exp(), hidden.cos()
            left.sum().backward(retain_graph=True)
            right.sum().backward()
            try:
                left.sum().backward()
            except RuntimeError as error:
                messages.append(str(error)[:60])
            (x * 2).sin().exp().sum().backward()
        return {"grad": x.grad, "messages": messages}

    assert_same(step)


def test_backward_from_inner_outputs_and_into_inner_inputs() -> None:
    """Backward with `inputs`, gradients of inner tensors, several roots, and graph edges in place of tensors."""

    def step(scope: Scope) -> dict[str, Any]:
        x = leaf()
        with scope():
            hidden = (x * 2).sin()
            out, other = hidden.exp(), hidden.tanh()
            inner = torch.autograd.grad([out.sum(), other.sum()], [hidden, x], retain_graph=True)
            edge = torch.autograd.graph.get_gradient_edge(hidden)
            (through,) = torch.autograd.grad(out.sum(), edge, retain_graph=True)
            torch.autograd.backward([out, other], [torch.ones(64, 64)] * 2, inputs=[x])
        return {"x": x.grad, "inner": inner, "through": through}

    assert_same(step)


def test_batched_gradients() -> None:
    """is_grads_batched runs one backward for a batch of gradients."""

    def step(scope: Scope) -> dict[str, Any]:
        x = leaf(16)
        with scope():
            out = (x * 2).sin() * x.sum()
            (jacobian,) = torch.autograd.grad(out, x, torch.eye(16), is_grads_batched=True, retain_graph=True)
            out.pow(2).sum().backward()
        return {"jacobian": jacobian, "grad": x.grad}

    assert_same(step)
