"""Destructors and garbage collections may run Python inside an op: recording does not resume there."""

from __future__ import annotations

import contextlib
import functools
import gc
import sys
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from torchdelta import Config, MemoryBudget
from torchdelta._torch.modes import BelowAutograd
from torchdelta.native.counting import counting_status
from torchdelta.runtime.current import current_session

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = pytest.mark.skipif(not counting_status().is_on, reason="needs the native parts")

MIB = 1 << 20
CONFIG = Config(planner=None, tier="memory")


@pytest.fixture(autouse=True)
def _no_automatic_collections() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


class _PassOn(TorchDispatchMode):
    """Does nothing."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the op."""
        del types
        return func(*args, **(kwargs or {}))


class Cycle:
    """Garbage whose destructor runs Python."""

    def __init__(self, run: Callable[[], object]) -> None:
        self.me = self
        self.run = run

    def __del__(self) -> None:
        """Run it."""
        self.run()


def pooled(num_mib: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what `max_unpool2d` takes: so many MiB of float32. Its output is four times as large."""
    x = torch.randn(1, num_mib, 1024, 1024, generator=torch.Generator().manual_seed(num_mib))
    values, indices = nn.functional.max_pool2d(x, 2, return_indices=True)
    return values.clone().requires_grad_(), indices


class Loop:
    """Steps that save the same tensors, and end with an op that fills its output without another op."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.ones(1))
        self.optimizer = torch.optim.SGD([self.weight], 0.0)
        self.base = torch.randn(2 * MIB)

    def step(self, x: torch.Tensor, indices: torch.Tensor, before: Callable[[], object] = lambda: None) -> bytes:
        """Return the bytes of the gradient of `x`, outside of torch's memory."""
        self.optimizer.zero_grad()
        x.grad = None
        kept = self.base * self.weight
        for _ in range(12):
            kept = kept.sin()
        before()
        y = nn.functional.max_unpool2d(x, indices, 2)
        z = y * y
        del y
        loss = z.sin().sum() + kept.sum()
        del z, kept
        loss.backward()
        self.optimizer.step()
        assert x.grad is not None
        gradient = x.grad.numpy().tobytes()
        x.grad = None
        return gradient

    def pause_with(self, x: torch.Tensor, indices: torch.Tensor) -> Any:
        """Train until recording pauses. Return what pauses it."""
        for _ in range(8):
            self.step(x, indices)
        pause: Any = current_session().pause
        assert pause.is_on
        return pause


def test_no_python_runs_inside_an_allocation_that_is_refused() -> None:
    """Garbage was collected there, and recording resumed in the kernel: the gradient was zero, without an error."""
    small, large = pooled(1), pooled(16)
    expected = Loop().step(*small)
    loop = Loop()
    is_on: list[bool] = []
    with MemoryBudget("1TiB", CONFIG) as unlimited:
        loop.step(*small)
        loop.step(*small)
    budget_bytes = int(unlimited.summary().peak_bytes / 0.88)
    with MemoryBudget(budget_bytes, CONFIG) as budget:
        pause = loop.pause_with(*small)
        with pytest.raises(torch.OutOfMemoryError, match="within this budget"):
            loop.step(*large, before=lambda: Cycle(lambda: is_on.append(pause.is_on)))
        assert not pause.is_on
        assert loop.step(*small) == expected
    assert budget.summary().peak_bytes <= budget_bytes
    gc.collect()
    assert is_on == [False]


def test_recording_does_not_resume_while_an_op_packs_what_it_saves() -> None:
    """Where a collection runs a destructor there: CPython 3.11 collects when objects are made."""
    small, large = pooled(1), pooled(2)
    expected = Loop().step(*large)
    loop = Loop()
    seen: list[tuple[bool, bool]] = []
    with MemoryBudget("1TiB", CONFIG):
        pause = loop.pause_with(*small)
        thresholds = gc.get_threshold()

        def note() -> None:
            seen.append((pause.hooks.is_in_op(), pause.is_on))

        def collect_at_the_next_handle() -> None:
            Cycle(note)
            gc.set_threshold(gc.get_count()[0] + 1, 10, 10)
            gc.enable()

        try:
            gradient = loop.step(*large, before=collect_at_the_next_handle)
        finally:
            gc.disable()
            gc.set_threshold(*thresholds)
        assert gradient == expected
        assert not pause.is_on
    gc.collect()
    assert all(is_on for is_in_op, is_on in seen if is_in_op)
    if sys.version_info < (3, 12):
        assert seen


def test_the_limit_waits_for_the_end_of_a_kernel() -> None:
    """Called below autograd, it asks to be called again at the next allocation."""
    small = pooled(1)
    loop = Loop()
    with MemoryBudget("1TiB", CONFIG):
        pause = loop.pause_with(*small)
        with BelowAutograd():
            pause.on_limit()
        assert pause.is_on
        assert torch.ones(16).sum() == 16
        assert not pause.is_on


def graph_in_a_cycle(w: torch.Tensor) -> None:
    """Leave garbage that holds the only saved tensors."""
    cycle: list[Any] = [(w * 2).exp()]
    cycle.append(cycle)


@pytest.mark.parametrize("decisions", ["recompute", None])
def test_the_last_saved_tensor_may_die_while_an_op_runs(decisions: str | None) -> None:
    """A collection then forgets the ops behind its inputs: the op cannot be replayed, and the step goes on."""
    torch.manual_seed(0)
    w, source = torch.randn(64, 64, requires_grad=True), torch.randn(64, 64)
    (w * ((source + 1) * 2)).sum().backward()
    assert w.grad is not None
    expected = w.grad.clone()
    thresholds = gc.get_threshold()
    for num_more in range(1, 60):
        w.grad = None
        gc.collect()
        config: Any = Config(decisions=decisions, tier="memory")
        try:
            with MemoryBudget("1TiB", config):
                x = source.clone()
                graph_in_a_cycle(w)
                gc.set_threshold(gc.get_count()[0] + num_more, 10, 10)
                gc.enable()
                hidden = x + 1
                doubled = hidden * 2
                del x, hidden
                gc.disable()
                loss = (w * doubled).sum()
                del doubled
                loss.backward()
        finally:
            gc.set_threshold(*thresholds)
            gc.disable()
        assert torch.equal(w.grad, expected)


def test_recording_does_not_resume_in_the_pack_hook_of_the_program() -> None:
    """An op calls it, too: what is left of that op was taken for all of it, and its gradient was zero."""
    small = pooled(1)
    expected = Loop().step(*small)
    loop = Loop()
    with MemoryBudget("1TiB", CONFIG):
        pause = loop.pause_with(*small)
        were_on: list[bool] = []

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            pause.on_limit()
            were_on.append(pause.is_on)
            return tensor

        x, indices = small
        with saved_tensors_hooks(pack, lambda tensor: tensor):
            y = nn.functional.max_unpool2d(x, indices, 2)
        assert were_on
        assert all(were_on)
        assert torch.ones(16).sum() == 16
        assert not pause.is_on
        del y
        assert loop.step(*small) == expected


@pytest.mark.parametrize("mode", [None, _PassOn, functools.partial(FlopCounterMode, display=False)])
def test_a_larger_step_resumes_recording_below_a_mode_of_the_program(mode: Callable[[], Any] | None) -> None:
    """The Python of a mode runs between two ops."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(8)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step(num_rows: int) -> None:
        with contextlib.nullcontext() if mode is None else mode():
            model(torch.randn(num_rows, 64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    with MemoryBudget("1TiB", CONFIG) as unlimited:
        step(2048)
        step(2048)
    budget_bytes = int(0.75 * unlimited.summary().peak_bytes)
    with MemoryBudget(budget_bytes, CONFIG) as budget:
        for _ in range(8):
            step(512)
        pause: Any = current_session().pause
        assert pause.is_on
        step(2048)
        assert not pause.is_on
    assert budget.summary().peak_bytes <= budget_bytes
