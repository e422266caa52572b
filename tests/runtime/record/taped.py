"""Loops whose steps use the native tape, and what they compute beside plain ones."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.runtime.record.partly import CHANGES_AT, MARGIN, NUM_LAYERS, ROWS, WIDTH, Stack, following, num_native_steps
from tests.same_bits.judge import bits_of, seed_everything
from torchdelta import Config, MemoryBudget
from torchdelta.errors import NativeError
from torchdelta.native.gate import load_gate
from torchdelta.native.tape import load_tape
from torchdelta.runtime.current import current_session

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Seen = list[Any]

NUM_STEPS = CHANGES_AT + 4
_MOST_TRIES = 3


@pytest.fixture
def one_thread_and_the_tape() -> Iterator[None]:
    """Skip where there is no tape; train on one thread."""
    for module in (load_gate(), load_tape()):
        if isinstance(module, NativeError):
            pytest.skip(str(module))
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


class Loop:
    """Trains a stack; a test says what else happens in a step."""

    def __init__(self) -> None:
        seed_everything()
        self.stack = Stack()
        self.optimizer = torch.optim.SGD(self.stack.parameters(), lr=0.01, momentum=0.9)
        self.read = torch.randn(ROWS, WIDTH)
        self.seen: Seen = []

    def forward(self, between: Callable[[int, torch.Tensor], torch.Tensor] = lambda _layer, x: x) -> torch.Tensor:
        """Return the loss; `between` runs after each layer."""
        x = torch.randn(ROWS, WIDTH)
        for layer in range(NUM_LAYERS):
            x = between(layer, self.stack.block(layer, x + self.read))
        return x.square().mean()

    def is_on_tape(self) -> bool:
        """Return whether the running step uses the tape."""
        session = current_session()
        native = session.partial.lane if session is not None else None
        return native is not None and native.is_on

    def update(self, loss: torch.Tensor) -> None:
        """Step the optimizer, and note what it came from."""
        self.seen.append(bits_of([loss, *(parameter.grad for parameter in self.stack.parameters())]))
        self.optimizer.step()
        self.optimizer.zero_grad()


def usual(loop: Loop) -> None:
    """Train one step."""
    loss = loop.forward()
    loss.backward()
    loop.update(loss)


def outcome(body: Any, budget: int | None, num_steps: int = NUM_STEPS) -> tuple[Seen, list[int]]:
    """Return the bits of all steps, and how many steps had used the tape after each."""
    counts: list[int] = []

    def train() -> Seen:
        loop = Loop()
        for index in range(num_steps):
            body(loop, index)
            counts.append(num_native_steps() if budget is not None else 0)
        return [*loop.seen, bits_of(loop.stack.state_dict()), bits_of(torch.get_rng_state())]

    if budget is None:
        return train(), counts
    with following(budget):
        return train(), counts


def budget_of_usual_steps() -> int:
    """Return a budget just above the plain peak of such steps."""
    loop = Loop()
    with MemoryBudget("1TiB", Config(tier="memory")) as unlimited:
        for _ in range(2):
            usual(loop)
    return int(unlimited.summary().peak_bytes * MARGIN)


def same_bits(body: Any, *, num_steps: int = NUM_STEPS) -> list[int]:
    """Check that a loop gives plain's bits in a budget. Return how many steps had used the tape after each.

    Where no step has used it, the loop runs again. That happened once in CI, and its cause is not known.
    """
    plain, _ = outcome(body, None, num_steps)
    counts: list[int] = []
    for _ in range(_MOST_TRIES):
        gc.collect()
        seen, counts = outcome(body, budget_of_usual_steps(), num_steps)
        assert [index for index in range(len(plain)) if plain[index] != seen[index]] == []
        if counts[-1]:
            break
    return counts
