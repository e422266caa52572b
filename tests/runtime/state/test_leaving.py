"""A buffer that is leaving may have to stay after all: `leave` and `unleave`."""

from __future__ import annotations

import pytest
import torch

from tests.runtime.programs import running
from torchdelta.runtime.state.buffer import Buffer, Residence
from torchdelta.runtime.state.copies import TierCopy
from torchdelta.runtime.state.ledger import Ledger


class UnfinishedTransfer:
    """A copy that does not arrive until it is told to."""

    size_bytes = 0

    def __init__(self) -> None:
        self.has_arrived = False

    def is_done(self) -> bool:
        """Return whether it has been told to."""
        return self.has_arrived

    def wait(self) -> float:
        """Arrive."""
        self.has_arrived = True
        return 0.0


def resident_buffer(ledger: Ledger, x: torch.Tensor) -> Buffer:
    """Return the buffer of a plain tensor."""
    ledger.know(x.untyped_storage())
    return ledger.buffer_of(x)


def test_unleave_undoes_leave() -> None:
    """The buffer is resident again, with its storage and its bytes as they were, and may leave another time."""
    ledger, x = Ledger("cpu"), torch.ones(1000)
    buffer = resident_buffer(ledger, x)
    before_bytes = ledger.usage.live_bytes
    for _ in range(2):
        ledger.leave(buffer)
        assert buffer.residence is Residence.LEAVING
        ledger.unleave(buffer)
        assert buffer.residence is Residence.RESIDENT
    record = ledger.find(x)
    assert record is not None
    assert record.current is buffer
    assert ledger.usage.live_bytes == before_bytes


def test_unleave_of_a_buffer_that_is_not_leaving_changes_nothing() -> None:
    """Whoever keeps a buffer need not know whether it was about to leave."""
    ledger, x = Ledger("cpu"), torch.ones(1000)
    buffer = resident_buffer(ledger, x)
    ledger.unleave(buffer)
    assert buffer.residence is Residence.RESIDENT
    buffer.move(Residence.GONE)
    ledger.unleave(buffer)
    assert buffer.residence is Residence.GONE


@pytest.mark.parametrize("stays", [False, True])
def test_a_buffer_that_stops_leaving_is_not_released_when_its_copy_arrives(*, stays: bool) -> None:
    """It stays, held and readable, with its copy; one that is not stopped is away once its copy is there."""
    x = torch.randn(64, 64, requires_grad=True)
    with running(policy="swap-only") as (_, session):
        loss = (x * 2).sin().sum()
        transfers = session.room.transfers
        buffer = next(buffer for buffer in session.ledger.held.values() if session.room.is_evictable(buffer))
        assert transfers.copy_out(buffer)
        copy = buffer.copy
        assert copy.__class__ is TierCopy
        copy.arrive()
        transfer = copy.transfer = UnfinishedTransfer()
        transfers.evict(buffer, lazily=True)
        assert buffer.residence is Residence.LEAVING
        if stays:
            transfers.stop_leaving(buffer)
            assert buffer.residence is Residence.RESIDENT
        transfer.has_arrived = True
        transfers.reap()
        assert buffer.copy is copy
        assert buffer.residence is (Residence.RESIDENT if stays else Residence.AWAY)
        assert (buffer.strong is not None) == stays
        loss.backward()
    assert torch.equal(x.grad, (x * 2).cos() * 2)
