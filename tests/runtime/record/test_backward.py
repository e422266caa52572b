"""Backward inside a budget runs the very ops of plain backward, in the same places."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from tests.runtime.programs import Allocations, Attention, Residual, mlp, op_names, running
from torchdelta._torch.modes import mode_stack, num_modes
from torchdelta.native.build import is_switched_off

if TYPE_CHECKING:
    from collections.abc import Callable

PROGRAMS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "perceptron": (lambda: mlp(64, 3), (32, 64)),
    "attention": (lambda: nn.Sequential(Attention(), Attention()), (4, 16, 32)),
    "residual": (lambda: nn.Sequential(Residual(), Residual()), (4, 8, 12, 12)),
}


# What makes tensors and looks at them differs under a mode, and computes nothing.
HELPERS = {"aten::detach", "aten::empty", "aten::set_", "aten::view", "aten::_reshape_alias"}


class _Fails(torch.autograd.Function):
    """Raises in its backward."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
        del ctx
        return value * 1

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        del ctx, grads
        raise KeyError


class TwiceUsed(nn.Module):
    """One weight and one activation, each used several times: gradients add up between nodes."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64, 64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Fan out, and in."""
        hidden = x @ self.weight
        return (hidden.sin() + hidden.cos() + hidden.tanh()) @ self.weight


@pytest.mark.parametrize("name", [*PROGRAMS, "twice-used"])
def test_backward_runs_the_ops_of_plain(name: str) -> None:
    """No op more and none less, below all modes: gradients are accumulated in place, between nodes and into `.grad`.

    Without native parts the runtime watches storage objects, and then the engine takes a new storage for a sum between
    nodes.
    """
    make, shape = PROGRAMS.get(name, (TwiceUsed, (32, 64)))
    model, x = make(), torch.randn(shape)
    model(x).sum().backward()  # the first backward makes the gradients, the measured ones accumulate into them

    def backward_names() -> list[str]:
        loss = model(x).sum()
        return [name for name in op_names(loss.backward) if name not in HELPERS]

    plain = backward_names()
    with running():
        backward_names()  # ops that are met for the first time are tried on meta tensors
        ours = backward_names()
    assert "aten::add_" in plain
    if is_switched_off() and name == "twice-used":
        assert ours != plain
        ours, plain = ([name.replace("add_", "add") for name in names] for names in (ours, plain))
    assert ours == plain


@pytest.mark.parametrize("name", [*PROGRAMS, "twice-used"])
def test_backward_peaks_like_plain(name: str) -> None:
    """The allocator's peak of a step is that of plain: recording keeps no tensor alive."""
    make, shape = PROGRAMS.get(name, (TwiceUsed, (32, 64)))
    model, x = make(), torch.randn(shape)
    model(x).sum().backward()

    def peak_bytes() -> int:
        gc.collect()
        allocations = Allocations()
        with allocations.watch():
            model(x).sum().backward()
        return allocations.peak_bytes

    peak_bytes()
    plain_bytes = peak_bytes()
    with running():
        assert peak_bytes() <= plain_bytes + 256


def test_modes_are_on_inside_nodes_only() -> None:
    """Between nodes no mode is on; inside one the recorder is; after backward it is back below what the user pushed."""
    x = torch.randn(8, 8, requires_grad=True)
    seen: dict[str, int] = {}

    class Spy(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
            del ctx
            seen["forward"] = num_modes()
            return value * 1

        @staticmethod
        def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
            del ctx
            seen["backward"] = num_modes()
            return grads[0] * 1

    with running():
        y = Spy.apply(x * 2)
        y.register_hook(lambda _: seen.__setitem__("hook", num_modes()))
        y.sin().sum().backward()
        seen["after"] = num_modes()
    assert seen == {"forward": 1, "hook": 0, "backward": 1, "after": 1}


@pytest.mark.parametrize("where", ["node", "tensor hook", "node hook"])
def test_exception_in_backward_leaves_the_modes_right(where: str) -> None:
    """The recorder is on after it, exactly once, and the next step works."""

    def fail(*_: Any) -> None:
        raise KeyError

    x = torch.randn(64, 64, requires_grad=True)
    with running(decisions="recompute") as (_, session):
        y = (x * 2).sin()
        if where == "node":
            y = _Fails.apply(y)
        elif where == "tensor hook":
            y.register_hook(fail)
        else:
            assert y.grad_fn is not None
            y.grad_fn.register_hook(fail)
        for _ in range(2):
            with pytest.raises(KeyError):
                y.sum().backward(retain_graph=True)
            assert mode_stack() == [session.recorder]
        x.grad = None
        (x * 2).sin().sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, (x * 2).cos() * 2)


