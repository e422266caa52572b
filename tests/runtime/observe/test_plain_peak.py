"""What a step would need without a budget, and why: computed from the trace of the first one."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import nn

from tests.runtime.programs import UNLIMITED, mlp, running
from torchdelta import MemoryBudget, Summary
from torchdelta.runtime.observe.plain_peak import find_plain_peak
from torchdelta.trace.model import Buffer, Header, Op, Trace


def train(budget: int | str, optimizer_class: Any, *, num_steps: int = 3) -> Summary:
    """Train a perceptron within a budget."""
    torch.manual_seed(0)
    model = mlp(64, 6)
    optimizer = optimizer_class(model.parameters())
    x = torch.randn(512, 64)
    with running(budget) as (memory_budget, _):
        for _ in range(num_steps):
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return memory_budget.summary()


@pytest.mark.parametrize("optimizer_class", [torch.optim.SGD, torch.optim.AdamW])
def test_within_the_named_budget_nothing_leaves(optimizer_class: Any) -> None:
    """Asked of a step from which tensors left, it names the budget in which none does, and hardly more."""
    free = train(UNLIMITED, optimizer_class)
    tight = train(int(free.peak_bytes * 0.7), optimizer_class)
    assert tight.evicted
    assert tight.plain_peak is not None
    assert tight.plain_peak.size_bytes <= 1.02 * free.peak_bytes
    assert not train(int(1.01 * tight.plain_peak.size_bytes), optimizer_class).evicted


def test_moment_is_named() -> None:
    """The op, the module and what is alive: groups add up, and the module that saves the most comes first."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"small": nn.Linear(32, 32), "large": nn.Sequential(nn.Linear(32, 2048), nn.GELU())})
    with MemoryBudget(UNLIMITED) as budget:
        model["large"](model["small"](torch.randn(64, 32))).sum().backward()
    found = budget.summary().plain_peak
    assert found is not None
    assert sum(found.groups.values()) == found.size_bytes
    assert found.size_bytes == pytest.approx(budget.summary().peak_bytes, rel=0.01)
    assert {"saved tensors", "parameters"} <= set(found.groups)
    assert found.largest_modules
    assert list(found.largest_modules.values()) == sorted(found.largest_modules.values(), reverse=True)
    assert found.phase in {"forward", "backward"}
    assert bool(found.node) == (found.phase == "backward")


def test_states_that_the_first_step_makes_count_once_and_from_the_beginning() -> None:
    """Later steps find them there; the versions that the optimizer writes are the same memory."""
    trace = Trace(
        header=Header(torch_version="2.13.0", device="cpu", created_by="test"),
        ops=(
            Op(index=0, name="aten.mm.default", phase="forward", module="layer", writes=(0,)),
            Op(index=1, name="aten.zeros.default", phase="optimizer", writes=(1,)),
            Op(index=2, name="aten.add_.Tensor", phase="optimizer", reads=(1,), writes=(2,)),
        ),
        buffers=(
            Buffer(id=0, storage_id=0, size_bytes=1000, kind="activation", birth_op=0, death_op=1, saved=True),
            Buffer(id=1, storage_id=1, size_bytes=100, kind="optimizer_state", birth_op=1, death_op=2),
            Buffer(id=2, storage_id=1, size_bytes=100, kind="optimizer_state", birth_op=2, death_op=3),
        ),
    )
    found = find_plain_peak(trace)
    assert (found.size_bytes, found.op, found.module) == (1100, "aten.mm.default", "layer")
    assert found.groups == {"saved tensors": 1000, "optimizer states": 100}
    assert found.largest_modules == {"layer": 1000}


def test_layers_are_added_up() -> None:
    """Of a model with many layers it says which module of each of them takes the most, not which layer."""
    torch.manual_seed(0)
    layers = (OrderedDict(wide=nn.Linear(32, 512), act=nn.Tanh(), back=nn.Linear(512, 32)) for _ in range(4))
    model = nn.Sequential(OrderedDict(h=nn.Sequential(*map(nn.Sequential, layers)), head=nn.Linear(32, 32)))
    with MemoryBudget(UNLIMITED) as budget:
        model(torch.randn(64, 32)).square().sum().backward()
    found = budget.summary().plain_peak
    assert found is not None
    assert list(found.largest_modules) == ["h.*.act", "h.*.back"]
    assert found.largest_modules["h.*.act"] == 4 * 64 * 512 * 4


def test_is_found_once_and_not_before_the_first_step() -> None:
    """A log that asks in every step does not pay for it again."""
    with MemoryBudget(UNLIMITED) as budget:
        assert budget.summary().plain_peak is None
        mlp()(torch.randn(4, 64)).sum().backward()
    assert budget.summary().plain_peak is budget.summary().plain_peak is not None
