"""What an optimizer's first step will allocate is known before it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.runtime.programs import mlp, running
from torchdelta.runtime.survey import first_step as optimizers
from torchdelta.runtime.survey.first_step import foresee_first_step


class Derived(torch.optim.SGD):
    """An optimizer whose step is its base class's, with something before it."""

    num_steps = 0

    def step(self, closure: Any = None) -> Any:
        """Count, and step."""
        type(self).num_steps += 1
        return super().step(closure)


@pytest.mark.parametrize("make", [torch.optim.SGD, Derived])
def test_first_step_of_a_derived_optimizer_is_foreseen_once(make: type[torch.optim.SGD]) -> None:
    """`super().step()` calls the hooks of every optimizer again, for the copy on which the step is tried too."""
    torch.optim.SGD([torch.zeros(1)])  # from here on the base class's own step calls the hooks
    Derived.num_steps = 0
    model, x = mlp(16, 2), torch.randn(8, 16)
    optimizer = make(model.parameters(), lr=0.1, momentum=0.9)
    with running() as (budget, _):
        for _ in range(2):
            model(x).sum().backward()
            optimizer.step()
    assert len(budget.summary().steps) == 2
    assert Derived.num_steps == (4 if make is Derived else 0)  # two real ones, and two trials


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


def test_foreach_is_the_default_on_accelerators(monkeypatch: pytest.MonkeyPatch) -> None:
    """What torch would choose for the real parameters is tried, and what the user says is stronger."""
    monkeypatch.setattr(optimizers, "default_to_foreach", lambda _parameters: True)
    model = mlp(64, 6)
    total_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
    assert foresee_first_step(torch.optim.AdamW(model.parameters()))[1] >= total_bytes
    assert foresee_first_step(torch.optim.AdamW(model.parameters(), foreach=False))[1] < total_bytes
    assert foresee_first_step(torch.optim.AdamW(model.parameters(), fused=True))[1] < total_bytes
