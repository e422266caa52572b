"""The ledger's count against the allocator's, which knows nothing of it."""

from __future__ import annotations

import gc
import math
import weakref
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from tests.runtime.programs import Allocations, Attention, Residual, mlp, running
from torchdelta.native.build import is_switched_off
from torchdelta.runtime.state.ledger import Ledger
from torchdelta.runtime.state.storages import dense_bytes

if TYPE_CHECKING:
    from collections.abc import Callable

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd-momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adamw-foreach": lambda parameters: torch.optim.AdamW(parameters, foreach=True),
    "adamw-loop": lambda parameters: torch.optim.AdamW(parameters, foreach=False),
}
MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "perceptron": (mlp, (32, 64)),
    "attention": (lambda: nn.Sequential(Attention(), Attention()), (4, 16, 32)),
    "residual": (lambda: nn.Sequential(Residual(), Residual()), (4, 8, 12, 12)),
}


@pytest.mark.parametrize("optimizer_name", OPTIMIZERS)
@pytest.mark.parametrize("model_name", MODELS)
def test_live_bytes_are_the_allocators(model_name: str, optimizer_name: str) -> None:
    """After every phase of a step, the ledger has counted what the allocator handed out."""
    allocations = Allocations()
    gc.collect()
    make, shape = MODELS[model_name]
    with allocations.watch():
        model = make()
        x = torch.randn(shape)
        optimizer = OPTIMIZERS[optimizer_name](model.parameters())
    with running() as (_, session):
        before_bytes = session.ledger.usage.live_bytes - allocations.live_bytes
        for _ in range(2):
            with allocations.watch():
                loss = model(x).square().mean()
            assert session.ledger.usage.live_bytes - before_bytes == allocations.live_bytes
            with allocations.watch():
                loss.backward()
            assert session.ledger.usage.live_bytes - before_bytes == allocations.live_bytes
            with allocations.watch():
                optimizer.step()
            assert session.ledger.usage.live_bytes - before_bytes == allocations.live_bytes
            with allocations.watch():
                optimizer.zero_grad()
                del loss
            assert session.ledger.usage.live_bytes - before_bytes == allocations.live_bytes


@pytest.mark.parametrize("model_name", ["perceptron", "attention"])
def test_recorded_peak_is_the_allocators(model_name: str) -> None:
    """The recorded peak of a plain step is within one percent of the allocator's."""
    allocations = Allocations()
    gc.collect()
    make, shape = MODELS[model_name]
    with allocations.watch():
        model = make()
        x = torch.randn(shape)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with running() as (budget, session):
        before_bytes = session.ledger.usage.live_bytes - allocations.live_bytes
        with allocations.watch():
            for _ in range(2):
                model(x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
    assert budget.summary().peak_bytes - before_bytes == pytest.approx(allocations.peak_bytes, rel=0.01)


def _resize_in_place(x: torch.Tensor) -> Any:
    x.resize_(3 * x.numel())
    return x


def _out_that_grows(x: torch.Tensor) -> Any:
    out = torch.empty(0)
    torch.add(x, 1, out=out)
    return out


def _out_that_fits(x: torch.Tensor) -> Any:
    out = torch.empty_like(x)
    torch.mul(x, 2, out=out)
    return out


def _new_data(x: torch.Tensor) -> Any:
    holder = nn.Parameter(x * 2)
    holder.data = torch.zeros(7)
    return holder


def _set_storage(x: torch.Tensor) -> Any:
    other = torch.empty(5)
    other.set_((x * 2).untyped_storage(), 0, x.shape)
    return other


def _views(x: torch.Tensor) -> Any:
    y = x * 2
    return [y.t(), y.reshape(-1), y[1:], y.expand(3, *y.shape), y.view(torch.int32)]


def _many_outputs(x: torch.Tensor) -> Any:
    return [*x.sort(), *x.split(2), *torch.var_mean(x, 0), x.unbind()]


def _foreach(x: torch.Tensor) -> Any:
    made = torch._foreach_add([x, x + 1], 2.0)
    torch._foreach_mul_(made, 3.0)
    return made


def _grad_mode_off(x: torch.Tensor) -> Any:
    with torch.no_grad():
        return (x * 2).sin_().add_(1)


def _expanded(x: torch.Tensor) -> Any:
    return torch.zeros(1).expand(100).clone(), torch.empty_strided((4, 4), (16, 1)).fill_(x[0, 0].item())


def _garbage(x: torch.Tensor) -> Any:
    for _ in range(5):
        x = x.sin() + 1
    return None


PROGRAMS: list[Callable[[torch.Tensor], Any]] = [
    _resize_in_place,
    _out_that_grows,
    _out_that_fits,
    _new_data,
    _set_storage,
    _views,
    _many_outputs,
    _foreach,
    _grad_mode_off,
    _expanded,
    _garbage,
]


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__.strip("_"))
def test_live_bytes_after_unusual_allocations(program: Callable[[torch.Tensor], Any]) -> None:
    """Resizes, `out=`, storage changes, views and temporaries leave the ledger equal to the allocator."""
    allocations = Allocations()
    gc.collect()
    with allocations.watch():
        x = torch.randn(16, 16)
    with running() as (_, session):
        before_bytes = session.ledger.usage.live_bytes - allocations.live_bytes
        with allocations.watch():
            kept = program(x)
        assert session.ledger.usage.live_bytes - before_bytes == allocations.live_bytes
        del kept


