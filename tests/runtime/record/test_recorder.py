"""What the recorder does with each kind of op, seen in the ledger and the tape."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_map

from tests.runtime.parts import scoped_library
from tests.runtime.programs import mlp, running
from torchdelta.runtime.state.tape import RANDOM_STATE_BYTES

if TYPE_CHECKING:
    from torchdelta.runtime.session import Session
    from torchdelta.runtime.state.buffer import Buffer


def buffer_of(session: Session, tensor: torch.Tensor) -> Buffer:
    """Return the buffer that a tensor's storage holds now."""
    record = session.ledger.find(tensor)
    assert record is not None
    assert record.current is not None
    return record.current


def test_recorder_is_no_hindrance_to_compilation() -> None:
    """Without these two answers compiled code would be skipped for ever, and every op would pay a check."""
    with running() as (_, session):
        assert session.recorder.ignore_compile_internals() is True
        assert session.recorder._should_skip_dynamo() is False


def test_op_of_each_buffer_is_known() -> None:
    """A recomputable op is on the tape with its sources, its time and the place among its outputs."""
    x = torch.randn(64, 64, requires_grad=True)
    with running() as (_, session):
        y = x * 2
        values, indices = y.sort()
        for index, tensor in enumerate((values, indices)):
            buffer = buffer_of(session, tensor)
            assert buffer.op is not None
            assert buffer.op.facts.name == "aten.sort.default"
            assert buffer.output_index == index
            assert buffer.op.time_s > 0
            assert buffer.op.args[0].buffer is buffer_of(session, y)


def test_views_are_no_buffers() -> None:
    """They are other looks at the same one."""
    x = torch.randn(64, 64, requires_grad=True)
    with running() as (_, session):
        y = x * 2
        assert buffer_of(session, y.t()) is buffer_of(session, y)
        assert buffer_of(session, y.reshape(-1)[5:]) is buffer_of(session, y)
        assert buffer_of(session, y.detach()) is buffer_of(session, y)


def test_write_makes_a_new_buffer() -> None:
    """The storage stays, its content is another one."""
    x = torch.randn(64, 64, requires_grad=True)
    with running() as (_, session):
        y = x * 2
        before, record = buffer_of(session, y), session.ledger.find(y)
        y.sin_()
        after = buffer_of(session, y)
        assert after is not before
        assert session.ledger.find(y) is record
        assert after.op is not None
        assert after.op.facts.name == "aten.sin_.default"


def test_write_to_what_nobody_can_replay_is_not_recorded() -> None:
    """A leaf has no op: the result of adding to it cannot be recomputed, that of filling it can."""
    with running() as (_, session):
        x = torch.zeros(64, 64)
        old = torch.ones(64, 64, requires_grad=True)
        with torch.no_grad():
            old.add_(1)
        assert buffer_of(session, old).op is None
        x.fill_(3.0)
        entry = buffer_of(session, x).op
        assert entry is not None
        assert entry.facts.name == "aten.fill_.Scalar"


def test_ops_that_are_not_allowed_are_not_recorded() -> None:
    """`empty` and custom ops make buffers that can only be kept or swapped."""
    with scoped_library("torchdelta_recorder", "DEF") as library:
        library.define("twice(Tensor x) -> Tensor")
        library.impl("twice", lambda x: x * 2, "CompositeExplicitAutograd")
        with running() as (_, session):
            empty = torch.empty(64, 64)
            twice = torch.ops.torchdelta_recorder.twice(torch.ones(64, 64))
            assert buffer_of(session, empty).op is None
            assert buffer_of(session, twice).op is None
            assert buffer_of(session, twice).origin == "torchdelta_recorder.twice.default"


def test_nothing_is_taped_where_nothing_can_need_it() -> None:
    """Without gradients and saved tensors there is no tape, but bytes count."""
    with running() as (_, session), torch.no_grad():
        before_bytes = session.ledger.usage.live_bytes
        y = torch.ones(64, 64) * 2
        assert buffer_of(session, y).op is None
        assert session.ledger.usage.live_bytes == before_bytes + y.nbytes
        assert not session.ledger.held


