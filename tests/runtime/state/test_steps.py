"""Steps are found in loops that nobody marked."""

from __future__ import annotations

import gc
import types
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from tests.runtime.programs import UNLIMITED, mlp, running
from torchdelta import Config, MemoryBudget
from torchdelta.runtime.state import steps
from torchdelta.runtime.state.buffer import Buffer, OpEntry
from torchdelta.runtime.state.counters import Counters
from torchdelta.runtime.state.instances import instances_of
from torchdelta.runtime.state.ledger import Ledger
from torchdelta.runtime.state.steps import MAX_SUMMARIES, StepTracker

if TYPE_CHECKING:
    from collections.abc import Callable


def model_and_batch() -> tuple[nn.Module, torch.Tensor]:
    """Build what every loop here trains."""
    return mlp(16, 2), torch.randn(4, 16)


def optimizer_loop() -> None:
    """Forward, backward, step, three times."""
    model, x = model_and_batch()
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(3):
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def zero_before_backward() -> None:
    """The same with the gradients zeroed first, in place."""
    model, x = model_and_batch()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad(set_to_none=False)
        loss = model(x).sum()
        loss.backward()
        optimizer.step()


def manual_sgd() -> None:
    """No optimizer at all."""
    model, x = model_and_batch()
    for _ in range(4):
        model(x).sum().backward()
        with torch.no_grad():
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.sub_(parameter.grad, alpha=0.1)
                parameter.grad = None


def manual_sgd_that_retains() -> None:
    """No optimizer, and every backward keeps its graph."""
    model, x = model_and_batch()
    for _ in range(4):
        loss = model(x).sum()
        loss.backward(retain_graph=True)
        with torch.no_grad():
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.data.sub_(parameter.grad, alpha=0.1)
                parameter.grad = None


def functional_gradients() -> None:
    """`autograd.grad` in place of `backward`."""
    model, x = model_and_batch()
    for _ in range(3):
        gradients = torch.autograd.grad(model(x).sum(), list(model.parameters()))
        with torch.no_grad():
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter.sub_(gradient, alpha=0.1)


def gradient_accumulation() -> None:
    """Two optimizer steps of three micro-batches each."""
    model, x = model_and_batch()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        for _ in range(3):
            model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def closure() -> None:
    """LBFGS calls forward and backward inside its step."""
    model, x = model_and_batch()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def evaluate() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).sum()
        loss.backward()
        return loss

    for _ in range(3):
        optimizer.step(evaluate)  # pyright: ignore[reportArgumentType]


def gan() -> None:
    """Discriminator and generator, each with its own optimizer."""
    generator, x = model_and_batch()
    discriminator = mlp(16, 2)
    for_generator = torch.optim.Adam(generator.parameters())
    for_discriminator = torch.optim.Adam(discriminator.parameters())
    for _ in range(2):
        made = generator(x)
        (discriminator(x).mean() - discriminator(made.detach()).mean()).backward()
        for_discriminator.step()
        for_discriminator.zero_grad()
        discriminator(made).mean().backward()
        for_generator.step()
        for_generator.zero_grad()


def one_loss_two_optimizers() -> None:
    """One backward, then each half of the model has its own optimizer."""
    first, x = model_and_batch()
    second = mlp(16, 1)
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.1) for part in (first, second)]
    for _ in range(3):
        second(first(x)).sum().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def evaluation_between() -> None:
    """Forwards without backward make no step, with gradients on or off."""
    model, x = model_and_batch()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            model(x).sum().item()
        model(x).sum().item()
        model.train()


def evaluation_only() -> None:
    """Nothing is trained."""
    model, x = model_and_batch()
    with torch.no_grad():
        for _ in range(3):
            model(x)
    for _ in range(3):
        model(x)