def test_storage_is_counted_once_and_until_it_dies() -> None:
    """Views add nothing, and the last tensor takes the bytes with it."""
    ledger = Ledger("cpu")
    x = torch.zeros(100)
    ledger.know(x.untyped_storage())
    ledger.know(x[3:].untyped_storage())
    assert ledger.usage.live_bytes == 400
    view = x.view(10, 10)
    del x
    assert ledger.usage.live_bytes == 400
    del view
    assert ledger.usage.live_bytes == 0
    assert ledger.usage.peak_bytes == 400
    assert not ledger.records


def test_storage_known_through_its_tensors_dies_with_the_last() -> None:
    """In backward no storage object is made: the tensors are watched instead."""
    ledger = Ledger("cpu")
    x = torch.zeros(100)
    record = ledger.know_by_tensor(x)
    assert record is not None
    assert (record.storage() is None) is not is_switched_off()  # without native parts, the object is watched
    y = x.view(10, 10)
    ledger.know_by_tensor(y)
    del x
    assert ledger.usage.live_bytes == 400
    del y
    assert ledger.usage.live_bytes == 0


def test_alias_made_out_of_sight_keeps_the_storage_counted() -> None:
    """The engine's own alias of a new gradient is not announced: the record changes over to the storage object."""
    ledger = Ledger("cpu")
    x = torch.zeros(100)
    ledger.know_by_tensor(x)
    unseen = x.detach()
    del x
    assert ledger.usage.live_bytes == 400
    del unseen
    assert ledger.usage.live_bytes == 0


def _exchange_data(tensor: torch.Tensor) -> None:
    tensor.data = torch.empty(0)


def _exchange_by_set(tensor: torch.Tensor) -> None:
    tensor.set_(torch.empty(0))


@pytest.mark.parametrize("exchange", [_exchange_data, _exchange_by_set])
def test_exchanged_storage_is_swept(exchange: Callable[[torch.Tensor], None]) -> None:
    """A storage that dies because its tensor took another one stands in no count after a sweep."""
    ledger = Ledger("cpu")
    x = torch.zeros(100)
    ledger.know_by_tensor(x)
    exchange(x)
    ledger.sweep()
    assert ledger.usage.live_bytes == 0
    assert not ledger.records
    del x
    assert ledger.usage.live_bytes == 0


def test_exchanged_storage_is_not_taken_for_another() -> None:
    """Storages made after an exchange are never found under the record of the one that died."""
    ledger = Ledger("cpu")
    x = torch.zeros(100)
    ledger.know_by_tensor(x)
    x.data = torch.empty(0)
    assert all(ledger.find(torch.zeros(100)) is None for _ in range(100))
    del x
    assert ledger.usage.live_bytes == 0


