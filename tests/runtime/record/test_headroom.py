"""A backward that surely fits is not watched, and only such a one."""

from __future__ import annotations

import pytest
import torch

from tests.runtime.programs import mlp, running
from torchdelta._torch.storages import storage_address
from torchdelta.runtime.record.headroom import Graph, leaves_of


def train(model: torch.nn.Module, x: torch.Tensor) -> None:
    """Run a forward and a backward."""
    model(x).pow(2).sum().backward()
    model.zero_grad()


def test_a_repeated_small_backward_is_left_alone() -> None:
    """From the third step on the backward dispatches nothing to the recorder, and the peak is still told."""
    model, x = mlp(64, 3), torch.randn(64, 64)
    with running() as (_, session):
        counts, peaks = [], []
        for _ in range(4):
            before = session.counters.num_ops
            train(model, x)
            counts.append(session.counters.num_ops - before)
            peaks.append(session.ledger.usage.peak_bytes)
    assert counts[3] < counts[1]
    assert peaks[3] >= peaks[1] > 0


def test_another_shape_is_watched() -> None:
    """The same nodes on a smaller batch: what their ops take inside themselves has yet to be learned."""
    model, large, small = mlp(64, 2), torch.randn(64, 64), torch.randn(32, 64)
    with running() as (_, session):
        counts = []
        for x in (large, large, large, small, large, small, small, small):
            before = session.counters.num_ops
            train(model, x)
            counts.append(session.counters.num_ops - before)
    assert counts[2] < counts[0]
    assert counts[3] == counts[0]
    assert counts[-1] == counts[2]


def test_another_graph_is_watched() -> None:
    """What was measured of one model says nothing of another: its gradients are counted like any."""
    small, other, x = mlp(64, 2), mlp(64, 2), torch.randn(64, 64)
    with running() as (_, session):
        for _ in range(3):
            train(small, x)
        before = session.counters.num_ops
        other(x).pow(2).sum().backward()
        watched = session.counters.num_ops - before
        known = set(session.ledger.records)
        assert all(storage_address(p.grad) in known for p in other.parameters())
        other.zero_grad()
        before = session.counters.num_ops
        train(small, x)
        unwatched = session.counters.num_ops - before
    assert watched > unwatched


def test_an_optimizer_in_backward_is_watched() -> None:
    """A hook that writes parameters between the nodes must be seen, also one that was registered later."""
    model, x = mlp(64, 2), torch.randn(64, 64)

    def step(parameter: torch.Tensor) -> None:
        parameter.data.add_(parameter.grad, alpha=-0.1)

    with running() as (_, session):
        counts = []
        for index in range(5):
            if index == 3:
                for p in model.parameters():
                    p.register_post_accumulate_grad_hook(step)
            before = session.counters.num_ops
            model(x).pow(2).sum().backward()
            counts.append(session.counters.num_ops - before)
            model.zero_grad()
    assert counts[4] > counts[2]


def test_inference_beside_a_living_graph_leaks_nothing() -> None:
    """A teacher under inference_mode, called between a forward and its backward."""
    teacher, w, x = mlp(64, 2), torch.ones(64, 64, requires_grad=True), torch.randn(64, 64)
    with running() as (_, session):
        live = []
        for _ in range(4):
            y = x @ w
            loss = (y * y).sum()
            with torch.inference_mode():
                teacher(x)
            loss.backward()
            w.grad = None
            del loss, y
            live.append(session.ledger.usage.live_bytes)
    assert live[3] == live[1]


def test_a_backward_that_must_bring_back_is_watched() -> None:
    """What has left grows in the backward beyond what was measured when all of it was there."""
    model, x = mlp(64, 6), torch.randn(2048, 64)
    with running() as (budget, session):
        for _ in range(3):
            train(model, x)
        peak_bytes = budget.summary().peak_bytes
    with running(int(0.5 * peak_bytes)) as (budget, session):
        for _ in range(3):
            train(model, x)
        first, second = model(x).pow(2).sum(), model(x).pow(2).sum()
        assert session.counters.num_evictions > 0
        first.backward()
        del first
        before = session.counters.num_ops
        second.backward()
        assert session.counters.num_ops - before > 20
        session.steps.end()
        assert budget.summary().steps[-1].peak_bytes <= budget.budget_bytes
    model.zero_grad()


@pytest.mark.parametrize("way", ["backward", "grad"])
def test_a_backward_to_some_inputs_says_nothing_of_the_whole(way: str) -> None:
    """It runs some nodes only, so the first whole backward of the same graph is watched."""
    model, x = mlp(64, 3), torch.randn(64, 64)
    last = list(model.parameters())[-1]
    with running() as (_, session):
        for _ in range(3):
            loss = model(x).pow(2).sum()
            if way == "backward":
                loss.backward(inputs=[last])
            else:
                torch.autograd.grad(loss, last)
            del loss
        counts = []
        for _ in range(3):
            before = session.counters.num_ops
            train(model, x)
            counts.append(session.counters.num_ops - before)
    assert counts[0] > counts[2]


def test_leaves_come_one_by_one_in_the_order_of_the_whole_walk() -> None:
    """In a deep graph, in a wide one, and in one without leaves."""
    model, x = mlp(64, 3), torch.randn(64, 64)
    deep = model(x).pow(2).sum()
    wide = torch.stack([model(x).sum() * index for index in range(400)]).sum()
    for loss in (deep, wide):
        found, expected = list(leaves_of([loss.grad_fn])), Graph([loss.grad_fn]).leaves
        assert len(found) == 12
        assert all(a is b for a, b in zip(found, expected, strict=True))
    assert list(leaves_of([])) == []