def test_modes_of_others_keep_their_place() -> None:
    """A user's mode around the loop, and one inside it, see what they saw."""

    class Counts(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.num_ops = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            del types
            self.num_ops += 1
            return func(*args, **(kwargs or {}))

    x = torch.randn(8, 8, requires_grad=True)
    with Counts() as outer, running() as (_, session), Counts() as inner:
        y = (x * 2).sin().sum()
        after_forward = inner.num_ops
        y.backward()
        assert mode_stack() == [session.recorder, outer, inner]
    assert after_forward > 0
    assert inner.num_ops > after_forward
    assert outer.num_ops == inner.num_ops


def test_backward_inside_a_node() -> None:
    """Reentrant backward, as of a reentrant checkpoint, nests and unnests."""

    class Inner(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(value)
            return value.detach().sin()

        @staticmethod
        def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
            (value,) = ctx.saved_tensors
            with torch.enable_grad():
                again = value.detach().requires_grad_()
                again.sin().backward(grads[0])
            assert again.grad is not None
            return again.grad

    x = torch.randn(64, 64, requires_grad=True)
    (Inner.apply(x * 2) * 3).sum().backward()
    plain, x.grad = x.grad, None
    with running(decisions="recompute") as (_, session):
        (Inner.apply(x * 2) * 3).sum().backward()
        assert mode_stack() == [session.recorder]
    assert plain is not None
    assert x.grad is not None
    assert torch.equal(x.grad, plain)


def test_inputs_of_reentrant_checkpoints_are_let_go() -> None:
    """Each block's detached input and its gradient die with the block's own backward: the peak is plain's."""
    model, x = nn.Sequential(*(mlp(64, 1) for _ in range(12))), torch.randn(512, 64, requires_grad=True)

    def step() -> None:
        value = x
        for block in model:
            value = checkpoint(block, value, use_reentrant=True)
        value.sum().backward()

    plain, ours = Allocations(), Allocations()
    with plain.watch():
        step()
    model.zero_grad()
    x.grad = None
    with running(), ours.watch():
        step()
    assert ours.peak_bytes <= plain.peak_bytes * 1.02


def test_optimizer_in_backward_is_seen() -> None:
    """Hooks that step after each gradient free it: the ledger follows."""
    model, x = mlp(64, 2), torch.randn(64, 64)

    def apply(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        parameter.data.sub_(parameter.grad, alpha=0.1)
        parameter.grad = None

    handles = [parameter.register_post_accumulate_grad_hook(apply) for parameter in model.parameters()]
    with running() as (_, session):
        before_bytes = session.ledger.usage.live_bytes
        loss = model(x).sum()
        loss.backward()
        del loss
        assert session.ledger.usage.live_bytes == before_bytes
    for handle in handles:
        handle.remove()


def test_gradients_of_chosen_inputs() -> None:
    """`autograd.grad` returns gradients that are counted, and accumulates nowhere."""
    x, w = torch.randn(64, 64, requires_grad=True), torch.randn(64, 64, requires_grad=True)
    with running() as (_, session):
        before_bytes = session.ledger.usage.live_bytes
        (gradient,) = torch.autograd.grad((x @ w).sin().sum(), x)
        assert session.ledger.usage.live_bytes == before_bytes + gradient.nbytes
        del gradient
        assert session.ledger.usage.live_bytes == before_bytes
    assert x.grad is None
    assert w.grad is None


def test_exception_in_backward_inside_a_mode_of_the_program() -> None:
    """A node raises: the recorder is off the program's mode again, and on once after it."""

    class Passes(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            del types
            return func(*args, **(kwargs or {}))

    x = torch.randn(64, 64, requires_grad=True)
    with running() as (_, session):
        with pytest.raises(KeyError), Passes():
            _Fails.apply(x * 2).sum().backward()
        assert mode_stack() == [session.recorder]
    assert mode_stack() == []
