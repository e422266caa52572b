"""Replay: right, checked, priced, and without leftovers."""

from __future__ import annotations

import contextlib
import gc
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from tests.runtime.parts import buffer_of, scoped_library
from tests.runtime.programs import UNLIMITED, mlp, running
from torchdelta import Config, MemoryBudget
from torchdelta._torch.modes import Quietly
from torchdelta.errors import ReplayError
from torchdelta.runtime.memory.candidates import LEAST_BYTES
from torchdelta.runtime.memory.costs import resident
from torchdelta.runtime.policies.base import Action
from torchdelta.runtime.state.contents import WRAPPED_NUMBER_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable

    from torchdelta.runtime.session import Session
    from torchdelta.runtime.state.buffer import Buffer


def impure(buffer: Buffer, func: Any) -> None:
    """Make the op of a buffer give something else the next time."""
    assert buffer.op is not None
    buffer.op.func = func


@pytest.mark.parametrize("verify", ["first-step", None])
def test_impure_op_is_found_out_by_verifying(verify: str | None) -> None:
    """With `verify` the replay is compared with what was dropped, and the error names the op.

    Without it nobody looks.
    """
    x = torch.randn(64, 64, requires_grad=True)
    with running(verify=verify) as (_, session):
        y = x * 2
        total, buffer = y.sin().sum(), buffer_of(session, y)
        del y
        impure(buffer, torch.ops.aten.add.Tensor)
        session.room.evict(buffer, Action.RECOMPUTE)
        if verify is None:
            total.backward()
        else:
            with pytest.raises(ReplayError, match=r"aten\.mul\.Tensor.*other values.*keep"):
                total.backward()