def test_writes_without_dependents_copy_nothing() -> None:
    """An optimizer's in-place steps must not copy the parameters."""
    model, x = mlp(64, 2), torch.randn(64, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with running(decisions="recompute") as (_, session):
        for _ in range(3):
            model(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert session.counters.num_copies_before_write == 0


def test_write_under_a_dependent_copies_once() -> None:
    """What a later replay reads is preserved before it is overwritten; the second write has no dependent."""
    constant = torch.ones(64, 64)
    x = torch.randn(64, 64, requires_grad=True)
    with running(decisions="recompute") as (_, session):
        y = (x + constant).sin()
        constant.mul_(2)
        constant.mul_(2)
        assert session.counters.num_copies_before_write == 1
        y.sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, (x.detach() + 1).cos())


def test_resize_in_place_counts_the_new_size() -> None:
    """`resize_` changes the bytes of a storage that stays the same."""
    with running() as (_, session):
        x = torch.zeros(10)
        before_bytes = session.ledger.usage.live_bytes
        x.resize_(1000)
        assert session.ledger.usage.live_bytes == before_bytes - 40 + 4000


def test_budget_is_asked_before_the_op_runs() -> None:
    """Room is made for the outputs first: the op sees the others gone already."""
    x = torch.randn(64, 64, requires_grad=True)
    size_bytes = x.nbytes
    with running() as (_, session):
        asked: list[tuple[int, str, int]] = []
        make = session.room.make

        def spy(wanted_bytes: int, why: str) -> None:
            asked.append((wanted_bytes, why, session.ledger.usage.live_bytes))
            make(wanted_bytes, why)

        session.room.make = spy  # pyright: ignore[reportAttributeAccessIssue]
        before_bytes = session.ledger.usage.live_bytes
        y = x * 2
        y.sin_()
        torch.exp(y.detach(), out=torch.empty(0))
        first = asked[0]
    assert first == (size_bytes, "aten.mul.Tensor", before_bytes)
    assert (size_bytes, "aten.exp.out") in [(wanted, why) for wanted, why, _ in asked]


def test_subclasses_are_left_alone() -> None:
    """A tensor subclass runs its own ops below us; what it wraps is kept, and its training gives the same bits."""

    class Wrapped(torch.Tensor):
        @staticmethod
        def __new__(cls, elem: torch.Tensor) -> Any:
            return torch.Tensor._make_wrapper_subclass(
                cls, elem.shape, dtype=elem.dtype, requires_grad=elem.requires_grad
            )

        def __init__(self, elem: torch.Tensor) -> None:
            self.elem = elem.detach()

        @classmethod
        def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            del types
            unwrap = tree_map
            out = func(*unwrap(lambda a: a.elem if isinstance(a, cls) else a, args), **(kwargs or {}))
            return unwrap(lambda a: cls(a) if isinstance(a, torch.Tensor) else a, out)

    def gradient() -> torch.Tensor:
        x = Wrapped(torch.linspace(-1, 1, 4096).view(64, 64).requires_grad_())
        (x * 2).sin().sum().backward()
        assert isinstance(x.grad, Wrapped)
        return x.grad.elem

    plain = gradient()
    for decisions in ("recompute", "swap"):
        with running(decisions=decisions):
            ours = gradient()
        assert torch.equal(ours, plain)


def test_ops_without_tensors_out_pass_through() -> None:
    """`item`, `equal` and their kin answer as ever."""
    with running():
        x = torch.ones(4)
        assert x.sum().item() == 4
        assert torch.equal(x, torch.ones(4))
        assert bool((x == 1).all())
        assert x.tolist() == [1.0] * 4


@pytest.mark.parametrize("decisions", ["recompute", "swap", "keep"])
def test_opaque_layouts_pass_through(decisions: str) -> None:
    """Arguments without a storage are neither counted nor recorded."""
    model = nn.EmbeddingBag(10, 8, sparse=True, mode="sum")
    indices = torch.tensor([[1, 2], [3, 1]])
    with running(decisions=decisions):
        model(indices).sum().backward()
    gradient = model.weight.grad
    assert gradient is not None
    assert gradient.is_sparse
    assert gradient.to_dense()[1].tolist() == [2.0] * 8


@pytest.mark.parametrize("counts", [True, False])
def test_states_of_generators_are_counted_while_they_are_kept(*, counts: bool) -> None:
    """The runtime's own: 5 KB for each dropout that may be replayed, also where nothing counts at the allocator."""
    x = torch.randn(8, 8, requires_grad=True)
    with running(count_allocations=counts) as (_, session):
        usage = session.ledger.usage
        x.exp().sum().backward()
        x.grad = None
        usage.ask_counter()
        before_bytes = usage.total_bytes
        outputs = [torch.nn.functional.dropout(x, 0.5) for _ in range(10)]
        usage.ask_counter()
        used_bytes = usage.total_bytes - before_bytes
        assert 10 * RANDOM_STATE_BYTES < used_bytes < 10 * (RANDOM_STATE_BYTES + 1024)
        del outputs
        torch.zeros(())
        usage.ask_counter()
        assert usage.total_bytes <= before_bytes + 128
