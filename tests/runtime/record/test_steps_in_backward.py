"""Optimizers that step in the backward, as soon as a gradient is complete: such steps are recorded in part, too."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.runtime.parts import running_session
from tests.runtime.record.partly import CHANGES_AT, NUM_LAYERS, ROWS, WIDTH, Stack, following
from tests.runtime.record.taped import one_thread_and_the_tape  # noqa: F401 - a fixture
from tests.same_bits.judge import bits_of, seed_everything
from torchdelta import Config, MemoryBudget

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Make = Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]

pytestmark = [
    pytest.mark.usefixtures("one_thread_and_the_tape"),
]
NUM_STEPS = CHANGES_AT + 4

OPTIMIZERS: dict[str, Make] = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9),
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
    "fused AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, fused=True),
}


def _train(make: Make, num_steps: int, *, shares_weight: bool) -> Iterator[Any]:
    """Yield the bits of each step's loss, and then those of the final state."""
    seed_everything()
    stack = Stack()
    if shares_weight:
        stack.layers[1].weight = stack.layers[3].weight
    optimizers = {parameter: make([parameter]) for parameter in stack.parameters()}

    def step_now(parameter: torch.nn.Parameter) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in stack.parameters():
        parameter.register_post_accumulate_grad_hook(step_now)
    for _ in range(num_steps):
        x = torch.randn(ROWS, WIDTH)
        for layer in range(NUM_LAYERS):
            x = stack.block(layer, x)
        loss = x.square().mean()
        loss.backward()
        yield bits_of(loss)
    yield bits_of([stack.state_dict(), torch.get_rng_state()])


@pytest.mark.parametrize("shares_weight", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_that_step_in_the_backward(name: str, shares_weight: bool) -> None:
    """Replays read the weights as they were in the forward, whichever of them have been stepped meanwhile."""
    plain = list(_train(OPTIMIZERS[name], NUM_STEPS, shares_weight=shares_weight))
    with MemoryBudget("1TiB", Config(tier="memory")) as unlimited:
        list(_train(OPTIMIZERS[name], 3, shares_weight=shares_weight))
    with following(int(unlimited.summary().peak_bytes * 1.02)):
        ours = list(_train(OPTIMIZERS[name], NUM_STEPS, shares_weight=shares_weight))
        partial = running_session().partial
        assert partial.num_steps >= NUM_STEPS - 6
        assert partial.num_resumed <= 1
    assert ours == plain