def retained_graph() -> None:
    """Two backwards of one graph are one step."""
    model, x = model_and_batch()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        loss = model(x).sum()
        loss.backward(retain_graph=True)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def double_backward() -> None:
    """A gradient penalty is part of its step."""
    model, x = model_and_batch()
    x.requires_grad_()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        loss = model(x).tanh().sum()
        (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
        (loss + gradient.square().sum()).backward()
        optimizer.step()
        optimizer.zero_grad()


def always_retained_graph() -> None:
    """Every backward keeps its graph."""
    model, x = model_and_batch()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(3):
        model(x).sum().backward(retain_graph=True)
        optimizer.step()
        optimizer.zero_grad()


def gan_that_retains() -> None:
    """The discriminator's backward keeps the graph of the generator for the second one."""
    generator, x = model_and_batch()
    discriminator = mlp(16, 2)
    for_generator = torch.optim.Adam(generator.parameters())
    for_discriminator = torch.optim.Adam(discriminator.parameters())
    for _ in range(2):
        made = generator(x)
        discriminator(made).mean().backward(retain_graph=True)
        for_discriminator.step()
        for_discriminator.zero_grad()
        discriminator(made).mean().backward()
        for_generator.step()
        for_generator.zero_grad()


def two_losses_that_retain() -> None:
    """Two backwards that keep their graphs are one step, when the optimizer steps after both."""
    model, x = model_and_batch()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        hidden = model(x)
        hidden.sum().backward(retain_graph=True)
        hidden.sin().sum().backward(retain_graph=True)
        optimizer.step()
        optimizer.zero_grad()


def checkpointed() -> None:
    """The forward that a checkpoint runs in backward is no new one."""
    model, x = model_and_batch()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for use_reentrant in (False, True, False):
        hidden = torch.utils.checkpoint.checkpoint(model, x.requires_grad_(), use_reentrant=use_reentrant)
        hidden.sum().backward()
        optimizer.step()
        optimizer.zero_grad()


LOOPS: list[tuple[Callable[[], Any], int]] = [
    (optimizer_loop, 3),
    (zero_before_backward, 3),
    (gradient_accumulation, 6),
    (gan, 4),
    (evaluation_between, 3),
    (evaluation_only, 0),
    (retained_graph, 2),
    (double_backward, 2),
    (always_retained_graph, 3),
    (gan_that_retains, 4),
    (two_losses_that_retain, 3),
    (checkpointed, 3),
    (closure, 3),
]


@pytest.mark.parametrize(("loop", "num_steps"), LOOPS, ids=lambda value: getattr(value, "__name__", str(value)))
def test_number_of_steps(loop: Callable[[], Any], num_steps: int) -> None:
    """As the words are defined: a forward and backward each make one, evaluation none, double backward no second."""
    with MemoryBudget(UNLIMITED) as budget:
        loop()
    steps = budget.summary().steps
    assert [step.index for step in steps] == list(range(num_steps))


@pytest.mark.parametrize(
    ("loop", "num_backwards"), [(manual_sgd, 4), (functional_gradients, 3), (manual_sgd_that_retains, 4)]
)
def test_loops_without_an_optimizer(loop: Callable[[], Any], num_backwards: int) -> None:
    """A step ends where the next forward begins; the last one may still be open at the end of the scope."""
    with MemoryBudget(UNLIMITED) as budget:
        loop()
    assert len(budget.summary().steps) in {num_backwards - 1, num_backwards}


@pytest.mark.parametrize("is_held", [False, True])
@pytest.mark.parametrize("width", [16, 64])
def test_nothing_grows_while_graphs_are_kept(width: int, *, is_held: bool) -> None:
    """The trace ends with the first step, and a graph that outlives its step does not keep those before it."""
    model = mlp(width, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    numbers: list[tuple[int, int, int]] = []
    with running() as (budget, session):
        for _ in range(8):
            loss = model(torch.randn(64, width)).sum()
            loss.backward(retain_graph=True)
            optimizer.step()
            optimizer.zero_grad()
            if not is_held:
                del loss
            gc.collect()
            numbers.append((len(instances_of(OpEntry)), len(instances_of(Buffer)), len(session.ledger.records)))
            if len(numbers) == 1:
                trace = budget.trace()
                assert trace is not None
        assert budget.trace() is trace
    assert numbers[3:] == [numbers[3]] * 5
    assert len(budget.summary().steps) == 8


def test_two_optimizers_after_one_backward() -> None:
    """The first optimizer's step ends the step; the second adds none, since no backward is between."""
    with MemoryBudget(UNLIMITED) as budget:
        one_loss_two_optimizers()
    assert len(budget.summary().steps) == 3


def test_step_summaries_add_up() -> None:
    """What the steps did is what the scope did."""
    with running(decisions="swap") as (budget, _):
        optimizer_loop()
    summary = budget.summary()
    assert summary.swapped_out_bytes == sum(step.swapped_out_bytes for step in summary.steps) > 0
    assert summary.peak_bytes == max(step.peak_bytes for step in summary.steps)
    assert summary.stall_s == pytest.approx(sum(step.stall_s for step in summary.steps))
    with running(decisions="recompute") as (budget, _):
        optimizer_loop()
    summary = budget.summary()
    assert summary.recomputed_bytes == sum(step.recomputed_bytes for step in summary.steps) > 0
    assert summary.recompute_s == pytest.approx(sum(step.recompute_s for step in summary.steps))


def test_indices_of_saved_buffers_start_anew_with_each_step() -> None:
    """A decision is looked up by its position in the step."""
    indices: list[int] = []

    def decide(buffer: Any) -> str:
        indices.append(buffer.index)
        return "keep"

    with MemoryBudget(UNLIMITED, Config(decisions=decide)):
        optimizer_loop()
        with torch.no_grad():
            mlp(16, 1)(torch.zeros(1, 16))
        manual_sgd()
    starts = [position for position, index in enumerate(indices) if index == 0]
    assert len(starts) == 3 + 4
    for start, end in zip(starts, [*starts[1:], len(indices)], strict=True):
        assert indices[start:end] == list(range(end - start))


def test_peak_of_a_step_is_its_own() -> None:
    """A large step does not colour the small one after it."""
    model = mlp(16, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with MemoryBudget(UNLIMITED) as budget:
        for batch in (256, 4):
            model(torch.zeros(batch, 16)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    first, second = budget.summary().steps
    assert second.peak_bytes < first.peak_bytes


def test_phases() -> None:
    """Forward, backward and optimizer are told apart from inside."""
    with running() as (_, session):
        seen: list[str] = []
        x = torch.zeros(4, requires_grad=True)
        seen.append(session.steps.phase)
        y = x * 2
        y.register_hook(lambda _: seen.append(session.steps.phase))
        y.sum().backward()
        optimizer = torch.optim.SGD([x], lr=0.1)
        original = optimizer.zero_grad
        handle = optimizer.register_step_pre_hook(lambda *_: seen.append(session.steps.phase))
        optimizer.step()
        handle.remove()
        original()
        seen.append(session.steps.phase)
    assert seen[:2] == ["forward", "backward"]
    assert seen[-1] == "forward"


def test_summaries_of_long_runs_are_bounded() -> None:
    """Beyond a thousand steps only the last one is kept, with its true index."""
    tracker = StepTracker(Ledger("cpu"), Counters())
    for _ in range(MAX_SUMMARIES + 5):
        tracker.on_backward_end(keeps_graph=False)
        tracker.on_optimizer_start()
        tracker.on_optimizer_end()
    assert tracker.num_steps == MAX_SUMMARIES + 5
    assert len(tracker.summaries) == MAX_SUMMARIES
    assert tracker.summaries[-1].index == MAX_SUMMARIES + 4


@pytest.mark.parametrize("first", ["skipped", "stepped", "stepped late"])
def test_whether_the_first_step_had_an_optimizer_is_known_for_ever(first: str) -> None:
    """A GradScaler may skip it. Its own summary is gone after 10,000 steps."""
    tracker = StepTracker(Ledger("cpu"), Counters())
    tracker.on_backward_end(keeps_graph=False)
    if first != "stepped":
        tracker.end_early()
    if first != "skipped":
        tracker.on_optimizer_end()
    for _ in range(MAX_SUMMARIES + 5):
        tracker.on_backward_end(keeps_graph=False)
        tracker.on_optimizer_start()
        tracker.on_optimizer_end()
    assert tracker.first_had_optimizer == (first != "skipped")


def test_micro_batches_say_which_step_they_belong_to() -> None:
    """Under accumulation the last of each step's micro-batches had the optimizer; without an optimizer none has."""
    with MemoryBudget(UNLIMITED) as budget:
        gradient_accumulation()
    summary = budget.summary()
    found = [(step.optimizer_step, step.had_optimizer) for step in summary.steps]
    assert summary.num_steps == len(found)
    assert summary.num_optimizer_steps == sum(had for _, had in found) < len(found)
    assert [number for number, _ in found] == sorted(number for number, _ in found)
    assert [number for number, had in found if had] == list(range(summary.num_optimizer_steps))
    with MemoryBudget(UNLIMITED) as budget:
        manual_sgd()
    assert (budget.summary().num_steps, budget.summary().num_optimizer_steps) == (4, 0)


def test_start_of_the_script_is_not_in_the_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first step begins at its first saved tensor; an evaluation before it is still the start."""
    now_s = [0.0]
    monkeypatch.setattr(steps, "time", types.SimpleNamespace(perf_counter=lambda: now_s[0]))
    tracker = StepTracker(Ledger("cpu"), Counters())

    def after(duration_s: float, event: Callable[[], None]) -> None:
        now_s[0] += duration_s
        event()

    after(5, tracker.on_save)  # an evaluation with gradients, whose graph is thrown away
    after(2, tracker.on_abandoned)
    after(3, tracker.on_save)
    for _ in range(2):
        after(1, tracker.on_save)
        after(1, lambda: tracker.on_backward_end(keeps_graph=False))
        after(1, tracker.on_optimizer_end)
    after(1, tracker.on_abandoned)  # later, an evaluation is part of the step around it
    after(1, tracker.on_save)
    after(1, lambda: tracker.on_backward_end(keeps_graph=False))
    after(1, tracker.on_optimizer_end)
    assert tracker.startup_s == 10
    assert [step.time_s for step in tracker.summaries] == [3, 3, 4]
