"""Recording pauses in loops without an optimizer, too, and whatever steps later is foreseen."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.runtime.parts import running_session
from tests.runtime.record.pausing import CONFIG, WIDTH, is_recording, make_model, peak_of, train
from torchdelta import BudgetError, MemoryBudget
from torchdelta.native.counting import counting_status

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.skipif(not counting_status().is_on, reason="needs the native parts")


def train_by_hand(model: nn.Module, batches: list[int]) -> list[str]:
    """Train with updates of our own. Return the losses, exactly."""
    losses = []
    for batch_size in batches:
        loss = model(torch.randn(batch_size, WIDTH)).square().mean()
        loss.backward()
        with torch.no_grad():
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.sub_(parameter.grad, alpha=0.1)
                parameter.grad = None
        losses.append(loss.item().hex())
    return losses


def train_with_optimizer(model: nn.Module, batches: list[int]) -> None:
    """Train with an optimizer of torch."""
    train(model, torch.optim.SGD(model.parameters(), lr=0.1), batches)


def test_recording_pauses_in_a_loop_without_an_optimizer() -> None:
    """It pauses after a backward: no later moment between two steps is known."""
    expected = train_by_hand(make_model()[0], [16] * 8)
    model, _ = make_model()
    losses, seen = [], []
    with MemoryBudget("1TiB", CONFIG) as budget:
        for _ in range(8):
            losses += train_by_hand(model, [16])
            seen.append(is_recording())
        summary = budget.summary()
    assert losses == expected
    assert seen == [True, True] + [False] * 6
    assert summary.num_unrecorded_steps == 4  # the running one counts once it has ended
    assert budget.summary().num_steps == 8
    assert all(0 < step.op_time_s <= step.time_s * 1.001 for step in summary.steps)


@pytest.mark.parametrize("size", [1, WIDTH])
def test_recording_pauses_in_a_loop_that_saves_nothing(size: int) -> None:
    """A step ends with its backward, and differences of some bytes are none; a saved tensor resumes recording."""
    x = torch.ones(size, requires_grad=True)
    with MemoryBudget("1TiB", CONFIG) as budget:
        for index in range(5):
            some_bytes = torch.zeros(index * 32)
            (x + 1).sum().backward()
            del some_bytes
            assert is_recording() == (index < 2)
        assert budget.summary().num_steps == 4  # the first two backwards are one step
        y = x.exp()
        assert is_recording()
        y.sum().backward()
    assert budget.summary().num_steps == 5
    assert budget.summary().num_unrecorded_steps == 2
    assert x.grad is not None
    assert torch.equal(x.grad, 5 + torch.ones(size).exp())


@pytest.mark.parametrize("share", [0.6, 0.8])
def test_a_larger_step_without_an_optimizer_holds_the_budget(share: float) -> None:
    """Each forward of a pause is compared with the recorded ones from its first saved tensor on."""
    batches = [256] * 9 + [4096] * 2 + [256] * 4
    expected = train_by_hand(make_model()[0], batches)
    budget_bytes = int(peak_of(4096) * share)
    gc.collect()
    with MemoryBudget(budget_bytes, CONFIG) as budget:
        model, _ = make_model()
        losses = train_by_hand(model, batches[:9])
        assert not is_recording()
        losses += train_by_hand(model, batches[9:10])
        assert is_recording()
        losses += train_by_hand(model, batches[10:])
    assert losses == expected
    assert budget.summary().peak_bytes <= budget_bytes


@pytest.mark.parametrize("accumulates", [False, True])
def test_without_an_optimizer_nothing_is_allocated_beyond_the_budget(accumulates: bool) -> None:
    """An evaluation between two backwards of a pause is refused, as it is where an optimizer steps."""
    model, _ = make_model()
    budget_bytes = peak_of(256) * 2
    gc.collect()
    with MemoryBudget(budget_bytes, CONFIG) as budget:
        for _ in range(6):
            if accumulates:
                model(torch.randn(64, WIDTH)).square().mean().backward()
            else:
                train_by_hand(model, [64])
        assert not is_recording()
        with torch.no_grad(), pytest.raises(torch.OutOfMemoryError):
            torch.randn(budget_bytes // 4, 2)
        assert is_recording()
    assert budget.summary().peak_bytes <= budget_bytes


def test_an_update_that_needs_more_than_the_forward_does_not_end_a_pause() -> None:
    """Until the next forward, weights and gradients are alive, and what the program computes of them."""
    model, _ = make_model()
    with MemoryBudget("1TiB", CONFIG) as budget:
        for _ in range(12):
            model(torch.randn(4, WIDTH)).square().mean().backward()
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.data -= 0.1 * parameter.grad
                parameter.grad = None
        assert running_session().pause.num_resumed == 0
        assert budget.summary().num_unrecorded_steps == 8


def test_tensors_that_a_backward_saves_are_those_of_its_step() -> None:
    """Reentrant checkpoints save in backward, and no optimizer tells where a step ends."""
    model, _ = make_model()

    def train_checkpointed(num_steps: int) -> list[str]:
        losses = []
        for _ in range(num_steps):
            x = torch.randn(16, WIDTH, requires_grad=True)
            loss = checkpoint(model, x, use_reentrant=True).square().mean()
            loss.backward()
            losses.append(loss.item().hex())
        return losses

    torch.manual_seed(1)
    expected = train_checkpointed(12)
    torch.manual_seed(1)
    with MemoryBudget("1TiB", CONFIG) as budget:
        assert train_checkpointed(12) == expected
        assert running_session().pause.num_resumed == 0
        assert budget.summary().num_unrecorded_steps == 8


@pytest.mark.parametrize("resumes", [False, True])
def test_two_graphs_of_one_step(resumes: bool) -> None:
    """A step has two backwards, in a pause as outside, and also where recording resumes between them."""
    model, _ = make_model()
    with MemoryBudget("1TiB", CONFIG) as budget:
        for index in range(8):
            losses = [model(torch.randn(16, WIDTH)).square().mean() for _ in range(2)]
            losses[0].backward()
            if resumes and index == 6:
                assert not is_recording()
                torch.randn(1 << 20)
            losses[1].backward()
        assert is_recording() == resumes
    assert budget.summary().num_steps == 8


@pytest.mark.parametrize("steps", [train_by_hand, train_with_optimizer])
def test_nothing_is_allocated_beyond_the_budget_in_a_transform(steps: Callable[[nn.Module, list[int]], object]) -> None:
    """Recording resumes only after it; until then, what does not fit is refused."""
    model, _ = make_model()
    budget_bytes = peak_of(256) * 4
    gc.collect()

    def grow(x: torch.Tensor) -> torch.Tensor:
        parts = [x.expand(budget_bytes // 16, 2).clone() for _ in range(8)]
        return torch.stack([part.sum() for part in parts])

    with MemoryBudget(budget_bytes, CONFIG) as budget:
        steps(model, [64] * 8)
        assert not is_recording()
        with torch.no_grad(), pytest.raises(torch.OutOfMemoryError):
            torch.func.vmap(grow)(torch.ones(1, 1))
    assert budget.summary().peak_bytes <= budget_bytes


def test_the_step_before_a_resumption_counts_as_unrecorded() -> None:
    """It ends at the first tensor that the larger forward saves."""
    model, _ = make_model()
    with MemoryBudget("1TiB", CONFIG) as budget:
        train_by_hand(model, [64] * 8 + [512] * 2)
        assert is_recording()
    assert budget.summary().num_steps == 10
    assert budget.summary().num_unrecorded_steps == 5
    assert {step.kept_bytes for step in budget.summary().steps[1:8]} == {budget.summary().steps[1].kept_bytes}


@pytest.mark.parametrize("skipped", [None, 3])
def test_an_optimizer_counts_where_other_hooks_see_what_is_saved(skipped: int | None) -> None:
    """Then no saved tensor shows where a step begins; an optimizer that steps ends the latest one."""
    model, optimizer = make_model()
    with MemoryBudget("1TiB", CONFIG) as budget:
        for index in range(6):
            with torch.autograd.graph.save_on_cpu():
                loss = model(torch.randn(16, WIDTH)).square().mean()
            loss.backward()
            if index % 2 and index != skipped:
                optimizer.step()
                optimizer.zero_grad()
    assert budget.summary().num_steps == (3 if skipped is None else 2)
    assert all(step.had_optimizer for step in budget.summary().steps)


def test_an_optimizer_in_backward_ends_a_pause_after_it() -> None:
    """The recorder comes back when the engine has ended; until then it would be lost."""
    model, _ = make_model()
    optimizers = {parameter: torch.optim.Adam([parameter]) for parameter in model.parameters()}
    num_backwards = 0

    def update(parameter: torch.Tensor) -> None:
        if num_backwards % 8 == 0:
            optimizers[parameter].step()
            parameter.grad = None

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(update)
    with MemoryBudget(peak_of(256) * 2, CONFIG) as budget:
        while is_recording():
            num_backwards += 1
            assert num_backwards < 8
            model(torch.randn(64, WIDTH)).square().mean().backward()
        num_backwards = 8
        model(torch.randn(64, WIDTH)).square().mean().backward()
        assert is_recording()
        before = running_session().counters.num_ops
        model(torch.randn(64, WIDTH))
        assert running_session().counters.num_ops > before
    assert budget.summary().peak_bytes <= budget.summary().budget_bytes


@pytest.mark.parametrize("num_accumulated", [2, 4, 6])
def test_states_of_an_optimizer_that_first_steps_in_a_pause(num_accumulated: int) -> None:
    """They exist already, as after a checkpoint was loaded, but no recorded step had what its step allocates."""
    model, optimizer = make_model()
    train(model, optimizer, [8])
    gc.collect()
    with MemoryBudget("1TiB", CONFIG) as budget:
        model(torch.randn(8, WIDTH)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    budget_bytes = int(0.98 * budget.summary().peak_bytes)

    def accumulate() -> None:
        for _ in range(num_accumulated):
            model(torch.randn(8, WIDTH)).square().mean().backward()
        optimizer.step()

    with MemoryBudget(budget_bytes, CONFIG) as budget, pytest.raises(BudgetError):
        accumulate()
    assert budget.summary().peak_bytes <= budget_bytes


def test_an_optimizer_that_steps_late_is_foreseen_and_does_not_delay_the_next_pause() -> None:
    """Several backwards are accumulated before the first step of the optimizer."""

    def accumulate(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[str]:
        losses = []
        for index in range(24):
            loss = model(torch.randn(16, WIDTH)).square().mean()
            loss.backward()
            if index % 6 == 5:
                optimizer.step()
                optimizer.zero_grad(set_to_none=False)
            losses.append(loss.item().hex())
        return losses

    expected = accumulate(*make_model())
    with MemoryBudget("1TiB", CONFIG) as budget:
        assert accumulate(*make_model()) == expected
        assert not is_recording()
    assert sum(step.had_optimizer for step in budget.summary().steps) == 4
    assert budget.summary().num_steps == 24
    assert budget.summary().num_unrecorded_steps > 12
