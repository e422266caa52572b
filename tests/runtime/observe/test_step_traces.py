"""Which step is traced, what an error in the tracing does, and what is left afterwards."""

from __future__ import annotations

import gc
import logging
import threading
import weakref
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.runtime.observe.traced import Program
from tests.runtime.parts import running_session
from tests.runtime.programs import mlp, running
from torchdelta import Config, MemoryBudget
from torchdelta.errors import ScopeError
from torchdelta.native.counting import counting_status
from torchdelta.runtime.observe import step_draft, step_traces, trace_builder
from torchdelta.runtime.observe.draft import Draft
from torchdelta.runtime.state.observer import Observer


def test_first_complete_step_is_traced_and_no_other() -> None:
    """There is no trace before the first step has ended; the following steps leave it alone and cost nothing."""
    program = Program("resnet", "sgd")
    budget = MemoryBudget("1TiB", Config(tier="memory"))
    with pytest.raises(ScopeError, match="no trace"):
        budget.trace()
    with budget:
        session = running_session()
        loss = program.loss(program.model)
        builder = weakref.ref(session.ledger.observing.observer)
        with pytest.raises(ScopeError, match="one complete training step"):
            budget.trace()
        loss.backward()
        assert session.trace() is None
        program.optimizer.step()
        trace = session.trace()
        assert trace is budget.trace()
        assert session.ledger.observing.observer.__class__ is Observer
        assert builder() is None, "the builder goes with its step"
        program.step()
        assert budget.trace() is trace
    assert budget.trace() is trace


def test_loop_without_an_optimizer_is_traced_up_to_its_stop() -> None:
    """A single forward and backward is a step as well."""
    model = mlp()
    with running() as (budget, _):
        model(torch.randn(8, 64)).sum().backward()
    assert {op.phase for op in budget.trace().ops} == {"forward", "backward"}


def test_evaluation_is_no_step() -> None:
    """A scope in which nothing is trained has no trace."""
    model = mlp()
    with running() as (budget, _), torch.no_grad():
        model(torch.randn(8, 64))
    with pytest.raises(ScopeError):
        budget.trace()


def test_tracing_that_fails_breaks_nothing(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """An error inside the tracing drops the trace and says so once; the training goes on with the same bits."""

    def fail(*_: object) -> None:
        raise ZeroDivisionError

    plain, traced = Program("gpt2", "sgd"), Program("gpt2", "sgd")
    torch.manual_seed(1)
    plain.step()
    monkeypatch.setattr(Draft, "overwritten", fail)
    caplog.set_level(logging.WARNING, "torchdelta")
    torch.manual_seed(1)
    with running() as (budget, session):
        traced.step()
        assert session.ledger.observing.observer.__class__ is Observer
    assert [record.message for record in caplog.records] == ["the trace of a step was dropped: ZeroDivisionError: "]
    for expected, found in zip(plain.model.parameters(), traced.model.parameters(), strict=True):
        assert torch.equal(expected, found)
    with pytest.raises(ScopeError):
        budget.trace()


def test_invalid_trace_is_dropped(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """What does not pass the validator is no trace."""
    monkeypatch.setattr(Draft, "sources_of_sum", lambda *_: [10**6])
    weight, x = torch.randn(16, 16, requires_grad=True), torch.randn(8, 16)
    with running() as (budget, _):
        ((x @ weight).relu() + x @ weight).sum().backward()
    assert ["unknown buffer 1000000" in record.message for record in caplog.records] == [True]
    with pytest.raises(ScopeError):
        budget.trace()


def test_endless_forward_is_given_up(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Tracing a scope that does not train does not grow for ever."""
    monkeypatch.setattr(step_draft, "MAX_OPS", 20)
    x = torch.randn(4)
    with running() as (_, session):
        for _ in range(30):
            x = x + 1
        assert session.ledger.observing.observer.__class__ is Observer
    assert len(caplog.records) == 1


def test_traced_step_holds_nothing() -> None:
    """What the program drops during the traced step is freed at once, and afterwards all is as before."""
    x = torch.randn(64, 64)
    gc.collect()
    gc.disable()
    try:
        with running() as (_, session):
            before_bytes = session.ledger.usage.live_bytes
            y = (x * 2).relu()
            reference = weakref.ref(y.untyped_storage())
            assert session.ledger.usage.live_bytes == before_bytes + x.nbytes
            del y
            assert reference() is None
            assert session.ledger.usage.live_bytes == before_bytes
    finally:
        gc.enable()


def test_time_outside_of_ops_is_logged_without_what_the_budget_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading data counts, before a step and inside it; waiting for room does not."""
    program = Program("resnet", "sgd")
    with running() as (_, session):
        program.step()
        clock_s = 0.0
        for module in (step_traces, step_draft):
            monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: clock_s))
        session.traces.begin_later()
        clock_s += 100.0
        session.traces.begin()
        builder = session.ledger.observing.observer
        assert isinstance(builder, step_draft.StepDraft)
        program.loss(program.model)
        clock_s += 20.0
        session.counters.stall_s += 15.0
        program.loss(program.model)
        session.counters.stall_s += 1000.0  # not in one pause, but in many short ones
        clock_s += 3.0
        program.loss(program.model)
        assert builder.finish() is not None
    assert builder.log().outside_s == pytest.approx(105.0, abs=1.0)


@pytest.mark.skipif(not counting_status().is_on, reason="needs the counter at the allocator")
@pytest.mark.parametrize("by", ["thread", "numpy"])
def test_the_trace_of_a_later_step_counts_nothing_that_its_thread_neither_made_nor_used(by: str) -> None:
    """Memory of another thread, or of NumPy, counts from the first op that uses it."""
    kept: list[torch.Tensor] = []

    def allocate() -> None:
        kept.append(torch.from_numpy(np.zeros(50_000_000, np.float32)) if by == "numpy" else torch.zeros(50_000_000))

    def step() -> None:
        model(x).square().mean().backward()
        model.zero_grad()

    model, x = mlp(512, 8), torch.randn(2048, 512)
    with MemoryBudget("64MiB", Config(planner="torchdelta", tier="memory")) as budget:
        step()
        if by == "numpy":
            allocate()
        else:
            thread = threading.Thread(target=allocate)
            thread.start()
            thread.join()
        for _ in range(3):
            step()
    summary = budget.summary()
    assert summary.num_steps == 4
    assert summary.evicted, "steps that fit are not traced"
    assert summary.peak_bytes <= 64 << 20


def test_of_many_storages_of_unknown_origin_all_lives_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """After each op, a part of them is looked at: the lives of the others end some ops late."""
    kept = [torch.from_numpy(np.ones((64, 64), np.float32)) for _ in range(8)]

    def forward() -> torch.Tensor:
        total = torch.zeros((), requires_grad=True)
        for number in range(24):
            known = kept[number // 3] if number % 3 == 0 else torch.from_numpy(np.ones((64, 64), np.float32))
            total = total + (known * 2.0).sum()
        return total

    late: list[int] = []
    for most in (32, 4):
        monkeypatch.setattr(trace_builder, "_MOST_LOOKED_AT", most)
        with running() as (budget, _):
            forward().backward()
        trace = budget.trace()
        external = [buffer for buffer in trace.buffers if buffer.size_bytes == 64 * 64 * 4 and buffer.birth_op >= 0]
        late.append(sum(buffer.death_op - buffer.birth_op for buffer in external))
        assert sum(buffer.death_op == len(trace.ops) for buffer in external) <= 8
    assert late[0] <= late[1] <= late[0] + 24 * 24
