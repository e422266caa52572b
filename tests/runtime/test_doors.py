"""The doors that a scope puts into torch: compiled calls keep all their arguments, others keep their own patches."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from tests.runtime.parts import engine_door, set_engine_door
from tests.runtime.programs import UNLIMITED
from torchdelta import Config, MemoryBudget

if TYPE_CHECKING:
    from collections.abc import Callable


class Keywords(nn.Module):
    """A module whose arguments have any names."""

    def forward(self, x: Any, **others: Any) -> Any:
        """Add up."""
        return x * 2 + sum(others.values())


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["original", "function", "args", "inputs", "given", "kwargs"])
def test_arguments_of_a_compiled_module_may_have_any_name(name: str) -> None:
    """No name of an argument clashes with one inside the library."""
    module, x = torch.compile(Keywords(), backend="eager"), torch.ones(3)
    plain = module(x, **{name: x})
    with MemoryBudget(UNLIMITED):
        ours = module(x, **{name: x})
    assert torch.equal(ours, plain)


class WritesState(nn.Module):
    """A module that writes a tensor which lies somewhere in its arguments."""

    def forward(self, inputs: Any, state: Any = None) -> Any:
        """Write the last tensor, return a function of the first."""
        if isinstance(inputs, dict):
            first, written = inputs["x"], inputs["state"]
        elif isinstance(inputs, list | tuple):
            first, written = inputs[0], inputs[-1] if state is None else state
        else:
            first, written = inputs, state
        written.add_(1)
        return first * 2


CALLS: dict[str, Callable[[Any, torch.Tensor, torch.Tensor], Any]] = {
    "positional": lambda module, x, state: module(x, state),
    "keyword": lambda module, x, state: module(x, state=state),
    "beside a list": lambda module, x, state: module([x], state),
    "in a list": lambda module, x, state: module([x, state]),
    "in a tuple": lambda module, x, state: module((x, state)),
    "in a dict": lambda module, x, state: module({"x": x, "state": state}),
    "after a list, by keyword": lambda module, x, state: module([x], state=state),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CALLS)
def test_what_compiled_code_writes_is_seen_wherever_it_is(name: str) -> None:
    """A result that a replay reads is written by compiled code: the replay makes it again and does not read garbage."""
    module = torch.compile(WritesState(), backend="eager")

    def step() -> list[torch.Tensor]:
        torch.manual_seed(0)
        weight = torch.randn(64, 64, requires_grad=True)
        x = torch.ones(3, 3)
        state = weight.detach() * 3  # a replay of what follows reads it
        y = (weight * state.sin()).sin()
        with torch.no_grad():
            out = CALLS[name](module, x, state)
        y.sum().backward()
        assert weight.grad is not None
        return [weight.grad, out, state]

    plain = step()
    with MemoryBudget(UNLIMITED, Config(decisions="recompute")):
        ours = step()
    assert all(map(torch.equal, ours, plain))


class Other:
    """Another library that puts itself into the door to the engine."""

    def __init__(self) -> None:
        self.calls = 0
        self._below: Any = None

    def put_on(self) -> None:
        """Patch."""
        self._below = engine_door()
        set_engine_door(self)

    def run_backward(self, *args: Any, **kwargs: Any) -> Any:
        """Count the call, and pass it on."""
        self.calls += 1
        return self._below.run_backward(*args, **kwargs)

    def take_off(self) -> None:
        """Put back what was there."""
        set_engine_door(self._below)


def train() -> torch.Tensor:
    """Return the gradient of a small step."""
    x = torch.arange(4.0, requires_grad=True)
    (x * x).sum().backward()
    assert x.grad is not None
    return x.grad


@pytest.fixture
def engine() -> Any:
    """Put torch's own door back after the test."""
    door = engine_door()
    yield door
    set_engine_door(door)


def test_a_patch_of_another_library_survives_the_end_of_a_scope(engine: Any) -> None:
    """It was put on inside the scope, works there, and is still called afterwards and in later scopes."""
    other, plain = Other(), train()
    with MemoryBudget(UNLIMITED):
        other.put_on()
        assert torch.equal(train(), plain)
    assert engine_door() is other
    assert torch.equal(train(), plain)
    for _ in range(3):
        with MemoryBudget(UNLIMITED) as budget:
            assert torch.equal(train(), plain)
        assert len(budget.summary().steps) == 1
        assert engine_door() is other
    assert other.calls == 5
    other.take_off()
    with MemoryBudget(UNLIMITED):
        assert torch.equal(train(), plain)
    assert engine_door() is engine


def test_a_backward_that_the_program_starts_at_the_engine_ends_a_step() -> None:
    """It passes through the door, like any other."""
    with MemoryBudget(UNLIMITED) as budget:
        for _ in range(3):
            x = torch.arange(4.0, requires_grad=True)
            engine_door().run_backward(((x * x).sum(),), (torch.ones(()),), False, False, accumulate_grad=True)
            assert x.grad is not None
            assert x.grad.tolist() == [0.0, 2.0, 4.0, 6.0]
    assert len(budget.summary().steps) == 3


def test_layers_do_not_pile_up(engine: Any) -> None:
    """A library that patches in every scope, and takes its patch off after it, leaves the door as it was."""
    for _ in range(20):
        other = Other()
        with MemoryBudget(UNLIMITED):
            other.put_on()
        other.take_off()
        with MemoryBudget(UNLIMITED):
            train()
        assert engine_door() is engine


def test_a_patch_of_storages_survives_the_end_of_a_scope() -> None:
    """`UntypedStorage.resize_`, which is inherited, is another library's own as long as it likes."""
    below = torch.UntypedStorage.resize_
    with MemoryBudget(UNLIMITED):
        ours = torch.UntypedStorage.resize_

        def mine(storage: Any, size_bytes: int) -> Any:
            return ours(storage, size_bytes)

        torch.UntypedStorage.resize_ = mine
    assert torch.UntypedStorage.resize_ is mine
    torch.UntypedStorage.resize_ = ours
    with MemoryBudget(UNLIMITED):
        assert torch.ones(4).untyped_storage().resize_(64).nbytes() == 64
    assert torch.UntypedStorage.resize_ is below
    assert "resize_" not in vars(torch.UntypedStorage)
