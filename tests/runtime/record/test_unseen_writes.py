"""Gradients where compiled code writes in place what the forward has read."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from tests.compilation import QUIET, fresh_compiler  # noqa: F401 - a fixture
from tests.runtime.programs import UNLIMITED, running
from torchdelta import Config, MemoryBudget
from torchdelta._torch.modes import NoDispatch

if TYPE_CHECKING:
    from collections.abc import Callable

SIZE = 4096
pytestmark = QUIET


def unseen(graph: Callable[..., Any], _inputs: Any) -> Callable[..., Any]:
    """Compile a graph into code that no dispatch mode sees, as Inductor's kernels are, but in no time."""

    def run(*inputs: Any) -> Any:
        with NoDispatch():
            return graph(*inputs)

    return run


def gradients(step: Callable[[torch.Tensor], torch.Tensor], **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradient of a loss that `step` returns without a budget, and with one."""

    def run(scope: contextlib.AbstractContextManager[Any]) -> torch.Tensor:
        torch.manual_seed(0)
        weight = torch.ones(SIZE, requires_grad=True)
        with scope:
            step(weight).backward()
        assert weight.grad is not None
        return weight.grad

    return run(contextlib.nullcontext()), run(running(UNLIMITED, **options))


class Halving(nn.Module):
    """Halves its buffer in each call."""

    state: torch.Tensor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.state.mul_(0.5)
        return x * 2


def halve_argument(state: torch.Tensor) -> None:
    """Halve what a compiled function gets."""
    torch.compile(lambda x: x.mul_(0.5), backend=unseen)(state)


def halve_variable_of_closure(state: torch.Tensor) -> None:
    """Halve what a compiled function refers to."""
    torch.compile(lambda: state.mul_(0.5), backend=unseen)()


def halve_buffer(state: torch.Tensor) -> None:
    """Halve a buffer of a compiled module."""
    module = Halving()
    module.register_buffer("state", state)
    torch.compile(module, backend=unseen)(torch.ones(4))


def halve_buffer_of_module_compiled_in_place(state: torch.Tensor) -> None:
    """Halve a buffer of a module that `torch.compile` has not wrapped."""
    module = Halving()
    module.register_buffer("state", state)
    module.compile(backend=unseen)
    module(torch.ones(4))


def halve_buffer_of_argument(state: torch.Tensor) -> None:
    """Halve a buffer of a module that a compiled function gets."""
    module = Halving()
    module.register_buffer("state", state)
    torch.compile(lambda module: module(torch.ones(4)), backend=unseen)(module)


@pytest.mark.parametrize(
    "halve",
    [
        halve_argument,
        halve_variable_of_closure,
        halve_buffer,
        halve_buffer_of_module_compiled_in_place,
        halve_buffer_of_argument,
    ],
)
@pytest.mark.parametrize("decisions", ["recompute", "swap"])
def test_a_compiled_function_writes_what_was_read(halve: Callable[[torch.Tensor], None], decisions: str) -> None:
    """What is recomputed later reads the old content, and ops after the write the new one."""

    def step(weight: torch.Tensor) -> torch.Tensor:
        state = torch.arange(float(SIZE)) * 3
        difference = 1 - state
        loss = (difference * weight).sum()
        del difference
        with torch.no_grad():
            halve(state)
        return loss + ((state + 1) * weight).sum()

    expected, found = gradients(step, decisions=decisions)
    assert torch.equal(found, expected)


def test_a_compiled_function_writes_inside_a_real_budget() -> None:
    """The default policy decides, for a state that no op has made as well as for one that an op has made."""
    halve = torch.compile(lambda x: x.mul_(0.5), backend=unseen)
    size = 1 << 18

    def train(budget: int | str | None) -> tuple[list[torch.Tensor], int]:
        torch.manual_seed(0)
        weight, average = torch.ones(size, requires_grad=True), torch.zeros(size)
        seen: list[torch.Tensor] = []
        scope = MemoryBudget(budget, Config(tier="memory")) if budget is not None else contextlib.nullcontext()
        with scope as memory_budget:
            for _ in range(3):
                x = torch.randn(size)
                statistics = x * x
                h = (x - statistics - average) * weight
                with torch.no_grad():
                    halve(statistics)
                    halve(average)
                for _ in range(6):
                    h = h.sin()
                (h.sum() + statistics.sum()).backward()
                assert weight.grad is not None
                seen.append(weight.grad.clone())
                weight.grad = None
                del h
        return seen, memory_budget.summary().peak_bytes if memory_budget is not None else 0

    expected, _ = train(None)
    _, peak_bytes = train(UNLIMITED)
    found, _ = train(int(peak_bytes * 0.9))
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("decisions", ["recompute", "swap", None])
def test_a_compiled_function_writes_the_data_of_a_saved_tensor(decisions: str | None) -> None:
    """Autograd does not see such a write: the backward reads the new content."""

    def step(weight: torch.Tensor) -> torch.Tensor:
        hidden = torch.arange(float(SIZE)) * 3
        loss = (hidden * weight).sum()
        halve_argument(hidden.data)
        return loss

    expected, found = gradients(step, decisions=decisions)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("backend", ["eager", unseen])
def test_a_compiled_batch_norm_writes_statistics_that_were_read(backend: Any) -> None:
    """No version shows that a batch norm has written them."""

    def step(weight: torch.Tensor) -> torch.Tensor:
        norm = nn.BatchNorm1d(64)
        assert norm.running_mean is not None
        compiled = torch.compile(nn.Sequential(norm), backend=backend)
        x = torch.randn(64, 64)
        difference = x - norm.running_mean
        loss = (difference * weight.view(64, 64)).sum()
        del difference
        return loss + compiled(x * weight.view(64, 64)).square().sum() + (norm.running_mean * weight[:64]).sum()

    expected, found = gradients(step, decisions="recompute")
    assert torch.equal(found, expected)


def test_statistics_that_have_no_storage() -> None:
    """A compiled module below `vmap` sees batched tensors in place of its statistics."""
    norm = nn.BatchNorm1d(8)
    compiled = torch.compile(norm, backend="eager")
    x = torch.randn(3, 4, 8)

    def forward(parameters: Any, buffers: Any, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = torch.func.functional_call(compiled, (parameters, buffers), (x,))
        return output

    stacked = [
        {f"_orig_mod.{name}": tensor.detach().expand(3, *tensor.shape).clone() for name, tensor in tensors}
        for tensors in (norm.named_parameters(), norm.named_buffers())
    ]
    expected = torch.vmap(forward)(*stacked, x)
    stacked[1] = {f"_orig_mod.{n}": t.detach().expand(3, *t.shape).clone() for n, t in norm.named_buffers()}
    with MemoryBudget("1TiB", Config(tier="memory")):
        assert torch.equal(torch.vmap(forward)(*stacked, x), expected)