def test_exchanged_storage_that_another_tensor_holds_stays_counted() -> None:
    """The tensor that was watched is gone, its former storage is not."""
    ledger = Ledger("cpu")
    x = torch.zeros(100)
    ledger.know_by_tensor(x)
    unseen = x.detach()
    x.data = torch.empty(0)
    del x
    assert ledger.usage.live_bytes == 400
    del unseen
    assert ledger.usage.live_bytes == 0


def test_size_of_a_storage_is_corrected_when_its_object_is_known() -> None:
    """A tensor that took a part of a larger storage was counted by its own size until then."""
    ledger = Ledger("cpu")
    x = torch.zeros(0)
    x.data = torch.zeros(100)[:10]
    ledger.know_by_tensor(x)
    ledger.know(x.untyped_storage())
    assert ledger.usage.live_bytes == 400


def test_other_devices_are_not_counted() -> None:
    """What lives on no counted device costs nothing."""
    ledger = Ledger("cpu")
    x = torch.zeros(100, device="meta")
    ledger.know(x.untyped_storage())
    assert ledger.usage.live_bytes == 0


def test_layouts_without_a_storage_are_not_counted() -> None:
    """Sparse tensors have no storage to know."""
    ledger = Ledger("cpu")
    assert ledger.know_by_tensor(torch.eye(3).to_sparse()) is None
    assert ledger.usage.live_bytes == 0


@pytest.mark.parametrize(
    ("shape", "stride"),
    [((4, 4), (4, 1)), ((4, 4), (16, 1)), ((3, 5), (1, 3)), ((7,), (0,)), ((0, 4), (4, 1)), ((), ())],
)
def test_dense_bytes_are_the_extent_of_the_strides(shape: tuple[int, ...], stride: tuple[int, ...]) -> None:
    """The storage behind a fresh tensor is as large as its strides reach."""
    tensor = torch.empty_strided(shape, stride)
    assert dense_bytes(tensor) == tensor.untyped_storage().nbytes()
    assert math.prod(shape) == tensor.numel()


def test_forgetting_stops_the_count() -> None:
    """After `forget`, a storage that dies takes nothing below zero."""
    ledger = Ledger("cpu")
    x = torch.zeros(100)
    ledger.know(x.untyped_storage())
    ledger.forget()
    del x
    assert ledger.usage.live_bytes == 0


@pytest.mark.parametrize("ending", ["death", "forgetting"])
def test_records_wait_for_no_collector(ending: str) -> None:
    """A record and its weak reference must not hold each other.

    Dead pairs would stay on the lists of storages that live on.
    """
    ledger = Ledger("cpu")
    x, y = torch.zeros(100), torch.zeros(100)
    ledger.know(x.untyped_storage())
    ledger.know_by_tensor(y)
    gc.collect()
    if ending == "death":
        del x, y
    else:
        ledger.forget()
        assert weakref.getweakrefcount(x.untyped_storage()) == 0
        assert weakref.getweakrefcount(y) == 0
    assert gc.collect() == 0


def test_sessions_leave_nothing_on_storages() -> None:
    """Scope after scope, a parameter's storage carries no more weak references than before."""
    x = torch.randn(64, 64, requires_grad=True)
    gc.collect()
    gc.disable()
    try:
        for _ in range(3):
            with running():
                (x * 2).sin().sum().backward()
            assert weakref.getweakrefcount(x.untyped_storage()) == 0
    finally:
        gc.enable()


def test_cut_forgets_how_everything_was_made() -> None:
    """After a cut nothing that lives can be replayed, and nothing is held."""
    x = torch.randn(64, 64, requires_grad=True)
    with running() as (_, session):
        y = (x * 2).sin()
        ledger = session.ledger
        assert ledger.held
        assert any(record.current is not None and record.current.op is not None for record in ledger.records.values())
        ledger.cut()
        assert not ledger.held
        assert all(record.current is None or record.current.op is None for record in ledger.records.values())
    del y
