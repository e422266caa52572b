"""Recording pauses or resumes inside `torch.inference_mode`, which restores the thread's dispatch keys at its end."""

from __future__ import annotations

import contextlib
import gc
from typing import TYPE_CHECKING

import pytest
import torch

from tests.runtime.parts import running_session
from tests.runtime.record.partly import CHANGES_AT, NUM_LAYERS
from tests.runtime.record.pausing import CONFIG, WIDTH, is_recording, make_model, peak_of, train
from tests.runtime.record.taped import Loop, one_thread_and_the_tape, same_bits, usual  # noqa: F401 - a fixture
from torchdelta import MemoryBudget
from torchdelta.native.counting import counting_status
from torchdelta.runtime.current import current_session

if TYPE_CHECKING:
    from collections.abc import Callable

    Train = Callable[[], list[str]]

pytestmark = pytest.mark.skipif(not counting_status().is_on, reason="needs the native parts")

NUM_STEPS = 6


def optimizer_inside() -> list[str]:
    """Step the optimizer in inference mode."""
    model, optimizer = make_model()
    losses = []
    for _ in range(NUM_STEPS):
        loss = model(torch.randn(8, WIDTH)).square().mean()
        loss.backward()
        with torch.inference_mode():
            optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item().hex())
    return losses


def steps_inside() -> list[str]:
    """Run each step outside of an inference mode that surrounds the loop, and evaluate in between."""
    model, optimizer = make_model()
    losses = []

    @torch.inference_mode(False)
    def step() -> None:
        with torch.enable_grad():
            losses.extend(train(model, optimizer, [8]))

    with torch.inference_mode():
        for _ in range(NUM_STEPS):
            step()
            losses.append(float(model(torch.randn(4, WIDTH)).sum()).hex())
    losses.append(float(torch.randn(2).sum()).hex())
    return losses


@pytest.mark.parametrize("loop", [optimizer_inside, steps_inside])
def test_a_pause_that_begins_inside(loop: Train) -> None:
    """The next op is no error, and the losses are plain's."""
    expected = loop()
    with MemoryBudget("1TiB", CONFIG) as budget:
        assert loop() == expected
    assert budget.summary().num_unrecorded_steps > 0


@pytest.mark.parametrize("depth", [1, 2])
def test_a_pause_that_ends_inside(depth: int) -> None:
    """An evaluation needs more than the steps do: recording resumes, and a larger step after it holds the budget."""
    batches = [64] * 5 + [1024]
    expected = train(*make_model(), batches)
    budget_bytes = int(peak_of(1024) * 0.8)
    gc.collect()
    with MemoryBudget(budget_bytes, CONFIG) as budget:
        model, optimizer = make_model()
        losses = train(model, optimizer, batches[:5])
        assert not is_recording()
        state = torch.get_rng_state()
        with contextlib.ExitStack() as stack:
            for _ in range(depth):
                stack.enter_context(torch.inference_mode())
            model(torch.randn(1024, WIDTH))
            assert is_recording()
        num_ops = running_session().counters.num_ops
        torch.set_rng_state(state)
        losses += train(model, optimizer, batches[5:])
        assert running_session().counters.num_ops > num_ops
    summary = budget.summary()
    assert losses == expected
    assert summary.peak_bytes <= budget_bytes
    assert summary.swapped_out_bytes + summary.recomputed_bytes > 0


def test_the_patch_ends_with_the_scope() -> None:
    """Inference mode is as it was, and so it is on a thread without a scope."""
    original = torch.inference_mode.__exit__
    with MemoryBudget("1TiB", CONFIG):
        assert torch.inference_mode.__exit__ is not original
    assert torch.inference_mode.__exit__ is original


def optimizer_in_inference_mode(loop: Loop) -> None:
    """Train one step."""
    loss = loop.forward()
    loss.backward()
    with torch.inference_mode():
        loop.update(loss)


def step_in_inference_mode(loop: Loop) -> None:
    """Train one step outside of an inference mode that surrounds it."""
    with torch.inference_mode(), torch.inference_mode(False), torch.enable_grad():
        usual(loop)


@pytest.mark.usefixtures("one_thread_and_the_tape")
@pytest.mark.parametrize("step", [optimizer_in_inference_mode, step_in_inference_mode])
@pytest.mark.parametrize("begins_at", [0, CHANGES_AT])
def test_recording_in_part_that_begins_inside(step: Callable[[Loop], None], begins_at: int) -> None:
    """Always or only later: followed steps use the tape as usual."""

    def body(loop: Loop, index: int) -> None:
        (step if index >= begins_at else usual)(loop)

    counts = same_bits(body)
    assert counts[-1] > counts[CHANGES_AT] > 0


@pytest.mark.usefixtures("one_thread_and_the_tape")
def test_recording_in_part_that_ends_inside() -> None:
    """Another op runs in inference mode in the middle of a forward: Python records the ops behind it."""
    num_ops: list[int] = []

    def note() -> None:
        if current_session() is not None:
            num_ops.append(running_session().counters.num_ops)

    def body(loop: Loop, index: int) -> None:
        def between(layer: int, x: torch.Tensor) -> torch.Tensor:
            if index == CHANGES_AT and layer == 0:
                with torch.inference_mode():
                    x.detach().abs().max()
                note()
            return x

        loss = loop.forward(between)
        if index == CHANGES_AT:
            note()
        loss.backward()
        loop.update(loss)

    assert same_bits(body)[CHANGES_AT - 1] > 0
    assert num_ops[1] - num_ops[0] >= NUM_LAYERS - 1


def test_a_scope_that_stops_inside() -> None:
    """The keys of dispatch modes are off after the block as well: the next op runs."""
    layer, budget = torch.nn.Linear(8, 8), MemoryBudget("1GiB")
    budget.start()
    with torch.inference_mode():
        layer(torch.randn(4, 8))
        budget.stop()
    layer(torch.randn(4, 8)).sum().backward()
    assert layer.weight.grad is not None
