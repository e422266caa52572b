"""Loops that save nothing: how the ops were made is forgotten in time."""

from __future__ import annotations

import gc

import pytest
import torch

from tests.runtime.programs import UNLIMITED, mlp, running, same_bits, train
from torchdelta.runtime.observe import step_draft
from torchdelta.runtime.state.buffer import OpEntry

NUM_OPS = 6_000
MOST_ENTRIES = 5_000


def num_entries() -> int:
    """Count the recorded ops that live."""
    return sum(type(thing) is OpEntry for thing in gc.get_objects())


def idle(num_ops: int) -> torch.Tensor:
    """Run tiny ops with grad mode on, each made from the one before, and save nothing."""
    state = torch.zeros(16)
    for _ in range(num_ops // 2):
        state = state * 0.9 + 1.0
    return state


def trained(num_idle_ops: int, *, first: bool) -> list[torch.Tensor]:
    """Train before or after an idle loop, and return all that training gives."""
    torch.manual_seed(0)
    model, x = mlp(), torch.randn(8, 64)
    observed = [] if first else train(model, x)
    observed.append(idle(num_idle_ops))
    return observed + train(model, x)


def test_recorded_ops_stay_bounded_when_nothing_is_saved() -> None:
    """A long loop with grad mode on keeps no more recorded ops than fit between two cuts, with and without a trace."""
    before = num_entries()
    with running(UNLIMITED):
        state = idle(NUM_OPS)
        assert num_entries() - before < MOST_ENTRIES
        train(mlp(), torch.randn(8, 64))
        later = idle(NUM_OPS)
        assert num_entries() - before < MOST_ENTRIES
    assert torch.equal(state, later)


def test_training_after_an_idle_loop_has_the_same_bits() -> None:
    """What was forgotten is not missed, also where ops are replayed."""
    for first in (True, False):
        plain = trained(NUM_OPS, first=first)
        with running(UNLIMITED, decisions="recompute") as (budget, _):
            ours = trained(NUM_OPS, first=first)
        assert same_bits(plain, ours)
        assert budget.summary().recomputed_bytes > 0


@pytest.mark.parametrize("has_gradients", [True, False])
def test_what_runs_long_before_the_first_step_is_not_in_its_trace(
    monkeypatch: pytest.MonkeyPatch, has_gradients: bool
) -> None:
    """An evaluation or a generation before it makes the trace no longer; what it made is from before the step."""
    most_ops = 2_000
    monkeypatch.setattr(step_draft, "MAX_OPS_WITHOUT_SAVING", most_ops)
    model = mlp()
    with running(UNLIMITED) as (budget, _):
        with torch.set_grad_enabled(has_gradients):
            state = idle(NUM_OPS)
        train(model, state.repeat(8, 4))
        trace = budget.trace()
    assert len(budget.summary().steps) == 2
    assert trace is not None
    assert len(trace.ops) <= most_ops + 100
    assert {buffer.size_bytes for buffer in trace.buffers if buffer.kind == "parameter"} == {
        parameter.nbytes for parameter in model.parameters()
    }


@pytest.mark.parametrize("width", [8, 256])
def test_forwards_without_a_backward_before_the_first_step_are_not_in_its_trace(
    monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    """An evaluation that forgets `no_grad`, of tensors that are too small to leave and of others."""
    most_ops = 1_000
    monkeypatch.setattr(step_draft, "MAX_OPS_WITHOUT_SAVING", most_ops)
    monkeypatch.setattr(step_draft, "MAX_OPS_WITHOUT_HANDLES", most_ops)
    model = torch.nn.Sequential(*[torch.nn.Linear(width, width) for _ in range(10)])
    with running(UNLIMITED) as (budget, _):
        for _ in range(300):
            model(torch.ones(16, width)).sum().item()
        model(torch.ones(16, width)).sum().backward()
    trace = budget.trace()
    assert trace is not None
    assert len(trace.ops) <= most_ops + 100
    assert any(op.phase == "backward" for op in trace.ops)


def test_a_momentum_without_an_optimizer_beside_a_graph_that_is_kept() -> None:
    """The gradients of earlier steps are freed, although there is always a saved tensor."""
    weight, momentum, x = torch.randn(512, 512, requires_grad=True), torch.zeros(512, 512), torch.randn(64, 512)
    held_bytes: list[int] = []
    with running(UNLIMITED) as (_, session):
        kept = (x @ weight).tanh()
        for _ in range(12):
            (x @ weight).tanh().sum().backward()
            assert weight.grad is not None
            with torch.no_grad():
                momentum = 0.9 * momentum + weight.grad
                weight -= 1e-4 * momentum
            weight.grad = None
            held_bytes.append(session.ledger.usage.total_bytes)
        del kept
    assert held_bytes[-1] <= held_bytes[4] + weight.nbytes
