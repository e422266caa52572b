"""What an optimizer's first step will allocate is known before it."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

from tests.runtime.programs import mlp, running, same_bits
from torchdelta.runtime.memory.transfers import Transfers
from torchdelta.runtime.survey import first_step as optimizers
from torchdelta.runtime.survey.first_step import foresee_first_step


class Derived(torch.optim.SGD):
    """An optimizer whose step is its base class's, with something before it that a trial must not do."""

    num_steps = 0

    def step(self, closure: Any = None) -> Any:
        """Count, and step."""
        type(self).num_steps += 1
        return super().step(closure)


@pytest.mark.parametrize("make", [torch.optim.SGD, Derived])
def test_the_step_of_a_derived_optimizer_runs_as_often_as_it_is_called(make: type[torch.optim.SGD]) -> None:
    """Nor does `super().step()`, which calls the hooks again, end a step of the scope."""
    torch.optim.SGD([torch.zeros(1)])  # from here on the base class's own step calls the hooks
    Derived.num_steps = 0
    model, x = mlp(16, 2), torch.randn(8, 16)
    optimizer = make(model.parameters(), lr=0.1, momentum=0.9)
    with running() as (budget, _):
        for _ in range(2):
            model(x).sum().backward()
            optimizer.step()
    assert len(budget.summary().steps) == 2
    assert Derived.num_steps == (2 if make is Derived else 0)


def test_states_are_counted() -> None:
    """Two states a parameter for Adam, one with momentum, none without."""
    model = mlp(16, 1)
    size_bytes = sum(parameter.nbytes for parameter in model.parameters())
    assert foresee_first_step(torch.optim.SGD(model.parameters(), lr=0.1))[0] == 0
    assert foresee_first_step(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))[0] == size_bytes
    assert foresee_first_step(torch.optim.Adam(model.parameters()))[0] >= 2 * size_bytes


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_steps_by_lists_have_temporaries_as_large_as_all_parameters(weight_decay: float) -> None:
    """The default on accelerators; parameter by parameter the largest one counts."""
    model = mlp(64, 6)
    total_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
    lists = torch.optim.Adam(model.parameters(), foreach=True, weight_decay=weight_decay)
    state_bytes, temporary_bytes, _ = foresee_first_step(lists)
    assert state_bytes >= 2 * total_bytes
    assert total_bytes <= temporary_bytes <= 2.1 * total_bytes
    momentum = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=True)
    assert foresee_first_step(momentum)[:2] == (total_bytes, 0)
    one_by_one = torch.optim.Adam(model.parameters(), foreach=False, weight_decay=weight_decay)
    assert foresee_first_step(one_by_one)[1] < total_bytes


ESTIMATED = {torch.optim.LBFGS, torch.optim.SparseAdam, torch.optim.ASGD, torch.optim.Adafactor}
CLASSES = [
    each for each in vars(torch.optim).values() if isinstance(each, type) and issubclass(each, torch.optim.Optimizer)
]


@pytest.mark.parametrize("kind", [each for each in CLASSES if each is not torch.optim.Optimizer])
def test_the_first_step_of_each_optimizer_of_torch(kind: Any) -> None:
    """All but four are exact: the states that a real step makes."""
    parameters = [torch.nn.Parameter(torch.randn(32, 32)) for _ in range(3)]
    optimizer = kind(parameters, lr=0.1)
    foreseen = foresee_first_step(optimizer)
    assert foreseen.is_estimate == (kind in ESTIMATED)
    if not foreseen.is_estimate:
        for parameter in parameters:
            parameter.grad = torch.ones(32, 32)
        optimizer.step()
        tensors = [state for each in optimizer.state.values() for state in each.values() if torch.is_tensor(state)]
        assert foreseen.state_bytes == sum(state.nbytes for state in tensors)


def test_foreach_is_the_default_on_accelerators(monkeypatch: pytest.MonkeyPatch) -> None:
    """What torch would choose for the real parameters is tried, and what the user says is stronger."""
    monkeypatch.setattr(optimizers, "default_to_foreach", lambda _parameters: True)
    model = mlp(64, 6)
    total_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
    assert foresee_first_step(torch.optim.AdamW(model.parameters()))[1] >= total_bytes
    assert foresee_first_step(torch.optim.AdamW(model.parameters(), foreach=False))[1] < total_bytes
    assert foresee_first_step(torch.optim.AdamW(model.parameters(), fused=True))[1] < total_bytes


