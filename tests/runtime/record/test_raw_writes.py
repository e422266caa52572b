"""Writes in place that are no op: `apply_`, `map_` and `map2_` of tensors, and those of storages."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.runtime.programs import same_bits
from tests.runtime.record.partly import CHANGES_AT, NUM_LAYERS, ROWS, WIDTH, differing_steps
from tests.runtime.record.taped import one_thread_and_the_tape  # noqa: F401 - a fixture
from torchdelta import Config, MemoryBudget

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.runtime.record.partly import Stack, Step

WRITES: dict[str, Callable[[torch.Tensor], object]] = {
    "apply_": lambda x: x.apply_(lambda value: value * 0.5),
    "map_": lambda x: x.map_(torch.ones_like(x), lambda _, other: other),
    "map2_": lambda x: x.map2_(torch.ones_like(x), torch.ones_like(x), lambda value, _, other: value + other),
    "storage.copy_": lambda x: x.untyped_storage().copy_(torch.ones_like(x).untyped_storage()),
    "storage.fill_": lambda x: x.untyped_storage().fill_(1),
    "storage[i] = ": lambda x: x.untyped_storage().__setitem__(3, 7),
}


def _write(name: str, tensor: torch.Tensor) -> None:
    WRITES[name](tensor)


@pytest.mark.parametrize("where", ["in the forward", "after it", "in a hook"])
@pytest.mark.parametrize("is_made", [True, False], ids=["made by an op", "from before"])
@pytest.mark.parametrize("name", WRITES)
@pytest.mark.parametrize("decisions", ["recompute", "swap"])
def test_a_replay_reads_the_content_from_before(name: str, where: str, is_made: bool, decisions: Any) -> None:
    """Also where no op has made it, so that it has to be copied."""

    def train(outside: torch.Tensor) -> list[torch.Tensor]:
        weight = torch.linspace(-1, 1, WIDTH * WIDTH).reshape(WIDTH, WIDTH).requires_grad_()
        read = outside * 0.5 if is_made else outside
        y = (weight.sin() @ weight + read).tanh().sin()
        if where == "in the forward":
            WRITES[name](read)
        z = y.square().cos()
        if where == "after it":
            WRITES[name](read)
        elif where == "in a hook":
            z.register_hook(lambda _: _write(name, read))
        z.sum().backward()
        assert weight.grad is not None
        return [weight.grad, read, outside]

    plain = train(torch.linspace(0, 1, WIDTH * WIDTH).reshape(WIDTH, WIDTH))
    outside = torch.linspace(0, 1, WIDTH * WIDTH).reshape(WIDTH, WIDTH)
    with MemoryBudget("1TiB", Config(decisions=decisions, tier="memory")):
        ours = train(outside)
    assert same_bits(plain, ours)


@pytest.mark.usefixtures("one_thread_and_the_tape")
@pytest.mark.parametrize("in_hook", [False, True], ids=["in the forward", "in a hook"])
@pytest.mark.parametrize("begins_at", [0, CHANGES_AT], ids=["in all steps", "late"])
@pytest.mark.parametrize("name", WRITES)
def test_in_a_training_that_follows_a_plan(name: str, begins_at: int, in_hook: bool) -> None:
    """The steps before a late write are recorded in part, some of them on the native tape."""

    def make_step() -> Step:
        def step(stack: Stack, index: int) -> torch.Tensor:
            read = torch.linspace(0, 1, ROWS * WIDTH).reshape(ROWS, WIDTH)
            x = torch.randn(ROWS, WIDTH)
            for layer in range(NUM_LAYERS):
                x = stack.block(layer, x + read)
                if index >= begins_at and layer == 2:
                    if in_hook:
                        x.register_hook(lambda _: _write(name, read))
                    else:
                        WRITES[name](read)
            return x.square().mean()

        return step

    assert differing_steps(make_step) == []
