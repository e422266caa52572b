"""The contract with torch: storages: their addresses, holders and sizes.

A torch release that changes one fails here, by name.
"""

from __future__ import annotations

import copy
import gc
import weakref
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import multiprocessing

from torchdelta._torch.doors import (
    patch_deep_copies,
    patch_storage_resize,
    patch_storage_sharing,
    patch_swap_tensors,
)
from torchdelta._torch.fake import FakeTensorMode
from torchdelta._torch.storages import storage_address, storage_at, storage_num_holders, storage_over
from torchdelta._torch.tensors import conj, identity_of, neg_view, tensor_num_holders

if TYPE_CHECKING:
    from collections.abc import Callable


def test_storage_address() -> None:
    """The address is the `_cdata` of the storage, and asking makes no storage object."""
    x = torch.zeros(4)
    address = storage_address(x)
    assert storage_num_holders(address) == 1
    assert address == x.untyped_storage()._cdata
    assert storage_address(x[2:]) == address
    assert storage_address(torch.zeros(4)) != address


def test_storage_address_of_tensors_without_a_storage() -> None:
    """It raises RuntimeError (or its subclass NotImplementedError), which the ledger expects."""
    with pytest.raises(RuntimeError):
        storage_address(torch.eye(2).to_sparse())


def test_storage_num_holders() -> None:
    """Each tensor on a storage holds it once, and so does its Python object."""
    x = torch.zeros(4)
    address = storage_address(x)
    alias = x.detach()
    assert storage_num_holders(address) == 2
    storage = x.untyped_storage()
    assert storage_num_holders(address) == 3
    del alias, storage
    gc.collect()
    assert storage_num_holders(address) <= 2


def test_storage_at() -> None:
    """A living storage is found by its address, as the object that it has already."""
    x = torch.arange(4.0)
    found = storage_at(storage_address(x))
    assert found.nbytes() == x.nbytes
    assert found.data_ptr() == x.data_ptr()
    assert found is x.untyped_storage()


def test_storage_at_of_a_dead_storage() -> None:
    """None, while a weak reference keeps its address from being given out again."""
    x = torch.zeros(4)
    address = x.untyped_storage()._weak_ref()  # pyright: ignore[reportAttributeAccessIssue]
    del x
    gc.collect()
    assert storage_at(address) is None
    torch.UntypedStorage._free_weak_ref(address)  # pyright: ignore[reportAttributeAccessIssue]


def test_storage_over() -> None:
    """It reads and writes the memory that it was given, owns nothing, and tells of its own death."""
    x = torch.arange(8, dtype=torch.uint8)
    storage = storage_over(x.data_ptr() + 2, 4, torch.device("cpu"))
    assert (storage.nbytes(), storage.data_ptr()) == (4, x.data_ptr() + 2)
    died: list[int] = []
    weakref.finalize(storage, died.append, 1)
    view = torch.empty(0, dtype=torch.uint8).set_(storage, 0, (4,), (1,))
    del storage
    view.fill_(9)
    assert x.tolist() == [0, 1, 9, 9, 9, 9, 6, 7]
    assert not died
    del view
    assert died


def test_storage_object_lives_as_long_as_its_storage() -> None:
    """A weak reference to it tells of the storage's death, not of the last Python name's."""
    died: list[int] = []
    x = torch.zeros(4)
    reference = weakref.ref(x.untyped_storage(), lambda _: died.append(1))
    gc.collect()
    assert reference() is x.untyped_storage()
    y = x.view(2, 2)
    del x
    gc.collect()
    assert not died
    del y
    gc.collect()
    assert died == [1]


def test_views_with_bits() -> None:
    """Conjugate and negative views share their storage."""
    x = torch.tensor([1 + 2j])
    assert conj(x).is_conj()
    assert neg_view(x.real).is_neg()
    assert storage_address(conj(x)) == storage_address(x)


