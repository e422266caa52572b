"""Writes that an op's schema does not declare, in recorded steps and in steps that follow a plan."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import distributed
from torch.nn.functional import gelu

from tests.runtime.record.partly import CHANGES_AT, NUM_LAYERS, ROWS, WIDTH
from tests.runtime.record.taped import (
    Loop,
    budget_of_usual_steps,
    one_thread_and_the_tape,  # noqa: F401 - a fixture # pyright: ignore[reportUnusedImport]
    outcome,
)
from torchdelta import Config, MemoryBudget
from torchdelta._torch.ops import schema_of
from torchdelta.aten.facts import facts_of
from torchdelta.runtime.current import current_session

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    Body = Callable[[Loop, int], None]


def _check_on_tape(between: Callable[[Loop, int, int, torch.Tensor], torch.Tensor]) -> None:
    """Compare a loop with its plain run; the step at `CHANGES_AT` uses the tape."""
    used: list[bool] = []

    def body(loop: Loop, index: int) -> None:
        if index == 0:
            used.clear()
            if (session := current_session()) is not None:
                session.pause.forbid()
        loss = loop.forward(lambda layer, x: between(loop, index, layer, x))
        used.append(loop.is_on_tape())
        loss.backward()
        loop.update(loss)

    plain, _ = outcome(body, None)
    seen, _ = outcome(body, budget_of_usual_steps() + 2_000_000)
    assert used[CHANGES_AT - 1]
    assert seen == plain


@pytest.mark.usefixtures("one_thread_and_the_tape")
def test_a_constant_that_is_written_with_grad_mode_off_on_the_tape() -> None:
    """It was learned with grad mode on. Neither the ops nor the graph of the step depend on that."""

    def between(_loop: Loop, index: int, layer: int, x: torch.Tensor) -> torch.Tensor:
        if layer not in {1, 2, 3}:
            return x
        noise = x.detach() * 1.5
        kept = x + gelu(x + noise) * 0.1  # the replay of the sum reads the old content
        with torch.set_grad_enabled(index < CHANGES_AT):
            noise.fill_(0.25)
        return kept + gelu(x * noise) * 0.1

    _check_on_tape(between)


@pytest.fixture
def one_process(tmp_path: Path) -> Iterator[None]:
    """A process group of this process alone."""
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@pytest.mark.skipif(not distributed.is_gloo_available(), reason="torch was built without gloo")
@pytest.mark.usefixtures("one_thread_and_the_tape", "one_process")
def test_a_collective_that_writes_another_tensor_than_in_the_learned_step() -> None:
    """From then on it writes a tensor that replays read."""
    slots: dict[int, list[torch.Tensor]] = {}

    def between(loop: Loop, index: int, layer: int, x: torch.Tensor) -> torch.Tensor:
        if index == 0 and layer == 0:
            slots[id(loop)] = [torch.full((ROWS, WIDTH), 0.1), torch.zeros(ROWS, WIDTH)]
        own = slots[id(loop)]
        if layer in {1, 2, 3}:
            x = x + gelu(x + own[0]) * 0.1
        if layer == NUM_LAYERS - 1:
            distributed.all_gather([own[0 if index >= CHANGES_AT else 1]], x.detach() * 0.5)
        return x

    _check_on_tape(between)


class Quiet(torch.Tensor):
    """Runs its ops with dispatch disabled: no mode sees them."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # noqa: SLF001 - as subclasses of torch do

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        with torch._C._DisableTorchDispatch():  # noqa: SLF001 - the same
            plain = [a.as_subclass(torch.Tensor) if isinstance(a, Quiet) else a for a in args]
            return func(*plain, **(kwargs or {}))


@pytest.mark.parametrize("hides", [True, False], ids=["data", "counted"])
@pytest.mark.usefixtures("one_thread_and_the_tape")
def test_an_op_of_a_subclass_that_no_mode_sees(hides: bool) -> None:
    """It writes a plain tensor that replays read, for the first time in a step that uses the tape."""
    factor = torch.Tensor._make_subclass(Quiet, torch.tensor(1.5))

    def between(loop: Loop, index: int, layer: int, x: torch.Tensor) -> torch.Tensor:
        if index >= CHANGES_AT and layer == NUM_LAYERS - 1:  # every layer has read it
            (loop.read.data if hides else loop.read).mul_(factor)
        return x

    _check_on_tape(between)


