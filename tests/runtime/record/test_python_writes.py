"""What Python code writes in a backward, in hooks or custom Functions, does not change what replays read."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from tests.runtime.record.partly import CHANGES_AT
from tests.runtime.record.taped import (  # noqa: F401 - a fixture
    NUM_STEPS,
    Loop,
    one_thread_and_the_tape,
    outcome,
    same_bits,
    usual,
)
from tests.same_bits.judge import bits_of, seed_everything
from torchdelta import Config, MemoryBudget
from torchdelta._torch.engine import graph_task_id
from torchdelta._torch.modes import CAN_ENTER_MODES_IN_OPS, num_modes, top_function_mode

if TYPE_CHECKING:
    from collections.abc import Callable

    Between = Callable[[Loop, torch.Tensor], torch.Tensor]

_NUM_REACTIVE_STEPS = 6
_SHARES_OF_PEAK = (0.9, 0.8, 0.7)


def _write(loop: Loop, *, hides: bool) -> None:
    """Write what every layer reads. Through `.data`, the version does not tell."""
    read = loop.read.data if hides else loop.read
    read.mul_(1.01)


def _in_function(loop: Loop, x: torch.Tensor, *, hides: bool) -> torch.Tensor:
    class Writing(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            del ctx
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            del ctx
            _write(loop, hides=hides)
            return grads[0]

    return Writing.apply(x)  # pyright: ignore[reportReturnType]


def _in_tensor_hook(loop: Loop, x: torch.Tensor, *, hides: bool) -> torch.Tensor:
    def hook(grad: torch.Tensor) -> torch.Tensor:
        _write(loop, hides=hides)
        return grad * 1.0

    x.register_hook(hook)
    return x


def _in_node_hook(loop: Loop, x: torch.Tensor, *, hides: bool) -> torch.Tensor:
    assert x.grad_fn is not None
    x.grad_fn.register_prehook(lambda _grads: _write(loop, hides=hides))
    return x


def _in_recomputation(loop: Loop, x: torch.Tensor, *, hides: bool) -> torch.Tensor:
    def run(x: torch.Tensor) -> torch.Tensor:
        if graph_task_id() != -1:
            _write(loop, hides=hides)
        return x.exp().log()

    return checkpoint(run, x, use_reentrant=False)


def _in_nested_backward(loop: Loop, x: torch.Tensor, *, hides: bool) -> torch.Tensor:
    class Nesting(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            del ctx
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            del ctx
            with torch.enable_grad():
                inner = torch.ones(3, requires_grad=True)
                outer = inner * 2
                outer.register_hook(lambda _grad: _write(loop, hides=hides))
                (found,) = torch.autograd.grad(outer.sum(), inner)
            return grads[0] * found[0]

    return Nesting.apply(x)  # pyright: ignore[reportReturnType]


WRITERS = [_in_function, _in_tensor_hook, _in_node_hook, _in_recomputation, _in_nested_backward]


def _step(loop: Loop, writer: Any, *, hides: bool) -> None:
    loss = loop.forward(lambda layer, x: writer(loop, x, hides=hides) if layer == 3 else x)
    loss.backward()
    loop.update(loss)


@pytest.mark.parametrize("hides", [False, True], ids=["in place", "through data"])
@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.skipif(not CAN_ENTER_MODES_IN_OPS, reason="needs torch 2.13")
@pytest.mark.usefixtures("one_thread_and_the_tape")
def test_written_in_every_followed_step(writer: Any, hides: bool) -> None:
    """With and without the tape: it is used once the backward is known."""
    same_bits(lambda loop, _index: _step(loop, writer, hides=hides))
    assert num_modes() == 0
    assert top_function_mode() is None


@pytest.mark.parametrize("hides", [False, True], ids=["in place", "through data"])
@pytest.mark.skipif(not CAN_ENTER_MODES_IN_OPS, reason="needs torch 2.13")
@pytest.mark.usefixtures("one_thread_and_the_tape")
def test_written_only_after_the_backward_is_known(hides: bool) -> None:
    """The function is in the graph from the first step on, and writes from one step on."""

    class Writing(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, loop: Loop, writes: bool) -> torch.Tensor:
            ctx.loop, ctx.writes = loop, writes
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            if ctx.writes:
                _write(ctx.loop, hides=hides)
            return grads[0], None, None

    def body(loop: Loop, index: int) -> None:
        writes = index >= CHANGES_AT
        loss = loop.forward(lambda layer, x: Writing.apply(x, loop, writes) if layer == 3 else x)  # pyright: ignore[reportArgumentType]
        loss.backward()
        loop.update(loss)

    counts = same_bits(body)
    assert counts[CHANGES_AT - 1] > 0


@pytest.mark.parametrize("hides", [False, True], ids=["in place", "through data"])
@pytest.mark.parametrize("writer", WRITERS)
def test_written_in_reactive_steps(writer: Any, hides: bool) -> None:
    """Where no plan is followed."""

    def train() -> list[Any]:
        loop = Loop()
        for _ in range(_NUM_REACTIVE_STEPS):
            _step(loop, writer, hides=hides)
        return [*loop.seen, bits_of(loop.read)]

    seed_everything()
    plain = train()
    with MemoryBudget("1TiB", Config(tier="memory")) as unlimited:
        usual(Loop())
    num_recomputed = 0
    for share in _SHARES_OF_PEAK:
        with MemoryBudget(int(unlimited.summary().peak_bytes * share), Config(tier="memory")) as budget:
            assert train() == plain
        num_recomputed += budget.summary().num_recomputed_ops
    assert num_recomputed > 0