def test_states_of_some_parameters_are_counted() -> None:
    """The first parameter has no gradient, the others have."""
    parameters = [torch.nn.Parameter(torch.zeros(size)) for size in [(64,), (64, 64), (8, 8)]]
    optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    assert foresee_first_step(optimizer, lambda p: p.dim() == 2)[:2] == (4 * (64 * 64 + 8 * 8), 0)


def test_parameters_without_a_gradient_get_no_states() -> None:
    """A step that fits is not refused for states that it does not make."""

    def train() -> tuple[list[torch.Tensor], int]:
        torch.manual_seed(0)
        model, unused, x = mlp(32, 2), torch.nn.Linear(512, 512), torch.randn(8, 32)
        optimizer = torch.optim.Adam([*model.parameters(), *unused.parameters()])
        for _ in range(2):
            model(x).sum().backward()
            optimizer.step()
        return [parameter.detach() for parameter in model.parameters()]

    gc.collect()
    with running() as (budget, _):
        expected = train()
    gc.collect()
    with running((budget.summary().peak_bytes or 0) + (64 << 10)):
        assert same_bits(expected, train())


def test_states_are_counted_before_a_closure_makes_the_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """The step of such an optimizer begins without gradients."""
    model, x = mlp(32, 2), torch.randn(8, 32)
    optimizer = torch.optim.Adam(model.parameters())
    with running() as (_, session):
        requested: list[str] = []
        make = session.room.make

        def noting(size_bytes: int, why: str) -> None:
            requested.append(why)
            make(size_bytes, why)

        monkeypatch.setattr(session.room, "make", noting)

        def closure() -> torch.Tensor:
            loss = model(x).sum()
            loss.backward()
            return loss

        optimizer.step(closure)
    assert "the first step of Adam" in requested


@pytest.mark.parametrize("is_inside", [True, False])
def test_room_for_an_optimizers_states_does_not_end_prefetching(
    monkeypatch: pytest.MonkeyPatch, is_inside: bool
) -> None:
    """A prefetch leaves room for the largest op; no op takes what the whole first step takes."""
    num_fetches = 0
    start_fetch = Transfers.start_fetch

    def counted(self: Transfers, *args: Any) -> Any:
        nonlocal num_fetches
        num_fetches += 1
        return start_fetch(self, *args)

    monkeypatch.setattr(Transfers, "start_fetch", counted)
    model, x = mlp(512, 8), torch.randn(1024, 512)
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    if not is_inside:
        step()
    with running("56MiB", policy="swap-only", planner=None):
        step()
        num_fetches = 0
        step()
    assert num_fetches


@pytest.mark.parametrize("num_optimizers", [1, 2])
def test_a_second_optimizer_of_a_step_is_known_to_the_summary(num_optimizers: int) -> None:
    """The step ends with the first one, and its trace lacks the other's states."""
    model, x = mlp(64, 4), torch.randn(8, 64)
    parameters = list(model.parameters())
    parts = [parameters] if num_optimizers == 1 else [parameters[:2], parameters[2:]]
    stepped = [torch.optim.AdamW(part) for part in parts]
    with running() as (budget, _):
        for _ in range(3):
            model(x).sum().backward()
            for optimizer in stepped:
                optimizer.step()
    assert budget.summary().had_other_optimizers == (num_optimizers == 2)


def test_optimizers_that_step_in_the_backward_are_in_the_first_trace() -> None:
    """One for each parameter: the step is not over when they step."""
    model, x = mlp(64, 4), torch.randn(8, 64)
    for parameter in model.parameters():
        stepped = torch.optim.AdamW([parameter])

        def step(_: torch.Tensor, stepped: torch.optim.Optimizer = stepped) -> None:
            stepped.step()
            stepped.zero_grad()

        parameter.register_post_accumulate_grad_hook(step)
    with running() as (budget, _):
        for _ in range(3):
            model(x).sum().backward()
    assert not budget.summary().had_other_optimizers
