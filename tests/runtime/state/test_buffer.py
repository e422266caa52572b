"""Views rebuild what they saw; records and copies end when nobody wants them."""

from __future__ import annotations

import gc

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from torchdelta._torch.modes import Quietly
from torchdelta._torch.storages import storage_address
from torchdelta._torch.tensors import neg_view
from torchdelta.errors import TierIOError
from torchdelta.runtime.state.buffer import Buffer, StorageRecord, View
from torchdelta.runtime.state.copies import Fetch, TierCopy
from torchdelta.runtime.tiers import open_tier

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool, torch.complex64]


class ScriptedTransfer:
    """A copy in flight that fails, or not."""

    def __init__(self, size_bytes: int, error: TierIOError | None = None) -> None:
        self.size_bytes = size_bytes
        self.error = error
        self.num_waits = 0

    def is_done(self) -> bool:
        """Never known before somebody waits."""
        return self.num_waits > 0

    def wait(self) -> float:
        """Take half a second, in words."""
        self.num_waits += 1
        if self.error is not None:
            raise self.error
        return 0.5


class ScriptedTier:
    """A tier that only counts what is given back."""

    def __init__(self) -> None:
        self.released: list[object] = []

    def release(self, slot: object) -> None:
        """Note it."""
        self.released.append(slot)


@given(
    dtype=st.sampled_from(DTYPES),
    changes=st.lists(
        st.sampled_from(["transpose", "narrow", "step", "expand", "unsqueeze", "diagonal", "flat"]), max_size=4
    ),
)
def test_view_rebuilds_the_tensor(dtype: torch.dtype, changes: list[str]) -> None:
    """Whatever way a tensor looks at its storage, the view looks the same way at a copy of that storage."""
    base = torch.randn(4, 6).to(dtype)
    tensor = base
    for change in changes:
        if change == "transpose":
            tensor = tensor.transpose(0, -1)
        elif change == "narrow":
            tensor = tensor.narrow(0, tensor.shape[0] // 2, tensor.shape[0] - tensor.shape[0] // 2)
        elif change == "step":
            tensor = tensor[..., ::2]
        elif change == "expand":
            tensor = tensor.unsqueeze(0).expand(2, *tensor.shape)
        elif change == "unsqueeze":
            tensor = tensor.unsqueeze(1)
        elif change == "diagonal" and tensor.dim() >= 2:
            tensor = tensor.diagonal()
        elif change == "flat" and tensor.is_contiguous():
            tensor = tensor.view(-1)
    view = View(Buffer(base.nbytes), tensor)
    with Quietly():
        rebuilt = view.on(base.untyped_storage().clone())
    assert (rebuilt.shape, rebuilt.stride(), rebuilt.dtype) == (tensor.shape, tensor.stride(), tensor.dtype)
    assert rebuilt.storage_offset() == tensor.storage_offset()
    assert torch.equal(rebuilt, tensor)


@pytest.mark.parametrize("kind", ["conj", "neg", "both"])
def test_view_keeps_the_bits_that_no_stride_tells(kind: str) -> None:
    """A conjugate or negative view is one bit on the tensor."""
    base = torch.randn(3, 3, dtype=torch.complex64)
    tensor = {"conj": base.conj(), "neg": base.conj().imag, "both": neg_view(base.conj())}[kind]
    view = View(Buffer(base.nbytes), tensor)
    with Quietly():
        rebuilt = view.on(base.untyped_storage().clone())
    assert (rebuilt.is_conj(), rebuilt.is_neg()) == (tensor.is_conj(), tensor.is_neg())
    assert torch.equal(rebuilt.resolve_conj().resolve_neg(), tensor.resolve_conj().resolve_neg())


def test_views_are_counted_while_they_live() -> None:
    """Who depends on a buffer's content is the number of its views."""
    buffer, x = Buffer(16), torch.zeros(4)
    first, second = View(buffer, x), View(buffer, x[1:])
    assert buffer.num_views == 2
    del first
    assert buffer.num_views == 1
    del second
    assert buffer.num_views == 0


def test_record_tells_of_the_death_of_its_storage_once() -> None:
    """The callback runs when the last tensor on the storage is gone, and not again."""
    died: list[int] = []
    x = torch.zeros(4)
    record = StorageRecord(storage_address(x), x.nbytes, lambda record: died.append(record.size_bytes), lambda _: None)
    record.watch_storage(x.untyped_storage())
    assert record.storage() is not None
    y = x[2:]
    del x
    assert died == []
    del y
    assert died == [16]
    assert record.storage() is None


def test_copy_gives_its_slot_back_without_waiting() -> None:
    """A finalizer may run under the tier's own lock: the tier keeps the source while it reads it."""
    tier, transfer = ScriptedTier(), ScriptedTransfer(16)
    copy = TierCopy(tier, "slot", transfer, torch.UntypedStorage(16))  # pyright: ignore[reportArgumentType]
    assert not copy.is_there()
    del copy
    assert transfer.num_waits == 0
    assert tier.released == ["slot"]


def test_arrival_is_waited_for_once() -> None:
    """Waiting says how long it took, and lets the source go."""
    transfer = ScriptedTransfer(16)
    copy = TierCopy(ScriptedTier(), "slot", transfer, torch.UntypedStorage(16))  # pyright: ignore[reportArgumentType]
    assert copy.arrive() == 0.5
    assert copy.arrive() == 0.0
    assert transfer.num_waits == 1
    assert copy.source is None
    assert copy.is_there()


def test_failed_copy_says_so_and_still_gives_its_slot_back() -> None:
    """The error of a transfer comes out of `arrive`, and not out of a finalizer."""
    tier = ScriptedTier()
    copy = TierCopy(tier, "a", ScriptedTransfer(16, TierIOError("the disk is on fire")), torch.UntypedStorage(16))  # pyright: ignore[reportArgumentType]
    with pytest.raises(TierIOError, match="on fire") as caught:
        copy.arrive()
    del copy, caught
    gc.collect()
    abandoned = TierCopy(tier, "b", ScriptedTransfer(16, TierIOError("the disk is gone")), torch.UntypedStorage(16))  # pyright: ignore[reportArgumentType]
    del abandoned
    assert tier.released == ["a", "b"]


def test_fetch_that_is_dropped_leaves_no_copy_under_way() -> None:
    """A target storage outlives the transfer that fills it, also when the fetch is called off."""
    tier = open_tier("memory", swap_dir=None, host_budget_bytes=None, disk_budget_bytes=None)
    source = torch.arange(1000, dtype=torch.float64)
    slot = tier.reserve(source.nbytes)
    copy = TierCopy(tier, slot, tier.write(slot, source.untyped_storage()), source.untyped_storage())
    target = torch.empty_like(source)
    fetch = Fetch(copy, target.untyped_storage())
    transfer = fetch.transfer
    del fetch
    transfer.wait()
    assert torch.equal(target, source)
    del copy
    tier.drain()
    assert tier.used_bytes == 0
    tier.close()
