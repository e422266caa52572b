"""Backward on the autograd engine's threads for devices: hooks, modes, errors, and two threads at once."""

from __future__ import annotations

import contextlib
import threading
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.same_bits.judge import DECISIONS, DEVICE, Scope, assert_same_bits, state_of
from torchdelta import BudgetError, Config, MemoryBudget
from torchdelta._torch.modes import num_modes
from torchdelta.runtime.current import current_session

pytestmark = pytest.mark.accelerator


class Witness(torch.autograd.Function):
    """Notes on which thread its backward runs, and whose session that thread finds."""

    seen: list[tuple[int, Any]]

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        Witness.seen.append((threading.get_ident(), current_session()))
        (x,) = ctx.saved_tensors
        return gradients[0] * 2 + x * 0


def network(width: int = 64) -> nn.Sequential:
    """Make a small net whose buffers are large enough to leave."""
    return nn.Sequential(
        nn.Linear(width, 4 * width), nn.GELU(), nn.Dropout(0.2), nn.Linear(4 * width, width), nn.LayerNorm(width)
    )


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("decisions", ["recompute", "swap"])
def test_the_session_is_found_on_the_engines_thread(decisions: str) -> None:
    """A node of a device runs on another thread than `backward()` was called on, and belongs to the same session."""
    Witness.seen = []
    x = torch.randn(16, 64, requires_grad=True)
    with MemoryBudget("1TiB", Config(decisions=decisions, tier="memory")):
        Witness.apply(network()(x)).sum().backward()
        session = current_session()
    ((thread, found),) = Witness.seen
    assert thread != threading.get_ident()
    assert found is session


@pytest.mark.usefixtures("device")
def test_backward_inside_of_backward() -> None:
    """A custom Function that runs forward and backward in its own backward, and both kinds of checkpoint."""

    class Nested(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x)
            return x.tanh() ** 2

        @staticmethod
        def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
            (x,) = ctx.saved_tensors
            with torch.enable_grad():
                inner = x.detach().requires_grad_()
                (inner.tanh() ** 2).backward(gradients[0])
            assert inner.grad is not None
            return inner.grad

    def step(scope: Scope) -> dict[str, Any]:
        model = network()
        x = torch.randn(8, 64, requires_grad=True)
        with scope():
            hidden = checkpoint(model, Nested.apply(x), use_reentrant=True)
            hidden = checkpoint(model, hidden, use_reentrant=False)
            hidden.pow(2).mean().backward()
        return state_of(model, x=x.grad)

    assert_same_bits(step)


def test_nodes_on_the_host_and_on_the_device(device: torch.device) -> None:
    """A graph that goes to and fro runs on two threads at once."""

    def step(scope: Scope) -> dict[str, Any]:
        on_host, on_device = network().cpu(), network()
        gain = torch.ones((), device="cpu", requires_grad=True)
        with scope():
            for _ in range(3):
                hosts = [on_host(torch.randn(8, 64, device="cpu")) * gain for _ in range(3)]
                devices = [on_device(torch.randn(8, 64)) for _ in range(3)]
                mixed = [d.sin() + h.to(device) for d, h in zip(devices, hosts, strict=True)]
                back = [m.cpu().tanh() @ h.t() for m, h in zip(mixed, hosts, strict=True)]
                (torch.stack([b.sum() for b in back]).sum() + torch.stack(mixed).mean().cpu()).backward()
        return state_of(on_host, on_device, gain=gain.grad)

    assert_same_bits(step)


@pytest.mark.usefixtures("device")
def test_optimizer_in_backward_on_the_engines_thread() -> None:
    """Parameters are updated by hooks of AccumulateGrad while other nodes are still to run."""

    def step(scope: Scope) -> dict[str, Any]:
        model = network()
        optimizers = {parameter: torch.optim.SGD([parameter], lr=0.1) for parameter in model.parameters()}

        def update(parameter: torch.Tensor) -> None:
            optimizers[parameter].step()
            optimizers[parameter].zero_grad()

        hooks = [parameter.register_post_accumulate_grad_hook(update) for parameter in model.parameters()]
        with scope():
            for _ in range(3):
                model(torch.randn(8, 64)).pow(2).mean().backward()
        for hook in hooks:
            hook.remove()
        return state_of(model)

    assert_same_bits(step)


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("decisions", DECISIONS)
def test_an_error_in_a_node_leaves_nothing_on_any_thread(decisions: str) -> None:
    """The exception reaches the caller, no mode stays on the engine's thread, and the next step is right."""

    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x)
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
            raise KeyError(len(gradients), ctx.saved_tensors[0].shape)

    heights: list[int] = []

    def step(scope: Scope) -> dict[str, Any]:
        model = network()
        with scope():
            for fails in (True, False, True, False):
                hidden = model(torch.randn(8, 64))
                hidden.register_hook(lambda _gradient: heights.append(num_modes()))
                with contextlib.suppress(KeyError):
                    (Fails.apply(hidden) if fails else hidden).pow(2).mean().backward()
                hidden = None
        return state_of(model)

    assert_same_bits(step, decisions)
    # The hook runs between nodes. Factories made to use the device are a function mode, and no dispatch mode.
    assert set(heights) == {0}


@pytest.mark.usefixtures("device")
def test_a_budget_error_in_backward_reaches_the_caller() -> None:
    """What cannot be held is found on the engine's thread, told on the caller's, and training goes on after it."""

    class Grows(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:  # noqa: ARG004
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:  # noqa: ARG004
            return gradients[0] + gradients[0].new_zeros(4 << 20).sum()

    model = network()
    with MemoryBudget("8MiB", Config(policy="recompute-only")) as budget:
        with pytest.raises(BudgetError, match="out of memory"):
            Grows.apply(model(torch.randn(8, 64))).sum().backward()
        model.zero_grad()
        model(torch.randn(8, 64)).sum().backward()
    assert budget.summary().peak_bytes <= 8 << 20
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert num_modes() == 0


@pytest.mark.usefixtures("device")
def test_two_threads_that_train_share_the_engines_thread() -> None:
    """Two sessions on two threads, whose nodes run on one thread of the engine in turns, do not meet."""
    results: dict[str, list[torch.Tensor]] = {}

    def train(name: str, scope: Any) -> None:
        with torch.device(DEVICE):
            generator = torch.Generator(device=DEVICE).manual_seed(3)
            model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.copy_(torch.rand(parameter.shape, generator=generator) - 0.5)
            with scope:
                for _ in range(5):
                    model(torch.rand(16, 64, generator=generator)).pow(2).mean().backward()
            results[name] = [parameter.grad.cpu() for parameter in model.parameters() if parameter.grad is not None]

    threads = [
        threading.Thread(
            target=train, args=(decisions, MemoryBudget("1TiB", Config(decisions=decisions, tier="memory")))
        )
        for decisions in ("recompute", "swap")
    ]
    train("plain", contextlib.nullcontext())
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for name in ("recompute", "swap"):
        assert all(torch.equal(a, b) for a, b in zip(results["plain"], results[name], strict=True))
