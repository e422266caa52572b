"""Weak references to storages: safe after the storage's death, and unseen by the autograd engine."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from torchdelta._torch.storages import storage_address, storage_at, storage_num_holders
from torchdelta.native.weak_storage import weak_storage_type
from torchdelta.runtime.state.ledger import Ledger

if TYPE_CHECKING:
    from collections.abc import Callable

    from torchdelta.native.weak_storage import WeakStorage


@pytest.fixture
def make() -> Callable[[int], WeakStorage]:
    """Return the type, where there is a compiler to build it."""
    kind = weak_storage_type()
    if kind is None:
        pytest.skip("no native module here")
    return kind


def test_it_counts_as_no_holder(make: Callable[[int], WeakStorage]) -> None:
    """The holders are the tensors alone, and their number is told after the last of them as well."""
    x = torch.ones(100)
    weak = make(storage_address(x))
    assert storage_num_holders(storage_address(x)) == weak.num_holders() == 1
    alias = x.detach()
    assert weak.num_holders() == 2
    del x, alias
    assert weak.num_holders() == 0


def test_its_address_is_not_given_out_again(make: Callable[[int], WeakStorage]) -> None:
    """As long as it lives, no other storage has the address of the dead one."""
    x = torch.ones(100)
    address = storage_address(x)
    weak = make(address)
    x.data = torch.ones(3)
    made = [torch.ones(100) for _ in range(1000)]
    assert weak.num_holders() == 0
    assert address not in {storage_address(tensor) for tensor in made}
    assert storage_at(address) is None


@pytest.mark.parametrize(("arguments", "error"), [((0,), ValueError), (("x",), TypeError), ((), TypeError)])
def test_what_is_no_address_is_refused(
    make: Callable[..., WeakStorage], arguments: tuple[object, ...], error: type[Exception]
) -> None:
    """Zero, texts and nothing raise."""
    with pytest.raises(error):
        make(*arguments)


def test_without_it_a_ledger_watches_storage_objects(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing native is to be had, an exchanged storage is struck out by the death of its own object."""
    monkeypatch.setenv("TORCHDELTA_NATIVE", "0")
    ledger = Ledger("cpu")
    x = torch.ones(100)
    record = ledger.know_by_tensor(x)
    assert record is not None
    assert record.storage() is not None
    x.data = torch.ones(3)
    del record
    assert ledger.usage.live_bytes == 0
    assert not ledger.records
