"""Pack and unpack: who gets a handle, who stays, and what autograd gets back."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import nn

from tests.runtime.programs import running
from torchdelta._torch.storages import storage_address
from torchdelta._torch.tensors import base_of, version_of
from torchdelta.runtime.memory.room import LEAST_EVICTION_BYTES
from torchdelta.runtime.record.saved import Handle, Staying


def packed_by(session: Any, tensor: torch.Tensor) -> Any:
    """Pack a tensor as autograd would."""
    return session.saved.pack(tensor)


def test_results_of_ops_get_a_handle() -> None:
    """They can leave, and come back the same."""
    x = torch.randn(64, 64, requires_grad=True)
    with running() as (_, session):
        y = (x * 2).t()
        packed = packed_by(session, y)
        assert packed.__class__ is Handle
        back = session.saved.unpack(packed)
        assert torch.equal(back, y)
        assert back.stride() == y.stride()
        assert storage_address(back) == storage_address(y)
        del packed


@pytest.mark.parametrize("what", ["leaf", "parameter", "number", "tiny", "view of a parameter"])
def test_what_stays_is_given_back_as_it_is(what: str) -> None:
    """Parameters and leaves are kept by the user anyhow, and small things are not worth leaving."""
    tensor = {
        "leaf": lambda: torch.randn(64, 64, requires_grad=True),
        "parameter": lambda: nn.Parameter(torch.randn(64, 64)),
        "number": lambda: torch.tensor(3.0) * 2,
        "tiny": lambda: torch.randn(LEAST_EVICTION_BYTES // 4 - 1) * 2,
        "view of a parameter": lambda: nn.Parameter(torch.randn(64, 64)).t(),
    }[what]()
    with running() as (_, session):
        base = None if tensor.is_leaf else base_of(tensor)
        session.ledger.buffer_of(tensor if base is None else base)
        packed = packed_by(session, tensor)
        assert packed.__class__ is Staying
        assert torch.equal(session.saved.unpack(packed), tensor)
        assert session.ledger.num_handles == 0


def test_forced_decisions_take_small_buffers_too() -> None:
    """They are for tests: everything that can leave does."""
    with running(decisions="swap") as (_, session):
        assert packed_by(session, torch.randn(3, requires_grad=True) * 2).__class__ is Handle


@pytest.mark.parametrize("kind", ["sparse", "subclass", "meta"])
def test_foreign_tensors_are_passed_through(kind: str) -> None:
    """What cannot be handled is kept as it is."""

    class Mine(torch.Tensor):
        pass

    with_an_attribute = torch.ones(64, 64).as_subclass(Mine)
    with_an_attribute.note = "mine"  # pyright: ignore[reportAttributeAccessIssue]
    tensor = {
        "sparse": torch.eye(3).to_sparse(),
        "subclass": with_an_attribute,
        "meta": torch.ones(64, 64, device="meta"),
    }[kind]
    with running(decisions="swap") as (_, session):
        packed = packed_by(session, tensor)
        back = session.saved.unpack(packed)
        assert back is tensor
        assert session.ledger.num_handles == 0


@pytest.mark.parametrize("decisions", ["keep", "swap", "recompute"])
@pytest.mark.parametrize("what", ["result", "leaf"])
def test_error_of_a_changed_tensor_is_eagers(what: str, decisions: str) -> None:
    """Same type, same words, same versions and shape as plain."""

    def message() -> str:
        x = torch.ones(4, 8, requires_grad=True)
        w = torch.ones(8, 2, requires_grad=True)
        y = x * 2 if what == "result" else x
        z = (y @ w).sum()
        with torch.no_grad():
            y.add_(1)
            y.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation") as caught:
            z.backward()
        return str(caught.value)

    plain = message()
    with running(decisions=decisions):
        ours = message()
    version = plain[plain.index(" is at version") : plain.index(" instead")]
    assert version.split("; ")[0] in ours
    assert "[4, 8]" in ours
    assert "[4, 8]" in plain


def test_handles_are_counted_and_forgotten() -> None:
    """As many as autograd holds, none after backward or after the graph has died."""
    x = torch.randn(64, 64, requires_grad=True)
    with running(decisions="recompute") as (_, session):
        y = (x * 2).sin().exp()
        assert session.ledger.num_handles == 2
        y.sum().backward()
        assert session.ledger.num_handles == 0
        y = (x * 2).sin().exp()
        assert session.ledger.num_handles == 2
        del y
        assert session.ledger.num_handles == 0


def test_buffer_saved_twice_leaves_once() -> None:
    """Two ops that save one buffer share it, however each looks at it."""
    x = torch.randn(64, 64, requires_grad=True)
    with running(decisions="swap") as (budget, _):
        y = x * 2
        total = y.sin().sum() + y.t().cos().sum()
        del y
        total.backward()
    assert budget.summary().swapped_out_bytes == x.nbytes


def test_unpacking_again_gives_the_same() -> None:
    """A retained graph asks many times; what came back once is used until it leaves again."""
    x = torch.randn(64, 64, requires_grad=True)
    for decisions in ("swap", "recompute"):
        with running(decisions=decisions):
            y = (x * 2).sin().exp().sum()
            gradients = [torch.autograd.grad(y, x, retain_graph=True)[0] for _ in range(3)]
        assert all(torch.equal(gradient, gradients[0]) for gradient in gradients)


def test_saved_output_makes_no_cycle() -> None:
    """A node that saves its own output must not keep its own graph alive."""
    x = torch.randn(64, 64, requires_grad=True)
    small = torch.randn(4, requires_grad=True)
    with (
        running()
    ):  # the first meta run of all imports modules that keep an exception, and so its frames, until a collection
        (x * 2).exp()
    gc.collect()
    gc.disable()
    try:
        for decisions in ("keep", "swap", "recompute", None):
            with running(decisions=decisions) as (_, session):
                before_bytes = session.ledger.usage.live_bytes
                y = (x * 2).exp().tanh().softmax(-1)
                z = (small * 2).exp().sigmoid()
                del y, z
                assert session.ledger.num_handles == 0
                if session.room.transfers.opened_tier is not None:
                    session.room.transfers.opened_tier.drain()
                assert session.ledger.usage.live_bytes == before_bytes
    finally:
        gc.enable()


def test_probe_holds_no_bytes() -> None:
    """What watches a version for a handle shares the counter and not the storage."""
    x = torch.randn(64, 64, requires_grad=True)
    with running(decisions="recompute") as (_, session):
        before_bytes = session.ledger.usage.live_bytes
        y = x * 2
        z = y.sin().sum()
        version = version_of(y)
        del y
        assert session.ledger.usage.live_bytes == before_bytes + 4
        assert version == 0
        z.backward()


def test_names_of_what_is_saved() -> None:
    """A tensor that no op made has no op name, and its dtype is bare."""
    told: list[Any] = []

    def decide(buffer: Any) -> str:
        told.append(buffer)
        return "keep"

    x, w = torch.randn(64, 32, dtype=torch.bfloat16), nn.Parameter(torch.randn(32, 16, dtype=torch.bfloat16))
    with running(decisions=decide):
        (x @ w).sum().backward()
    assert [(b.op, b.module, b.shape, b.dtype, b.size_bytes) for b in told] == [("", "", (64, 32), "bfloat16", 4096)]
