"""What Python code writes in a backward, in hooks or custom Functions, does not change what replays read."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from tests.runtime.parts import running_session
from tests.runtime.record.partly import ROWS, WIDTH, drop_all
from tests.runtime.record.taped import (  # noqa: F401 - a fixture
    Loop,
    one_thread_and_the_tape,
    same_bits,
)
from tests.same_bits.judge import bits_of, seed_everything
from torchdelta import Config, MemoryBudget
from torchdelta._torch.engine import graph_task_id
from torchdelta._torch.modes import num_modes, top_function_mode
from torchdelta._torch.tensors import version_of

if TYPE_CHECKING:
    from collections.abc import Callable

    Between = Callable[[Loop, torch.Tensor], torch.Tensor]

_NUM_REACTIVE_STEPS = 6
_NUM_STEPS = 28  # on a busy machine a step may have to wait for room: then it takes more steps until the tape is used
_WRITES_FROM = 24


class _Dropping(Loop):
    """Drops all that can be recomputed before it writes: the layers that come later are replayed after the write."""


def _write(loop: Loop, *, hides: bool) -> None:
    """Write what every layer reads. A write through `.data` does not change the version."""
    if isinstance(loop, _Dropping):
        drop_all()
    read = loop.read.data if hides else loop.read
    read.mul_(1.01)


class _WritesWhatItSaved(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (x,) = ctx.saved_tensors
        x.data.mul_(1.5)
        return grads[0] * 2


class _Wrapper(torch.Tensor):
    """A subclass that unwraps itself in each op."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # noqa: SLF001

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> _Wrapper:  # noqa: PYI034
        made = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)  # pyright: ignore[reportAttributeAccessIssue]
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        return func(*[a.inner if isinstance(a, _Wrapper) else a for a in args], **(kwargs or {}))


def _gradient_of_another_graph(loop: Loop, *, hides: bool) -> torch.Tensor:
    """Run another backward, in which a hook writes."""
    with torch.enable_grad():
        inner = torch.ones(3, requires_grad=True)
        outer = inner * 2
        outer.register_hook(lambda _grad: _write(loop, hides=hides))
        return torch.autograd.grad(outer.sum(), inner)[0]


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
        return grad * _gradient_of_another_graph(loop, hides=hides)[0]

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
            return grads[0] * _gradient_of_another_graph(loop, hides=hides)[0]

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
@pytest.mark.usefixtures("one_thread_and_the_tape")
def test_written_in_every_followed_step(writer: Any, hides: bool) -> None:
    """Recorded in Python at first, and on the tape once the backward is known."""
    counts = same_bits(lambda loop, _index: _step(loop, writer, hides=hides), num_steps=_NUM_STEPS)
    assert counts[-1] > 0
    assert num_modes() == 0
    assert top_function_mode() is None


@pytest.mark.parametrize("hides", [False, True], ids=["in place", "through data"])
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
        writes = index >= _WRITES_FROM
        loss = loop.forward(lambda layer, x: Writing.apply(x, loop, writes) if layer == 3 else x)  # pyright: ignore[reportArgumentType]
        loss.backward()
        loop.update(loss)

    counts = same_bits(body, num_steps=_NUM_STEPS)
    assert counts[_WRITES_FROM - 1] > 0


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


def test_saved_statistics_that_a_batch_norm_writes_in_the_backward() -> None:
    """A saved tensor shows what its storage holds at its unpack: the new statistics, as in plain training."""

    def train() -> list[Any]:
        loop = _Dropping()
        norm = torch.nn.BatchNorm1d(WIDTH, affine=False)

        def hook(grad: torch.Tensor) -> torch.Tensor:
            drop_all()
            with torch.no_grad():
                norm(grad * 1e4)
            return grad

        def between(layer: int, x: torch.Tensor) -> torch.Tensor:
            if layer == 3:
                x.register_hook(hook)
            return x * (norm.running_var + 0) * norm.running_var  # pyright: ignore[reportOptionalOperand]

        for _ in range(_NUM_REACTIVE_STEPS):
            loss = loop.forward(between)
            loss.backward()
            loop.update(loss)
        return [*loop.seen, bits_of(norm.state_dict())]

    plain = train()
    with (
        mock.patch("torchdelta.runtime.session.LEAST_EVICTION_BYTES", 1),
        MemoryBudget("1TiB", Config(tier="memory")) as budget,
    ):
        running_session().pause.forbid()
        assert train() == plain
    assert budget.summary().num_recomputed_ops > 0


