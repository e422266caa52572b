"""Same bits where a tensor is given another storage, and where a write goes through a view that changes it."""

from __future__ import annotations

import gc
import warnings
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.same_bits.judge import Scope, Step, assert_same_bits, differences, plain_outcome, run
from torchdelta import Config, MemoryBudget

if TYPE_CHECKING:
    from collections.abc import Callable

SHAPE = (16, 16)
negative: Callable[[torch.Tensor], torch.Tensor] = torch._neg_view  # noqa: SLF001 - real tensors get one inside autograd only


def _set_and_write(alias: torch.Tensor, y: torch.Tensor) -> None:
    alias.set_(y)
    alias.mul_(2)


def _set_storage_and_write(alias: torch.Tensor, y: torch.Tensor) -> None:
    alias.set_(y.untyped_storage(), 0, y.shape, y.stride())
    alias.mul_(2)


def _set_and_write_the_other(alias: torch.Tensor, y: torch.Tensor) -> None:
    alias.set_(y)
    y.mul_(2)


def _set_and_resize(alias: torch.Tensor, y: torch.Tensor) -> None:
    alias.set_(y)
    alias.resize_(2 * y.numel())
    alias.mul_(2)


def _write_by_storage(alias: torch.Tensor, y: torch.Tensor) -> None:
    del alias
    y.untyped_storage().copy_(torch.ones(SHAPE).untyped_storage())


def _fill_by_storage(alias: torch.Tensor, y: torch.Tensor) -> None:
    del alias
    y.untyped_storage().fill_(0)


def step_of(loss_of: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], *, is_computed: bool) -> Step:
    """Return a step whose loss is made of a tensor, an input or the result of an op, and of a leaf."""

    def step(scope: Scope) -> dict[str, Any]:
        w, y = torch.randn(SHAPE, requires_grad=True), torch.randn(SHAPE)
        with scope():
            loss_of(y * 2 if is_computed else y, w).backward()
        return {"grad": w.grad, "y": y}

    return step


