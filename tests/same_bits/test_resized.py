"""Storages that are freed and filled again behind autograd's back, as FSDP does with its parameters."""

from __future__ import annotations

import ctypes
import gc
import logging
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.autograd import _unsafe_preserve_version_counter

from tests.runtime.parts import running_session
from tests.same_bits.judge import DECISIONS, Scope, assert_same_bits, differences, plain_outcome, run
from torchdelta import Config, MemoryBudget
from torchdelta._torch.modes import NoDispatch
from torchdelta.errors import SavedTensorError
from torchdelta.runtime.record.scan import scan_storages
from torchdelta.runtime.state.ledger import Ledger
from torchdelta.runtime.tiers.memory import MemoryTier

if TYPE_CHECKING:
    from collections.abc import Callable

    from torchdelta.runtime.tiers.base import Transfer


class Gathered(nn.Module):
    """A linear layer whose weight has memory only around its forward and its backward."""

    def __init__(self, width: int, fill: Callable[[torch.Tensor, torch.Tensor], object]) -> None:
        super().__init__()
        self.shard = torch.randn(width, width) / width**0.5
        self.weight = nn.Parameter(self.shard.clone())
        self.fill = fill
        self.free()

    def gather(self, *_: object) -> None:
        """Fill the weight's storage."""
        storage = self.weight.untyped_storage()
        if storage.nbytes() == 0:
            storage.resize_(self.shard.numel() * 4)
            with torch.no_grad(), _unsafe_preserve_version_counter(self.weight):
                self.fill(self.weight, self.shard)

    def free(self, *_: object) -> None:
        """Free it."""
        self.weight.untyped_storage().resize_(0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Gather, multiply, free."""
        self.gather()
        out = torch.nn.functional.linear(x, self.weight)
        self.free()
        out.register_hook(self.gather)
        return out


def copied(weight: torch.Tensor, shard: torch.Tensor) -> None:
    """Fill by an op that could be replayed."""
    weight.detach().copy_(shard)


def unseen(weight: torch.Tensor, shard: torch.Tensor) -> None:
    """Fill where no op is seen."""
    ctypes.memmove(weight.data_ptr(), shard.data_ptr(), shard.untyped_storage().nbytes())


FILLS = {"copied": copied, "unseen": unseen}


def gathered(fill: Callable[[torch.Tensor, torch.Tensor], object], *, starts_full: bool) -> Callable[[Scope], Any]:
    """Make a step through layers whose weights come and go."""

    def step(scope: Scope) -> dict[str, Any]:
        layers = [Gathered(64, fill) for _ in range(3)]
        x = torch.randn(128, 64, requires_grad=True)
        if starts_full:
            for layer in layers:
                layer.gather()
        with scope():
            for _ in range(2):
                hidden = x
                for layer in layers:
                    hidden = torch.nn.functional.dropout(layer(hidden).exp().sin(), 0.2)
                (hidden * hidden).sum().backward()
                for layer in layers:
                    layer.free()
        for layer in layers:
            layer.gather()
        return {"x": x.grad, "weights": [layer.weight.grad for layer in layers]}

    return step


@pytest.mark.parametrize("starts_full", [False, True])
@pytest.mark.parametrize("fill", FILLS)
def test_same_bits(fill: str, starts_full: bool) -> None:
    """No replay reads a storage that was freed in between, and no copy is taken from one."""
    assert_same_bits(gathered(FILLS[fill], starts_full=starts_full))


def test_same_bits_under_pressure() -> None:
    """Activations beside such storages are recomputed and swapped by a budget that presses."""
    step = gathered(copied, starts_full=False)
    expected = plain_outcome(step)
    budgets: list[MemoryBudget] = []

    def opened(size: int | str) -> Scope:
        def scope() -> MemoryBudget:
            budgets.append(MemoryBudget(size, Config(tier="memory")))
            return budgets[-1]

        return scope

    run(step, opened("1TiB"))
    found = differences(expected, run(step, opened(int(budgets[-1].summary().peak_bytes * 0.7))))
    summary = budgets[-1].summary()
    assert not [difference for difference in found if "leaked" not in difference]
    assert summary.swapped_out_bytes + summary.recomputed_bytes > 0
    assert summary.peak_bytes <= summary.budget_bytes


def test_size_is_followed() -> None:
    """A storage counts with the bytes that it has at each moment."""
    gc.collect()
    with MemoryBudget("1TiB"):
        ledger = running_session().ledger
        x = torch.ones(1000)
        full_bytes = ledger.usage.live_bytes
        x.untyped_storage().resize_(0)
        assert ledger.usage.live_bytes == full_bytes - 4000
        x.untyped_storage().resize_(8000)
        assert ledger.usage.live_bytes == full_bytes + 4000
        gc.collect()
        fresh = Ledger("cpu")
        scan_storages(fresh)
        assert fresh.usage.live_bytes == ledger.usage.live_bytes


def test_room_is_made_before_a_storage_grows() -> None:
    """A storage that grows is an allocation like any other."""
    with MemoryBudget("1TiB", Config(tier="memory")):
        session = running_session()
        weight = torch.ones(100_000)
        weight.untyped_storage().resize_(0)
        x = torch.ones(100_000, requires_grad=True)
        y = (x * 2).sin()
        session.room.budget_bytes = session.ledger.usage.total_bytes + 100_000
        session.ledger.usage.restart_peak()
        weight.untyped_storage().resize_(400_000)
        assert session.ledger.usage.peak_bytes <= session.room.budget_bytes
        session.room.budget_bytes = None
        y.sum().backward()
    assert torch.equal(x.grad, 2 * torch.cos(torch.full((100_000,), 2.0)))


@pytest.mark.parametrize("decisions", ["recompute", "swap"])
def test_an_unseen_resize_is_refused_before_it_is_read(decisions: str) -> None:
    """A storage that C++ code has shrunk is an error with a name, never a read of freed memory."""

    def step(scope: Scope) -> dict[str, Any]:
        source = torch.ones(100_000)
        weight = torch.ones(100_000, requires_grad=True)
        with scope():
            product = (source * 2).exp() * weight
            with NoDispatch():
                torch.ops.inductor.resize_storage_bytes_(source, 0)
            product.sum().backward()
        return {}

    ours = run(step, lambda: MemoryBudget("1TiB", Config(decisions=decisions, tier="memory")))
    if decisions == "swap":
        assert ours.raised is None
    else:
        assert ours.raised is SavedTensorError
        assert "resized to 0 bytes" in ours.message


def test_content_is_kept_for_replays_that_need_it() -> None:
    """What was recorded from a storage before it was freed for the first time is still replayed from its content."""

    def step(scope: Scope) -> dict[str, Any]:
        source = torch.linspace(0, 1, 100_000)
        weight = torch.ones(100_000, requires_grad=True)
        with scope():
            product = (source * 2).exp() * weight
            source.untyped_storage().resize_(0)
            product.sum().backward()
        return {"grad": weight.grad}

    assert_same_bits(step)


def test_said_once(caplog: pytest.LogCaptureFixture) -> None:
    """One line for all storages of a scope that come and go."""
    with caplog.at_level(logging.INFO, "torchdelta"):
        run(gathered(copied, starts_full=False), lambda: MemoryBudget("1TiB"))
    assert sum("freed and filled again" in record.getMessage() for record in caplog.records) == 1


def test_nothing_stays_on_torch() -> None:
    """The patch goes with the last scope, also with two on different threads."""
    before = vars(torch.UntypedStorage).get("resize_")
    with MemoryBudget("1TiB", Config(decisions=DECISIONS["swap"], tier="memory")):
        assert vars(torch.UntypedStorage).get("resize_") is not before
    assert vars(torch.UntypedStorage).get("resize_") is before


def test_a_storage_that_cannot_grow_stays_as_it_is() -> None:
    """A failed resize takes nothing away from those who want the content."""
    x = torch.ones(100_000, requires_grad=True)
    with MemoryBudget("1TiB", Config(decisions="keep", tier="memory")):
        hidden = x * 2
        loss = (hidden * hidden).sum()
        hidden.untyped_storage()
        with pytest.raises(RuntimeError):
            hidden.untyped_storage().resize_(2**60)
        loss.backward()
    assert torch.equal(x.grad, torch.full((100_000,), 8.0))


def test_a_copy_arrives_before_its_source_moves_into_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The copy reads the old memory, which `share_memory_` frees."""
    were_shared = []  # whether `y` was in shared memory, at each wait for its copy

    class Slow:
        """A transfer that has not ended until it is waited for."""

        def __init__(self, transfer: Transfer) -> None:
            self.transfer = transfer
            self.is_awaited = False

        def wait(self) -> float:
            """Wait."""
            were_shared.append(y.is_shared())
            self.is_awaited = True
            return self.transfer.wait()

        def is_done(self) -> bool:
            """Return whether it has been waited for."""
            return self.is_awaited and self.transfer.is_done()

    write = MemoryTier.write
    monkeypatch.setattr(MemoryTier, "write", lambda tier, slot, storage: Slow(write(tier, slot, storage)))
    torch.manual_seed(0)
    w = torch.randn(64, 64, requires_grad=True)
    with MemoryBudget("1TiB", Config(decisions="swap", tier="memory")):
        y = w.exp() * 1
        loss = (y * w).sum()
        record = running_session().ledger.find(y)
        assert record is not None
        assert record.current is not None
        assert record.current.copy is not None
        assert not record.current.copy.is_there()
        with torch.no_grad():
            y.share_memory_()
        assert were_shared == [False]
        assert y.is_shared()
        loss.backward()
    expected = w.detach().exp() * (1 + w.detach())
    assert w.grad is not None
    torch.testing.assert_close(w.grad, expected)