def test_patch_storage_resize() -> None:
    """Every resize of a storage from Python passes through the patch, of the older storages too, until it is undone."""
    sizes: list[int] = []

    def make(original: Any) -> Any:
        def resize_(storage: Any, size_bytes: int) -> Any:
            sizes.append(size_bytes)
            return original(storage, size_bytes)

        return resize_

    undo = patch_storage_resize(make)
    x = torch.ones(4)
    x.untyped_storage().resize_(0)
    x._typed_storage()._resize_(4)
    undo()
    x.untyped_storage().resize_(8)
    assert sizes == [0, 16]
    assert "resize_" not in vars(torch.UntypedStorage)


@pytest.mark.parametrize("strategy", sorted(multiprocessing.get_all_sharing_strategies()))
def test_patch_storage_sharing(strategy: str) -> None:
    """Whatever moves a storage into shared memory passes through the patch, with the memory that it had."""
    addresses: list[int] = []

    def make(original: Any) -> Any:
        def share(storage: Any, *args: Any, **kwargs: Any) -> Any:
            addresses.append(storage.data_ptr())
            return original(storage, *args, **kwargs)

        return share

    before = multiprocessing.get_sharing_strategy()
    multiprocessing.set_sharing_strategy(strategy)
    undo = patch_storage_sharing(make)
    try:
        x = torch.ones(4)
        address = x.data_ptr()
        x.share_memory_()
        assert addresses == [address]
        assert x.data_ptr() != address
    finally:
        undo()
        multiprocessing.set_sharing_strategy(before)
    torch.ones(4).share_memory_()
    assert len(addresses) == 1


def test_tensor_num_holders() -> None:
    """A second holder in C++ counts, a second Python name does not."""
    x = torch.zeros(2)
    alone = tensor_num_holders(x)
    same = x
    assert tensor_num_holders(same) == alone
    y = torch.ones(2, requires_grad=True) * x  # autograd keeps x itself
    assert tensor_num_holders(x) == alone + 1
    del y


def test_patch_swap_tensors() -> None:
    """Conversions of modules come through the door, and what a tensor stands for changes its Python object there."""
    seen: list[tuple[int, int, int, int]] = []

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def swap_tensors(t1: torch.Tensor, t2: torch.Tensor) -> None:
            before = (identity_of(t1), identity_of(t2))
            original(t1, t2)
            seen.append((*before, identity_of(t1), identity_of(t2)))

        return swap_tensors

    original = torch.utils.swap_tensors
    undo = patch_swap_tensors(make)
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        torch.nn.Linear(2, 2, bias=False).to(torch.float64)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
        undo()
    assert torch.utils.swap_tensors is original
    [(first, second, *after)] = seen
    assert first != second
    assert after == [second, first]


def test_patch_deep_copies() -> None:
    """Copies of tensors come through the door; a parameter clones itself, so that it works in a fake mode, too."""
    seen: list[torch.Tensor] = []

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def deepcopy(tensor: torch.Tensor, memo: dict[int, Any]) -> Any:
            seen.append(tensor)
            return original(tensor, memo)

        return deepcopy

    original = torch.Tensor.__deepcopy__
    undo = patch_deep_copies(make)
    tensor, parameter = torch.ones(2), torch.nn.Parameter(torch.ones(2))
    try:
        copied = copy.deepcopy([tensor, parameter])
    finally:
        undo()
    assert torch.Tensor.__deepcopy__ is original
    assert torch.equal(copied[0], tensor)
    assert len(seen) == 1
    assert seen[0] is tensor
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert copy.deepcopy(parameter).shape == (2,)


def test_swap_tensors_refuses_weak_references() -> None:
    """So the runtime has to take its own off; without them the same exchange works."""
    t1, t2 = torch.ones(2), torch.zeros(3)
    reference = weakref.ref(t1)
    with pytest.raises(RuntimeError, match="weakref"):
        torch.utils.swap_tensors(t1, t2)
    del reference
    torch.utils.swap_tensors(t1, t2)
    assert t1.shape == (3,)
