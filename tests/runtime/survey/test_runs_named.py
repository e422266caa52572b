"""Named budgets that must be enough for what is not seen when they are named, and other budgets that must do."""

from __future__ import annotations

import contextlib
import gc
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.same_bits.judge import bits_of
from torchdelta import BudgetError, Config, MemoryBudget

MIB = 1 << 20


def _blocks() -> nn.Module:
    return nn.Sequential(*(nn.Sequential(nn.Linear(160, 320), nn.GELU(), nn.Linear(320, 160)) for _ in range(6)))


def _with_master_weights(scope: contextlib.AbstractContextManager[Any]) -> bytes:
    """Train in half precision. The optimizer has float32 copies of the parameters, which no backward reaches."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(8))).bfloat16()
    copies = [parameter.detach().float().requires_grad_() for parameter in model.parameters()]
    optimizer = torch.optim.AdamW(copies)
    with scope:
        for _ in range(3):
            model(torch.randn(64, 256, dtype=torch.bfloat16)).square().mean().backward()
            for parameter, copied in zip(model.parameters(), copies, strict=True):
                assert parameter.grad is not None
                copied.grad, parameter.grad = parameter.grad.float(), None
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                for parameter, copied in zip(model.parameters(), copies, strict=True):
                    parameter.copy_(copied)
    return bits_of(list(model.parameters()))


@pytest.mark.parametrize("decision_class", ["saved", "all"])
@pytest.mark.parametrize("budget_bytes", [MIB, 2 * MIB, 7 * MIB, 8 * MIB])
def test_states_of_float32_copies_are_in_the_named_budget(
    budget_bytes: int, decision_class: Any, tmp_path: Path
) -> None:
    """They are made in the optimizer's first step. A budget that is refused before it must name them, too."""
    plain = _with_master_weights(contextlib.nullcontext())
    config = Config(planner=None, decision_class=decision_class, swap_dir=tmp_path)
    named_bytes: list[int] = []
    for _ in range(2):
        gc.collect()
        try:
            assert _with_master_weights(MemoryBudget(named_bytes[-1] if named_bytes else budget_bytes, config)) == plain
            break
        except BudgetError as error:
            named_bytes.append(error.least_budget_bytes)
    assert len(named_bytes) == (1 if decision_class == "saved" or budget_bytes < 7 * MIB else 0)


def test_an_optimizer_that_calls_compiled_code_is_refused_with_a_budget() -> None:
    """The survey that names it does not run the step, in which compiled kernels would get tensors without memory."""

    @torch.compile(backend="eager")
    def scaled(tensor: torch.Tensor) -> torch.Tensor:
        return tensor / (tensor.norm() + 1e-7)

    class Normalizing(torch.optim.Optimizer):
        def __init__(self, params: Any) -> None:
            super().__init__(params, {"lr": 0.01})

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
            del closure
            for parameter in self.param_groups[0]["params"]:
                state = self.state[parameter]
                if not state:
                    state["average"] = torch.zeros_like(parameter)
                state["average"].lerp_(parameter.grad, 0.1)
                parameter.add_(scaled(state["average"]), alpha=-0.01)

    model = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(8)))
    optimizer = Normalizing(model.parameters())

    def train() -> None:
        for _ in range(3):
            model(torch.randn(64, 256)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    with pytest.raises(BudgetError) as raised, MemoryBudget("4800KiB", Config(planner=None)):
        train()
    assert raised.value.least_budget_bytes > 4800 << 10


def test_a_second_model_that_is_loaded_in_the_scope_fits_where_the_first_did() -> None:
    """Its optimizer is made after the search for owners that its loading has caused."""

    def train(scope: contextlib.AbstractContextManager[Any]) -> list[float]:
        torch.manual_seed(0)
        first, losses = _blocks(), []
        with tempfile.TemporaryDirectory() as directory:
            path = Path(directory) / "first.pt"
            torch.save(first.state_dict(), path)
            del first
            with scope:
                for _ in range(3):
                    model = _blocks()
                    model.load_state_dict(torch.load(path), assign=True)
                    optimizer = torch.optim.AdamW(model.parameters())
                    for _ in range(3):
                        loss = model(torch.randn(128, 160)).square().mean()
                        loss.backward()
                        optimizer.step()
                        optimizer.zero_grad()
                        losses.append(loss.item())
        return losses

    plain = train(contextlib.nullcontext())
    gc.collect()
    assert train(MemoryBudget(6500 << 10, Config(decision_class="all", planner=None))) == plain


def test_a_graph_of_the_scope_can_be_used_after_it_where_everything_had_left() -> None:
    """All parameters are back then, so there is no budget that could hold."""

    def train(scope: contextlib.AbstractContextManager[Any]) -> bytes:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Sequential(nn.Linear(512, 512), nn.GELU()) for _ in range(8)))
        optimizer = torch.optim.AdamW(model.parameters())
        with scope:
            for _ in range(2):
                model(torch.randn(512, 512)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            loss = model(torch.randn(512, 512)).square().mean()
        loss.backward()
        return bits_of([parameter.grad for parameter in model.parameters()])

    plain = train(contextlib.nullcontext())
    gc.collect()
    assert train(MemoryBudget("14MiB", Config(decision_class="all", planner=None))) == plain