@pytest.mark.usefixtures("one_thread_and_the_tape")
def test_a_write_to_what_was_replayed() -> None:
    """Another saved tensor is replayed later, and reads the content from before the write."""

    def between(layer: int, x: torch.Tensor) -> torch.Tensor:
        if layer not in {2, 3}:
            return x
        y = x * 1.5
        kept = x + y.sigmoid().tanh() + y.pow(2) * 0.01
        return kept + _WritesWhatItSaved.apply(y) * 0.1  # pyright: ignore[reportOperatorIssue]

    def body(loop: Loop, _index: int) -> None:
        loss = loop.forward(between)
        loss.backward()
        loop.update(loss)

    assert same_bits(body, num_steps=_NUM_STEPS)[-1] > 0


@pytest.mark.usefixtures("one_thread_and_the_tape")
def test_a_write_by_an_op_of_a_subclass() -> None:
    """Only one argument of the op is of the subclass; what it writes is plain."""

    def body(loop: Loop, index: int) -> None:
        def hook(_grad: torch.Tensor) -> None:
            if index >= _WRITES_FROM:
                loop.read.data.mul_(_Wrapper(torch.tensor(1.01)))

        def between(layer: int, x: torch.Tensor) -> torch.Tensor:
            if layer == 3:
                x.register_hook(hook)
            return x

        loss = loop.forward(between)
        loss.backward()
        loop.update(loss)

    assert same_bits(body, num_steps=_NUM_STEPS)[_WRITES_FROM - 1] > 0


def test_a_hook_that_calls_compiled_code() -> None:
    """Dynamo traces the mode when it compiles the function for the first time in the hook."""
    torch.compiler.reset()
    halve = torch.compile(lambda grad: grad * 0.5, backend="eager", fullgraph=True)
    try:
        seen = _gradients(halve, 2**40)
        assert seen == _gradients(lambda grad: grad * 0.5, None)
    finally:
        torch.compiler.reset()


@pytest.mark.filterwarnings("ignore::UserWarning")  # of Dynamo, also in plain training
@pytest.mark.parametrize("backend", ["aot_eager"])
@pytest.mark.parametrize("writer", [_in_tensor_hook, _in_recomputation])
def test_written_beside_a_compiled_module(writer: Any, backend: str) -> None:
    """Its backward is compiled code, and a checkpoint calls it again."""

    def train() -> list[Any]:
        loop = _Dropping()
        inner = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.GELU())
        compiled = torch.compile(inner, backend=backend)

        def between(layer: int, x: torch.Tensor) -> torch.Tensor:
            if layer == 3:
                return writer(loop, x, hides=True)
            if layer == 2:
                return checkpoint(compiled, x, use_reentrant=False)
            return x

        for _ in range(_NUM_REACTIVE_STEPS):
            loss = loop.forward(between)
            loss.backward()
            loop.update(loss)
        return [*loop.seen, bits_of(loop.read), bits_of([p.grad for p in inner.parameters()])]

    torch.compiler.reset()
    try:
        plain = train()
        with MemoryBudget("1TiB", Config(tier="memory")) as budget:
            assert train() == plain
        assert budget.summary().num_recomputed_ops > 0
    finally:
        torch.compiler.reset()


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


@pytest.mark.parametrize("is_recorded", [False, True])
def test_a_hook_that_raises_leaves_no_mode(is_recorded: bool) -> None:
    """Neither between the nodes nor in a backward without hooks on its nodes."""
    fails = False

    def hook(_grad: torch.Tensor) -> None:
        if fails:
            raise ValueError("from the hook")

    w = torch.randn(WIDTH, WIDTH, requires_grad=True)
    with MemoryBudget("1TiB", Config(tier="memory")):
        if is_recorded:
            running_session().pause.forbid()
        for fails in (False,) * 4 + (True, False, True):
            y = (torch.ones(ROWS, WIDTH) @ w).exp()
            y.register_hook(hook)
            with pytest.raises(ValueError, match="from the hook") if fails else contextlib.nullcontext():
                y.sum().backward()
            assert top_function_mode() is None
    assert num_modes() == 0