def _train_with_statistics(scope: contextlib.AbstractContextManager[object]) -> list[torch.Tensor]:
    torch.manual_seed(0)
    weight = torch.randn(32, 32, requires_grad=True)
    mean, variance = torch.zeros(32), torch.ones(32)
    with scope:
        for _ in range(3):
            hidden = torch.randn(512, 32) @ weight
            result = gelu(hidden - mean)  # saves a difference, which is dropped; its replay reads the mean
            with torch.no_grad():
                torch.batch_norm_update_stats(hidden, mean, variance, 0.5)
            loss = result.square().mean()
            del hidden, result
            loss.backward()
    assert weight.grad is not None
    return [weight.grad, mean, variance]


def test_running_statistics_that_a_replay_reads() -> None:
    """`batch_norm_update_stats` writes them without saying so."""
    plain = _train_with_statistics(contextlib.nullcontext())
    seen = _train_with_statistics(MemoryBudget("1TiB", Config(decisions="recompute", tier="memory")))
    assert all(map(torch.equal, plain, seen))


@pytest.mark.parametrize("name", ["batch_norm_gather_stats", "batch_norm_gather_stats_with_counts"])
def test_statistics_that_are_gathered_count_as_written(name: str) -> None:
    """The kernels are CUDA's; `torch.nn.SyncBatchNorm` calls the second one."""
    func = getattr(torch.ops.aten, name).default
    names = [schema_of(func).arguments[position].name for position in facts_of(func).written_positions]
    assert names == ["running_mean", "running_var"]


def _train_with_given_outputs(scope: contextlib.AbstractContextManager[object]) -> list[torch.Tensor]:
    torch.manual_seed(0)
    weight = torch.randn(32, 32, requires_grad=True)
    mean, variance = torch.zeros(32), torch.ones(32)
    normed, saved_mean, saved_scale = torch.zeros(512, 32), torch.zeros(32), torch.zeros(32)
    with scope:
        for _ in range(3):
            hidden = torch.randn(512, 32) @ weight
            result = gelu(hidden - mean) + gelu(hidden - normed)  # both differences are dropped
            with torch.no_grad():
                torch.native_batch_norm(
                    hidden, None, None, mean, variance, True, 0.5, 1e-5, out=(normed, saved_mean, saved_scale)
                )
            loss = (result * normed).square().mean()
            del hidden, result
            loss.backward()
    assert weight.grad is not None
    return [weight.grad, mean, variance, normed, saved_mean, saved_scale]


def test_a_batch_norm_into_given_tensors() -> None:
    """It writes those, and the running statistics, which its schema does not say."""
    plain = _train_with_given_outputs(contextlib.nullcontext())
    budget = MemoryBudget("1TiB", Config(decisions="recompute", tier="memory"))
    seen = _train_with_given_outputs(budget)
    assert budget.summary().num_recomputed_ops > 0
    assert all(map(torch.equal, plain, seen))


def _train_with_sobol(scope: contextlib.AbstractContextManager[object], *, draws: bool) -> torch.Tensor:
    weight = torch.ones(2, 5, requires_grad=True)
    with scope:
        engine = torch.quasirandom.SobolEngine(5, scramble=True, seed=1)
        engine.draw(3)
        result = (engine.quasi.float() / 2**30 * weight).sin()  # the product is dropped; its replay reads the state
        if draws:
            engine.draw(3)
        else:
            engine.fast_forward(5)
        result.sum().backward()
    assert weight.grad is not None
    return weight.grad


@pytest.mark.parametrize("draws", [False, True])
def test_the_state_of_a_sobol_sequence(draws: bool) -> None:
    """Torch writes it through raw pointers."""
    plain = _train_with_sobol(contextlib.nullcontext(), draws=draws)
    budget = MemoryBudget("1TiB", Config(decisions="recompute", tier="memory"))
    assert torch.equal(_train_with_sobol(budget, draws=draws), plain)
    assert budget.summary().num_recomputed_ops > 0