def test_verifying_lasts_one_step() -> None:
    """The first step is hashed and passes; from the second on nothing is."""
    model, x = mlp(64, 2, dropout=0.1), torch.randn(64, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with running(decisions="recompute", verify="first-step") as (budget, session):
        assert session.room.digests
        model(x).sum().backward()
        optimizer.step()
        assert not session.room.digests
        optimizer.zero_grad()
        model(x).sum().backward()
    assert budget.summary().num_recomputed_ops > 0


def test_replay_of_another_size_is_always_refused() -> None:
    """Also without verifying."""
    x = torch.randn(64, 64, requires_grad=True)
    with running() as (_, session):
        y = x * 2
        total, buffer = y.sin().sum(), buffer_of(session, y)
        del y
        impure(buffer, lambda a, b: torch.ops.aten.mul.Tensor(a[:3], b).clone())
        session.room.evict(buffer, Action.RECOMPUTE)
        with pytest.raises(ReplayError, match=r"aten\.mul\.Tensor gave 768 bytes, but its first run gave 16384"):
            total.backward()


@pytest.mark.parametrize("verify", ["first-step", None])
def test_custom_ops_run_once(verify: str | None) -> None:
    """A custom op is never recomputed, whatever was decided: it may be anything."""
    num_calls = 0

    def count(x: torch.Tensor) -> torch.Tensor:
        nonlocal num_calls
        num_calls += 1
        return x * num_calls

    class Counted(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            out = torch.ops.torchdelta_replay.counted(x)
            ctx.save_for_backward(out)
            return out

        @staticmethod
        def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
            return grads[0] * ctx.saved_tensors[0]

    x = torch.randn(64, 64, requires_grad=True)
    with scoped_library("torchdelta_replay", "DEF") as library:
        library.define("counted(Tensor x) -> Tensor")
        library.impl("counted", count, "CompositeExplicitAutograd")
        with running(decisions="recompute", verify=verify):
            (Counted.apply(x * 2).sin() * 3).sum().backward()
    assert num_calls == 1
    assert x.grad is not None
    assert torch.equal(x.grad, ((x * 2).cos() * 3 * (x * 2) * 2).detach())


def test_source_changed_outside_of_the_scope_is_refused() -> None:
    """A replay that would read what nobody recorded must not happen silently."""
    weight = torch.randn(64, 64)
    x = torch.randn(64, 64, requires_grad=True)
    with running(decisions="recompute"):
        total = (x + weight).sin().sum()
    weight.add_(1)
    with pytest.raises(ReplayError, match="changed in place by code"):
        total.backward()


@pytest.mark.parametrize("decision_class", ["saved", "all"])
def test_source_written_by_an_op_while_it_was_saved_is_read_again(decision_class: Any) -> None:
    """Autograd counts an op's write after the op. What is recorded for the new content counts it, too."""
    weight = torch.randn(64, 64, requires_grad=True)
    with running(decision_class=decision_class, planner=None, policy="recompute-only") as (_, session):
        with torch.no_grad():
            x = torch.randn(64, 64) * 2
        saved = x @ weight
        with torch.no_grad():
            x.mul_(0.5).add_(1)
        total = (x + 1).sin().sum()
        y = ((x + 1) @ weight).sum() + total
        session.room.evict_all()
        y.backward()
        assert session.counters.num_recomputed_ops
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            saved.sum().backward()
    assert weight.grad is not None
    assert torch.equal(weight.grad, (x + 1).t() @ torch.ones(64, 64))


@pytest.mark.parametrize("through_data", [False, True], ids=["itself", "its data"])
@pytest.mark.parametrize("reads", [False, True], ids=["written before", "written after"])
def test_source_written_by_an_op_and_then_outside_of_the_scope_is_refused(*, reads: bool, through_data: bool) -> None:
    """The version is known from the first op that reads the new content. What that op reads needs no check."""
    weight = torch.randn(64, 64, requires_grad=True)
    with running(policy="recompute-only") as (_, session):
        with torch.no_grad():
            x = torch.randn(64, 64) * 2
        saved = x @ weight
        with torch.no_grad():
            (x.data if through_data else x).mul_(0.5)
        if not reads:
            with _disable_current_modes():
                x.add_(1)
        total = ((x + 1) @ weight).sum()
        if reads:
            with _disable_current_modes():
                x.add_(1)
        session.room.evict_all()
        with pytest.raises(ReplayError, match="not recorded") if reads else contextlib.nullcontext():
            total.backward()
    if not reads:
        assert weight.grad is not None
        assert torch.equal(weight.grad, (x + 1).t() @ torch.ones(64, 64))
    del saved


def test_replay_leaves_alone_what_is_being_fetched() -> None:
    """Of a layer norm the output is on its way back from the tier while its mean is recomputed."""
    torch.manual_seed(0)
    x = torch.randn(4096, 64, requires_grad=True)
    norm = nn.LayerNorm(64)
    norm(x).sin().sum().backward()
    expected, x.grad = x.grad, None
    with running() as (budget, session):
        y = norm(x)
        output, total = buffer_of(session, y), y.sin().sum()
        del y
        assert output.op is not None
        mean = next(each for ref in output.op.outputs if (each := ref()) is not None and each is not output)
        session.room.evict(output, Action.SWAP)
        session.room.evict(mean, Action.RECOMPUTE)
        assert output.copy is not None
        is_there = [resident(buffer) is not None for buffer in (output, mean)]  # a storage takes long to print
        assert is_there == [False, False]
        with Quietly():
            session.room.transfers.start_fetch(output, output.copy, torch.UntypedStorage(output.size_bytes))
            session.restorer.bring(mean)
        is_there = [resident(buffer) is not None for buffer in (output, mean)]
        assert is_there == [False, True]
        total.backward()
        assert budget.summary().recomputed_bytes > 0
    assert expected is not None
    assert torch.equal(expected, x.grad)


def chain(session: Session, length: int) -> tuple[torch.Tensor, list[Buffer]]:
    """Make a chain of ops whose every result is saved, and hold none of them."""
    y = torch.randn(64, 64, requires_grad=True)
    saved: list[Buffer] = []
    for _ in range(length):
        y = (y * 1.01).sin()
        saved.append(buffer_of(session, y))
    return (y * y).sum(), saved


def test_missing_time_is_that_of_the_missing_ops() -> None:
    """Against a naive walk, with part of a chain gone."""
    with running() as (_, session):
        total, saved = chain(session, 6)
        for buffer in saved[1:5]:
            session.room.evict(buffer, Action.RECOMPUTE)

        def naive_s(buffer: Buffer) -> float:
            assert buffer.op is not None
            time_s = buffer.op.time_s
            for view in buffer.op.args:
                source = getattr(view, "buffer", None)
                if source is not None and resident(source) is None:
                    time_s += naive_s(source)
            return time_s

        for buffer in saved:
            assert session.room.costs.missing_time_s(buffer) == pytest.approx(naive_s(buffer))
        total.backward()


def test_chain_is_replayed_once_each() -> None:
    """Whatever saved buffer comes along on the way stays: the work is linear in the length."""
    for length in (4, 8, 16):
        with running(decisions="recompute") as (budget, session):
            total, _ = chain(session, length)
            total.backward()
        assert budget.summary().num_recomputed_ops <= 2 * length


def test_replay_leaves_no_lock_and_no_record() -> None:
    """After backward nothing is locked, held, away or counted that was not before."""
    model, x = mlp(64, 3, dropout=0.1), torch.randn(64, 64)
    with running(decisions="recompute") as (_, session):
        before_bytes = session.ledger.usage.live_bytes
        loss = model(x).sum()
        buffers = [record.current for record in session.ledger.records.values() if record.current is not None]
        loss.backward()
        del loss
        assert all(buffer.num_locks == 0 for buffer in buffers)
        assert session.ledger.num_handles == 0
        assert not session.ledger.held
        assert session.room.costs.dropped() == []
        del buffers
        grad_bytes = sum(parameter.nbytes for parameter in model.parameters())
        assert session.ledger.usage.live_bytes == before_bytes + grad_bytes


def test_locks_are_given_back_after_a_failed_replay() -> None:
    """An op that fails in replay leaves its sources free to leave again."""
    x = torch.randn(64, 64, requires_grad=True)
    with running() as (_, session):
        first = x * 2
        second = first.sin()
        total = second.exp().sum() + (second * second).sum()
        buffers = [buffer_of(session, tensor) for tensor in (first, second)]
        del first, second

        def fail(*_: Any) -> Any:
            raise ArithmeticError

        impure(buffers[1], fail)
        for buffer in buffers:
            session.room.evict(buffer, Action.RECOMPUTE)
        with pytest.raises(ArithmeticError):
            total.backward()
        assert [buffer.num_locks for buffer in buffers] == [0, 0]


@pytest.mark.parametrize("decisions", ["recompute", "swap", "keep", None])
def test_no_storage_waits_for_the_collector(decisions: str | None) -> None:
    """With the collector off, step after step ends at the same bytes, inside a tight budget too."""
    model, x = nn.Sequential(mlp(64, 3, dropout=0.1), nn.BatchNorm1d(64)), torch.randn(64, 64)
    with running() as (budget, _):
        model(x).sum().backward()
    peak_bytes = budget.summary().peak_bytes
    gc.collect()
    gc.disable()
    try:
        with running(int(peak_bytes * 0.9) if decisions is None else peak_bytes, decisions=decisions) as (_, session):
            seen: list[tuple[int, int]] = []
            for _ in range(4):
                model(x).sum().backward()
                seen.append((session.ledger.usage.live_bytes, len(session.ledger.records)))
            assert seen == [seen[0]] * 4
    finally:
        gc.enable()


def test_random_state_is_left_as_it_was() -> None:
    """A replay rewinds the generator and puts it back, after a failure too."""
    x = torch.randn(64, 64, requires_grad=True)
    with running() as (_, session):
        y = nn.functional.dropout(x * 2, 0.5)
        total, buffer = y.sin().sum(), buffer_of(session, y)
        del y
        session.room.evict(buffer, Action.RECOMPUTE)
        state = torch.get_rng_state()
        total.backward()
        assert torch.equal(torch.get_rng_state(), state)


def test_room_is_made_for_outputs_that_nobody_wants_any_more() -> None:
    """A replay makes all outputs of an op, also those that died when another one was saved."""

    class SumElsewhere(torch.autograd.Function):
        @staticmethod
        def forward(_ctx: Any, values: torch.Tensor) -> torch.Tensor:
            return torch.tensor(values.numpy().sum())  # on no tape

        @staticmethod
        def backward(_ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            return gradient.expand(256, 256)

    x = torch.randn(256, 256, requires_grad=True)
    with running(decisions="recompute") as (_, session):
        loss = SumElsewhere.apply((x * 2).sort()[0])  # the backward wants the indices alone
        asked: list[tuple[int, str]] = []
        make = session.room.make

        def spy(size_bytes: int, why: str) -> None:
            asked.append((size_bytes, why))
            make(size_bytes, why)

        session.room.make = spy  # pyright: ignore[reportAttributeAccessIssue]
        loss.backward()
    replays = [size_bytes for size_bytes, why in asked if why == "aten.sort.default (replayed)"]
    assert replays
    assert min(replays) >= 256 * 256 * (4 + 8)


def _set(tensor: torch.Tensor) -> None:
    tensor.set_(torch.full_like(tensor, 5.0))


def _assign(tensor: torch.Tensor) -> None:
    tensor.data = torch.full_like(tensor, 5.0)


def _assign_and_write(tensor: torch.Tensor) -> None:
    tensor.data = torch.full_like(tensor, 5.0)
    tensor.add_(1)


def _assign_nothing_and_write(tensor: torch.Tensor) -> None:
    tensor.data = torch.empty(0)
    tensor.add_(1)


def _assign_another_element(tensor: torch.Tensor) -> None:
    tensor.data = torch.empty(0).set_(tensor.untyped_storage(), 1, tensor.shape, tensor.stride())


@pytest.mark.parametrize(
    "exchange", [_set, _assign, _assign_and_write, _assign_nothing_and_write, _assign_another_element]
)
@pytest.mark.parametrize("shape", [(), (64, 64)])
def test_a_source_that_has_exchanged_its_storage(
    shape: tuple[int, ...], exchange: Callable[[torch.Tensor], None]
) -> None:
    """What the op has read is replayed. What the tensor sees now is neither read nor taken for a change of that."""

    def gradient(scope: Any) -> torch.Tensor:
        torch.manual_seed(0)
        values, weight = torch.randn(64, 64), torch.ones(64, 64, requires_grad=True)
        source = torch.randn(64 * 64 + 1 if shape else 2)[:-1].view(shape)
        with scope:
            scaled = values * source
            loss = (scaled * weight).sum()
            del scaled
            exchange(source)
            loss.backward()
        assert weight.grad is not None
        return weight.grad

    budget = MemoryBudget(UNLIMITED, Config(decisions="recompute", tier="memory"))
    expected = gradient(contextlib.nullcontext())
    assert torch.equal(expected, gradient(budget))
    assert budget.summary().recomputed_bytes > 0


def test_numbers_that_replays_read_never_leave() -> None:
    """A replay passes a number on as it is, and reads freed memory if it has left."""
    assert LEAST_BYTES > WRAPPED_NUMBER_BYTES
