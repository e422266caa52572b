"""Steps with the ops of earlier ones, whose inputs differ in what the native tape has to ask about at every capture."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from tests.runtime.parts import running_session
from tests.runtime.record.partly import CHANGES_AT, NUM_LAYERS, ROWS, WIDTH, following
from tests.runtime.record.taped import (
    NUM_STEPS,
    Loop,
    budget_of_usual_steps,
    one_thread_and_the_tape,  # noqa: F401 - a fixture
    outcome,
)
from torchdelta.runtime.current import current_session

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.usefixtures("one_thread_and_the_tape")

MORE_BYTES = 800_000  # for what a step reads beside its usual tensors
NUM_FROZEN = 4


def check(body: Callable[[Loop, int, list[bool]], None]) -> list[bool]:
    """Check that a loop gives plain's bits in a budget. Return which steps used the tape in their forward."""
    used: list[bool] = []

    def run(loop: Loop, index: int) -> None:
        if index == 0:
            used.clear()
            if (session := current_session()) is not None:
                session.pause.forbid()
        body(loop, index, used)

    plain, _ = outcome(run, None)
    seen, _ = outcome(run, budget_of_usual_steps() + MORE_BYTES)
    assert [index for index in range(len(plain)) if plain[index] != seen[index]] == []
    return used


@pytest.mark.parametrize("how", ["from_numpy", "frombuffer", "dlpack"])
def test_memory_outside_of_torch_that_comes_late_is_not_replayed(how: str) -> None:
    """A loader fills its array with the next batch after the forward."""

    def body(loop: Loop, index: int, used: list[bool]) -> None:
        array = np.random.RandomState(index).randn(ROWS, WIDTH).astype("f4")
        mask = torch.from_numpy(array).clone()
        if index >= CHANGES_AT:
            makers = {
                "from_numpy": lambda: torch.from_numpy(array),
                "frombuffer": lambda: torch.frombuffer(array, dtype=torch.float32).view(ROWS, WIDTH),
                "dlpack": lambda: torch.from_dlpack(array),
            }
            mask = makers[how]()
        loss = loop.forward(lambda _layer, x: x * 1.0 + mask * 2.0)
        used.append(loop.is_on_tape())
        if index >= CHANGES_AT:
            array[:] = 7.0
        loss.backward()
        loop.update(loss)

    assert any(check(body)[CHANGES_AT:])


def test_a_parameter_in_memory_outside_of_torch_is_replayed() -> None:
    """A library may load weights so, and does not write them again: the tape takes them."""
    weight = torch.nn.Parameter(torch.from_numpy(np.full((ROWS, WIDTH), 0.5, dtype="f4")), requires_grad=False)

    def body(loop: Loop, index: int, used: list[bool]) -> None:
        del index
        loss = loop.forward(lambda _layer, x: x * 1.0 + weight * 2.0 + weight.t().t())
        used.append(loop.is_on_tape())
        loss.backward()
        loop.update(loss)

    assert all(check(body)[CHANGES_AT:])


def test_constants_that_are_made_without_gradients_are_not_replayed() -> None:
    """As in the forward of a custom Function, which lets C++ fill them."""

    def body(loop: Loop, index: int, used: list[bool]) -> None:
        is_late = index >= CHANGES_AT

        def between(_layer: int, x: torch.Tensor) -> torch.Tensor:
            with torch.set_grad_enabled(not is_late):
                constant = torch.zeros(ROWS, WIDTH)
            constant.numpy()[:] = 3.0 if is_late else 0.0
            return x + constant

        loss = loop.forward(between)
        used.append(loop.is_on_tape())
        loss.backward()
        loop.update(loss)

    assert any(check(body)[CHANGES_AT:])


def _train_with_frozen(budget: int) -> tuple[list[int], dict[str, int]]:
    """Train with parameters that become trainable. Return the peaks of the steps, and why steps diverged."""
    with following(budget):
        session = running_session()
        session.pause.forbid()
        loop = Loop()
        frozen = [torch.nn.Parameter(torch.randn(ROWS, WIDTH), requires_grad=False) for _ in range(NUM_FROZEN)]
        optimizer = torch.optim.SGD(frozen, lr=0.01)

        def between(layer: int, x: torch.Tensor) -> torch.Tensor:
            if layer == NUM_LAYERS - 1:
                for each in frozen:
                    x = each + x
            return x

        for index in range(NUM_STEPS + 2):
            for each in frozen:
                each.requires_grad_(index >= CHANGES_AT)
            loss = loop.forward(between)
            loss.backward()
            loop.update(loss)
            optimizer.step()
            optimizer.zero_grad()
        return [step.peak_bytes for step in session.steps.summaries], dict(session.follower.reasons)


def test_parameters_that_become_trainable_do_not_pass_the_budget() -> None:
    """No op and no saved tensor tells: they are added only. The step is another one all the same."""
    peaks, _ = _train_with_frozen(1 << 30)
    budget = max(peaks[CHANGES_AT // 2 : CHANGES_AT]) + 4096
    peaks, reasons = _train_with_frozen(budget)
    assert max(peaks) <= budget
    assert reasons