@pytest.mark.parametrize(
    "write",
    [
        _set_and_write,
        _set_storage_and_write,
        _set_and_write_the_other,
        _set_and_resize,
        _write_by_storage,
        _fill_by_storage,
    ],
)
@pytest.mark.parametrize("is_computed", [False, True])
def test_a_replay_reads_what_was_there_before_a_write_through_an_alias(
    write: Callable[[torch.Tensor, torch.Tensor], None], *, is_computed: bool
) -> None:
    """`set_` makes the alias, and writes nothing itself."""

    def loss_of(y: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        loss = (y + w).sin().sum()
        with torch.no_grad():
            write(torch.empty(0), y)
        return loss

    assert_same_bits(step_of(loss_of, is_computed=is_computed))


@pytest.mark.parametrize("decisions", ["keep", "swap", "recompute", None])
@pytest.mark.parametrize("shape", [SHAPE, (100,)])
@pytest.mark.parametrize("is_computed", [False, True])
def test_a_saved_tensor_stays_in_the_storage_that_an_alias_leaves(
    shape: tuple[int, ...], decisions: str | None, *, is_computed: bool
) -> None:
    """Its gradient was that of the storage which the alias got, without an error and without an eviction."""

    def loss_of(y: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        alias = torch.empty(0)
        with torch.no_grad():
            alias.set_(y)
        saved = y * w
        with torch.no_grad():
            alias.set_(torch.zeros(shape))
        return saved.sum()

    step = step_of(loss_of, is_computed=is_computed)
    plain = plain_outcome(step)
    config: Any = Config(tier="memory") if decisions is None else Config(decisions=decisions, tier="memory")
    assert differences(plain, run(step, lambda: MemoryBudget("1TiB", config))) == []


@pytest.mark.parametrize("write", [_set_and_write, _set_and_write_the_other, _write_by_storage])
def test_a_storage_is_exchanged_in_the_backward(write: Callable[[torch.Tensor, torch.Tensor], None]) -> None:
    """In a hook, where ops are counted only: what a later node reads keeps its content."""

    def step(scope: Scope) -> dict[str, Any]:
        w, y = torch.randn(SHAPE, requires_grad=True), torch.randn(SHAPE)
        with scope():
            doubled = w * 2
            doubled.register_hook(lambda _gradient: write(torch.empty(0), y))
            (y + (doubled.sin() * (w * 3).exp())).sum().backward()
        return {"grad": w.grad, "y": y}

    assert_same_bits(step)


def test_writes_by_storage_in_a_real_budget() -> None:
    """They go through `set_`: a buffer that was already there was put into the same storage once more."""

    def step(scope: Scope) -> dict[str, Any]:
        layers = [torch.nn.Linear(64, 64) for _ in range(6)]
        x = torch.randn(1024, 64)
        with scope():
            for _ in range(3):
                hidden = x
                for layer in layers:
                    y = layer(hidden).tanh()
                    y.untyped_storage().copy_(y.untyped_storage().clone())
                    hidden = y * 1.0
                del y
                hidden.square().sum().backward()
                del hidden
        return {"grads": [parameter.grad for layer in layers for parameter in layer.parameters()]}

    budgets: list[MemoryBudget] = []

    def scope(budget: int | str) -> MemoryBudget:
        budgets.append(MemoryBudget(budget, Config(tier="memory", planner=None)))
        return budgets[-1]

    gc.collect()
    plain = plain_outcome(step)
    run(step, lambda: scope("1TiB"))
    budget_bytes = int(0.8 * budgets[0].summary().peak_bytes)
    assert differences(plain, run(step, lambda: scope(budget_bytes))) == []
    summary = budgets[1].summary()
    assert summary.peak_bytes <= budget_bytes
    assert summary.swapped_out_bytes + summary.recomputed_bytes > 0


def _copy_to_conjugate(y: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y.conj().copy_(w * 2)
    return y


def _set_part_of_adjoint(y: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y.mH[:] = w.exp()
    return y


def _copy_to_adjoint_without_grad(y: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        y.mH.copy_(w.exp())
    return y * w


def _add_to_conjugate(y: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y.conj().add_(w * 2)
    return y


def _draw_into_conjugate(y: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        y.conj().normal_()
    return y * w


def _write_out_of_conjugate(y: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.mul(w.exp(), 2, out=y.mH)
    return y * w


def _copy_to_negative(y: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    real = torch.zeros(SHAPE)
    negative(real).copy_(w.real * 2)
    return y + real * real


def _fill_negative(y: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    real = torch.zeros(SHAPE)
    negative(real).fill_(2.0)
    return y + real * w.real


def _fill_overlapping(y: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    base = torch.ones(256)
    base.as_strided((2, 128), (64, 1)).fill_(3.0)
    return y + base.view(SHAPE) * w


def _draw_into_overlapping(y: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    base = torch.ones(256)
    with torch.no_grad():
        base.as_strided((2, 128), (64, 1)).normal_()
    return y + base.view(SHAPE) * w.exp()


@pytest.mark.parametrize(
    "write",
    [
        _copy_to_conjugate,
        _set_part_of_adjoint,
        _copy_to_adjoint_without_grad,
        _add_to_conjugate,
        _draw_into_conjugate,
        _write_out_of_conjugate,
        _copy_to_negative,
        _fill_negative,
        _fill_overlapping,
        _draw_into_overlapping,
    ],
)
def test_a_write_through_a_view_is_replayed_through_it(
    write: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> None:
    """A conjugate or negative view changes what its storage gets; overlapping elements do not fill it."""

    def step(scope: Scope) -> dict[str, Any]:
        w = torch.randn(SHAPE, dtype=torch.cfloat, requires_grad=True)
        with scope():
            y = write(torch.zeros(SHAPE, dtype=torch.cfloat), w)
            (y * y).real.sum().backward()
        return {"grad": w.grad}

    assert_same_bits(step)
