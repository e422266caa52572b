"""Streams: what leaves was made and read on the home stream, and comes back on it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from tests.same_bits.judge import Scope, assert_same_bits, state_of
from torchdelta import Config, MemoryBudget
from torchdelta.runtime.current import current_session
from torchdelta.runtime.device.streams import Streams
from torchdelta.runtime.state.buffer import Stays

if TYPE_CHECKING:
    from torchdelta.runtime.session import Session

pytestmark = pytest.mark.accelerator


def running() -> tuple[Session, Streams]:
    """Return the running session and its streams."""
    session = current_session()
    assert session is not None
    assert session.device.streams is not None
    return session, session.device.streams


def test_branches_on_side_streams(device: torch.device) -> None:
    """A forward with a branch on a stream of its own leaves the plain run's bits."""
    side = torch.Stream(device=device)

    def step(scope: Scope) -> dict[str, Any]:
        trunk, branch, head = nn.Linear(64, 256), nn.Linear(64, 256), nn.Linear(256, 64)
        with scope():
            for _ in range(3):
                home = torch.accelerator.current_stream()
                x = torch.randn(32, 64).sin()
                side.wait_stream(home)
                with side:
                    aside = branch(x).gelu().dropout(0.3, train=True) if hasattr(x, "gelu") else branch(x).sigmoid()
                hidden = trunk(x).sigmoid()
                home.wait_stream(side)
                head(hidden * aside).pow(2).mean().backward()
        return state_of(trunk, branch, head)

    assert_same_bits(step)


@pytest.mark.parametrize("decisions", ["recompute", "swap"])
def test_what_another_stream_reads_or_makes_is_kept(device: torch.device, decisions: str) -> None:
    """A saved tensor that a second stream may still be reading must not go back to the allocator."""
    side = torch.Stream(device=device)
    x = torch.randn(64, 64, requires_grad=True)
    with MemoryBudget("1TiB", Config(decisions=decisions, tier="memory")):
        session, streams = running()
        first = x.sin()
        (first * 2).exp()  # home: something is saved
        kept = first.cos()
        assert session.room.transfers.leaving or session.room.transfers.away or decisions == "recompute"
        home = torch.accelerator.current_stream()
        side.wait_stream(home)
        with side:
            aside = kept.exp()
            made = aside * 2
        home.wait_stream(side)
        session.room.transfers.finish_leaving()
        assert streams.current_id() == streams.home_id
        for tensor in (kept, aside, made):
            record = session.ledger.find(tensor)
            assert record is not None
            assert record.current is not None
            assert record.current.stays & Stays.OTHER_STREAM
            assert not session.room.is_evictable(record.current)
        made.sum().backward()


@pytest.mark.parametrize("decisions", ["recompute", "swap"])
def test_what_has_left_is_held_again_once_another_stream_reads_it(device: torch.device, decisions: str) -> None:
    """The program may drop it while that stream still reads it: plain torch keeps it until backward."""
    side = torch.Stream(device=device)
    x, weight = torch.randn(64, 64, device=device), torch.randn(64, 64, device=device, requires_grad=True)
    with MemoryBudget("1TiB", Config(decisions=decisions, tier="memory")):
        session, _ = running()
        saved = x.sin()
        out = saved * weight
        session.room.transfers.finish_leaving()
        record = session.ledger.find(saved)
        assert record is not None
        assert record.current is not None
        assert record.current.strong is None
        home = torch.accelerator.current_stream()
        side.wait_stream(home)
        with side:
            aside = saved + 1
        storage = record.storage
        del saved
        assert storage() is not None
        home.wait_stream(side)
        (out + aside).sum().backward()
        assert torch.equal(weight.grad, x.sin())


def test_home_is_where_the_step_begins(device: torch.device) -> None:
    """A loop that runs on a side stream evicts and replays there; the next step may be on another one."""
    side = torch.Stream(device=device)

    def step(scope: Scope) -> dict[str, Any]:
        model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Dropout(0.1), nn.Linear(256, 64))
        with scope():
            for index in range(4):
                home = torch.accelerator.current_stream()
                if index % 2:
                    side.wait_stream(home)
                    with side:
                        model(torch.randn(32, 64)).pow(2).mean().backward()
                    home.wait_stream(side)
                else:
                    model(torch.randn(32, 64)).pow(2).mean().backward()
        return state_of(model)

    assert_same_bits(step)
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
    side.wait_stream(torch.accelerator.current_stream())
    with MemoryBudget("1TiB", Config(decisions="recompute", tier="memory")) as budget, side:
        model(torch.randn(32, 64)).pow(2).mean().backward()
        _, streams = running()
        assert streams.home_id == streams.current_id()
    torch.accelerator.current_stream().wait_stream(side)
    assert budget.summary().recomputed_bytes > 0


def test_what_is_asked_from_another_stream_is_done_at_home(device: torch.device) -> None:
    """A Function that reads its saved tensors on a stream of its own gets them from the home stream, and waits."""
    side = torch.Stream(device=device)
    streams_seen: list[int] = []

    class Aside(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x)
            return x * 1

        @staticmethod
        def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
            current = torch.accelerator.current_stream()
            side.wait_stream(current)
            with side:
                (x,) = ctx.saved_tensors
                streams_seen.append(torch.accelerator.current_stream().stream_id)
                result = gradients[0] * x
            current.wait_stream(side)
            return result

    def step(scope: Scope) -> dict[str, Any]:
        x = torch.randn(64, 64, requires_grad=True)
        with scope():
            Aside.apply(x.sin().exp()).sum().backward()
        return {"x": x.grad}

    assert_same_bits(step)
    assert set(streams_seen) == {side.stream_id}


def test_at_home_switches_and_waits(device: torch.device) -> None:
    """Inside, the home stream is current; outside, the stream from before is, and it waits for the home stream."""
    streams = Streams(device)
    side = torch.Stream(device=device)
    with streams.at_home():
        assert streams.current_id() == streams.home_id
    with side:
        outside_id = streams.current_id()
        assert outside_id != streams.home_id
        with streams.at_home():
            assert streams.current_id() == streams.home_id
        assert streams.current_id() == outside_id
        streams.move_home()
        assert streams.home_id == outside_id
    assert streams.current_id() != streams.home_id
