"""What Python code writes in a backward, in hooks or custom Functions, does not change what replays read."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from tests.runtime.parts import running_session
from tests.runtime.record.partly import CHANGES_AT, ROWS, WIDTH, drop_all
from tests.runtime.record.taped import (  # noqa: F401 - a fixture
    NUM_STEPS,
    Loop,
    one_thread_and_the_tape,
    outcome,
    same_bits,
)
from tests.same_bits.judge import bits_of, seed_everything
from torchdelta import Config, MemoryBudget
from torchdelta._torch.engine import graph_task_id
from torchdelta._torch.modes import CAN_ENTER_MODES_IN_OPS, num_modes, top_function_mode
from torchdelta._torch.tensors import version_of

if TYPE_CHECKING:
    from collections.abc import Callable

    Between = Callable[[Loop, torch.Tensor], torch.Tensor]

_NUM_REACTIVE_STEPS = 6


class _Dropping(Loop):
    """Drops all that can be recomputed before it writes: the layers that come later are replayed after the write."""


def _write(loop: Loop, *, hides: bool) -> None:
    """Write what every layer reads. Through `.data`, the version does not tell."""
    if isinstance(loop, _Dropping):
        drop_all()
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


def _in_recomputation_of_a_fill(loop: Loop, x: torch.Tensor, *, hides: bool) -> torch.Tensor:
    """The backward of the fill, where it is recomputed, never runs under the recorder."""

    def run(x: torch.Tensor) -> torch.Tensor:
        if graph_task_id() != -1:
            _write(loop, hides=hides)
        return x.exp().masked_fill(x > 1, 0.5)

    return checkpoint(run, x, use_reentrant=False)


def _in_hook_after_a_fill(loop: Loop, x: torch.Tensor, *, hides: bool) -> torch.Tensor:
    x = x.masked_fill(x > 1, 0.5)
    assert x.grad_fn is not None
    x.grad_fn.register_hook(lambda _inputs, _outputs: _write(loop, hides=hides))
    return x


def _in_backward_of_a_hook(loop: Loop, x: torch.Tensor, *, hides: bool) -> torch.Tensor:
    def hook(grad: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            inner = torch.ones(3, requires_grad=True)
            outer = inner * 2
            outer.register_hook(lambda _grad: _write(loop, hides=hides))
            (found,) = torch.autograd.grad(outer.sum(), inner)
        return grad * found[0]

    x.register_hook(hook)
    return x


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


WRITERS = [
    _in_function,
    _in_tensor_hook,
    _in_node_hook,
    _in_recomputation,
    _in_recomputation_of_a_fill,
    _in_hook_after_a_fill,
    _in_nested_backward,
    _in_backward_of_a_hook,
]


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
def test_written_in_steps_without_a_plan(writer: Any, hides: bool) -> None:
    """Their backward runs under the recorder, but hooks run between its nodes."""

    def train() -> list[Any]:
        loop = _Dropping()
        for _ in range(_NUM_REACTIVE_STEPS):
            _step(loop, writer, hides=hides)
        return [*loop.seen, bits_of(loop.read)]

    plain = train()
    with MemoryBudget("1TiB", Config(tier="memory")) as budget:
        running_session().pause.forbid()
        assert train() == plain
    assert budget.summary().num_recomputed_ops > 0


@pytest.mark.skipif(not CAN_ENTER_MODES_IN_OPS, reason="needs torch 2.13")
@pytest.mark.usefixtures("one_thread_and_the_tape")
def test_statistics_that_a_batch_norm_writes_in_the_backward() -> None:
    """Layers whose replays come later read the running mean."""

    def body(loop: Loop, _index: int) -> None:
        norm = torch.nn.BatchNorm1d(WIDTH, affine=False)

        def run(x: torch.Tensor) -> torch.Tensor:
            if graph_task_id() != -1:
                with torch.no_grad():
                    norm(x * 10)
            return x.exp().log()

        def between(layer: int, x: torch.Tensor) -> torch.Tensor:
            if layer == 3:
                return checkpoint(run, x, use_reentrant=False)
            return x + norm.running_mean  # pyright: ignore[reportOperatorIssue]

        loss = loop.forward(between)
        loss.backward()
        loop.update(loss)
        loop.seen.append(bits_of(norm.state_dict()))

    same_bits(body)


def _gradients(hook: Callable[[torch.Tensor], torch.Tensor | None], budget: int | None) -> list[Any]:
    """Return the bits of gradients that a hook sees and may change."""
    seed_everything()
    seen: list[Any] = []
    with MemoryBudget(budget, Config(tier="memory")) if budget is not None else contextlib.nullcontext():
        for _ in range(_NUM_REACTIVE_STEPS):
            x = torch.randn(ROWS, WIDTH, requires_grad=True)
            y = (x * 2).exp()
            y.register_hook(hook)
            (y.sigmoid() * y).mean().backward()
            assert x.grad is not None
            seen.append(bits_of(x.grad))
    return seen


def _pinv_of_complex(grad: torch.Tensor) -> torch.Tensor:
    return grad + torch.linalg.pinv(torch.complex(grad[:8, :8], grad[8:16, :8]) * 1e4).real.sum()


def _foreach(grad: torch.Tensor) -> torch.Tensor:
    new = [torch.ones(2), torch.ones(3)]
    torch._foreach_mul_(new, 2.0)
    assert [version_of(tensor) for tensor in new] == [1, 1]
    return grad * new[0][0]


def _on_other_layouts(grad: torch.Tensor) -> None:
    sparse = torch.eye(3).to_sparse()
    sparse.mul_(2.0)
    assert sparse.to_dense().sum() == 6
    assert grad.is_contiguous()


@pytest.mark.parametrize("hook", [_pinv_of_complex, _foreach, _on_other_layouts])
def test_what_hooks_compute_is_what_it_was(hook: Any) -> None:
    """Although a dispatch mode is on."""
    assert _gradients(hook, 2**40) == _gradients(hook, None)


def test_a_sparse_gradient_may_be_written_in_a_hook() -> None:
    """It has no storage."""
    embedding = torch.nn.Embedding(20, 6, sparse=True)
    embedding.weight.register_hook(lambda grad: grad.mul_(0.5))
    with MemoryBudget("1TiB", Config(tier="memory")):
        embedding(torch.arange(4)).sum().backward()
    assert embedding.weight.grad is not None
    assert embedding.weight.grad.to_dense().sum() == 4 * 6 * 0.5


def test_a_hook_that_raises_leaves_no_mode() -> None:
    """Neither between the nodes nor in an unwatched backward."""

    def fail(_grad: torch.Tensor) -> None:
        raise ValueError("from the hook")

    with MemoryBudget("1TiB", Config(tier="memory")):
        for _ in range(_NUM_REACTIVE_STEPS):
            x = torch.randn(ROWS, WIDTH, requires_grad=True)
            y = x.exp()
            y.register_hook(fail)
            with pytest.raises(ValueError, match="from the hook"):
                y.sum().backward()
            assert top_function_mode() is None
    assert num_modes() == 0
