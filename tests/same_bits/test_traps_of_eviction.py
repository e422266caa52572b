"""The traps of evicting and replaying eager ops (15 to 30): one test a trap, judged from outside.

Each docstring names the trap by its number in the project's list. Not here, because a step cannot show them: 23 and 24
(the cost of copying and of dispatch) and 25 (global kernel settings changed in mid-step).
"""

from __future__ import annotations

import contextlib
import gc
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - its name everywhere
from torch import nn

from tests.same_bits.judge import (
    UNLIMITED,
    Scope,
    assert_same_bits,
    assert_same_error,
    seed_everything,
    state_of,
    tracked_bytes,
)
from torchdelta import Config, MemoryBudget
from torchdelta._torch.storages import storage_address
from torchdelta._torch.tensors import neg_view


def leaf(*shape: int) -> torch.Tensor:
    """Draw a leaf that wants a gradient."""
    return torch.randn(*(shape or (8, 8)), requires_grad=True)


def test_zero_dimensional_tensors_keep_their_promotion() -> None:
    """Trap 15: a wrapped number promotes differently from a tensor of the same shape and dtype."""

    def step(scope: Scope) -> dict[str, Any]:
        x = leaf().double().detach().requires_grad_()
        with scope():
            scale = (x.mean() * 2.5) / 3
            half = torch.arange(8) * 0.5
            (half * scale * x.float()).pow(2).sum().backward()
        return {"grad": x.grad, "half": half}

    assert_same_bits(step)


@pytest.mark.parametrize("is_read_whole", [False, True])
def test_numbers_that_are_elements_of_a_small_tensor(*, is_read_whole: bool) -> None:
    """Each is read by itself in a replay, whichever was read first, or whether the tensor was read as a whole."""

    def step(scope: Scope) -> dict[str, Any]:
        x, weights = leaf().double().detach().requires_grad_(), torch.tensor([2.0, 3.0])
        with scope():
            if is_read_whole:
                weights.sum()
            losses = [(x * 1 * weights[index]).sin() for index in range(2)]
            bits = (x * 1 * weights[0].view(torch.int32)).cos()  # the same bytes as another number
            torch.stack([*losses, bits]).sum().backward()
        return {"grad": x.grad}

    assert_same_bits(step)


def test_conjugate_and_negative_views() -> None:
    """Trap 16: the bits that make a view conjugate or negative stand in no stride."""

    def step(scope: Scope) -> dict[str, Any]:
        x = leaf()
        with scope():
            z = torch.complex(x.sin(), x.cos())
            (z.conj() * z.mH).imag.exp().tanh().sum().backward(retain_graph=True)
            (neg_view(x * 2).sin() * (z.conj().imag * 3)).sum().backward()
        return {"grad": x.grad}

    assert_same_bits(step)


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.parametrize("layout", ["coo", "csr", "mkldnn"])
def test_layouts_without_a_storage(layout: str) -> None:
    """Trap 17: sparse and opaque tensors are left as they are."""

    def step(scope: Scope) -> dict[str, Any]:
        x, other = leaf(), torch.randn(8, 8).relu()
        with scope():
            y = (x * 2).sin()
            if layout == "mkldnn":
                result = y.to_mkldnn().relu().to_dense()
            else:
                sparse = other.to_sparse() if layout == "coo" else other.to_sparse_csr()
                result = torch.sparse.mm(sparse, y)
            result.exp().sum().backward()
        return {"grad": x.grad}

    assert_same_bits(step)


def test_leaf_written_after_saving() -> None:
    """Trap 18: autograd drops its own version check where hooks are, so ours must be there."""

    def step(scope: Scope) -> dict[str, Any]:
        w, x = leaf(), leaf()
        with scope():
            y = x @ w
            with torch.no_grad():
                w.add_(1)
            y.sum().backward()
        return {"grad": x.grad}

    assert_same_error(step, RuntimeError)


def test_storage_addresses_that_are_used_again() -> None:
    """Trap 19: a freed storage's address becomes another storage's, with other content."""

    def step(scope: Scope) -> dict[str, Any]:
        x = leaf(32, 32)
        total = torch.zeros(())
        with scope():
            for index in range(12):
                y = (x * index).sin()
                y = y.cos() if index % 2 else y.exp()
                total = total + y.mean()
                del y
            total.backward()
        return {"grad": x.grad}

    assert_same_bits(step)


def test_masks_without_gradients_are_evicted_too() -> None:
    """Trap 20: a dropout mask is a "leaf" by autograd's word and yet the result of an op."""
    asked: list[str] = []

    def decide(buffer: Any) -> str:
        asked.append(buffer.op)
        return "swap"

    x = leaf(64, 64)
    with MemoryBudget(UNLIMITED, Config(decisions=decide, tier="memory")) as budget:
        F.dropout(x * 2, 0.5).sin().sum().backward()
    assert any(name in op for op in asked for name in ("dropout", "bernoulli", "div_")), asked
    assert budget.summary().swapped_out_bytes >= x.nbytes


@pytest.mark.parametrize("where", ["forward", "backward", "after"])
def test_exception_leaves_nothing_behind(where: str) -> None:
    """Trap 21: a traceback keeps the graph alive after the scope; all is given back when it dies."""
    model, x = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Dropout(0.1)), torch.randn(16, 64)
    before_bytes = tracked_bytes()

    def fail() -> None:
        with MemoryBudget(UNLIMITED, Config(decisions="swap", tier="memory")):
            hidden = model(x * 2)
            if where == "forward":
                raise KeyError
            if where == "backward":
                hidden.register_hook(lambda _grad: (_ for _ in ()).throw(KeyError()))
            hidden.sum().backward()
        raise KeyError

    kept: list[BaseException] = []
    for _ in range(3):
        with contextlib.suppress(KeyError):
            try:
                fail()
            except KeyError as error:
                kept.append(error)
                raise
    kept.clear()
    model.zero_grad()
    assert tracked_bytes() == before_bytes


def test_saved_tensors_asked_for_many_times() -> None:
    """Trap 22: retained graphs, gradients of gradients and nested checkpoints unpack the same handle again."""

    def step(scope: Scope) -> dict[str, Any]:
        model, x = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 1)), leaf(4, 8)
        with scope():
            hidden = torch.utils.checkpoint.checkpoint(model, x * 2, use_reentrant=False)
            value = hidden.sum() + model(x).sum()
            (grad,) = torch.autograd.grad(value, x, create_graph=True)
            (value + grad.pow(2).sum()).backward(retain_graph=True)
            value.backward()
        return state_of(model, grad=x.grad)

    assert_same_bits(step)


def test_models_that_draw_from_numpy_and_random() -> None:
    """Trap 26: the judge seeds every generator, so that such a step equals itself."""

    def step(scope: Scope) -> dict[str, Any]:
        x = leaf()
        with scope():
            mask = torch.from_numpy(np.random.rand(8, 8) > 0.5)  # noqa: NPY002
            ((x * 2).sin() * mask).exp().sum().backward()
        return {"grad": x.grad, "not-a-number": torch.tensor(float("nan"))}

    assert_same_bits(step)


@pytest.mark.parametrize("decisions", ["recompute", "swap"])
def test_no_storage_waits_for_the_collector(decisions: str) -> None:
    """Trap 27: a reference cycle in replay would hold storages until a collection; with none, all must go at once."""
    seed_everything()
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.GELU()) for _ in range(4)))
    x = torch.randn(32, 64)

    def live_bytes() -> int:
        sizes = {
            storage_address(thing): thing.untyped_storage().nbytes()
            for thing in gc.get_objects()
            if issubclass(type(thing), torch.Tensor)
        }
        return sum(sizes.values())

    with MemoryBudget(UNLIMITED, Config(decisions=decisions, tier="memory")):
        model(x).sum().backward()
        gc.collect()
        gc.disable()
        try:
            model(x).sum().backward()
            after_first_bytes = live_bytes()
            model(x).sum().backward()
            assert live_bytes() == after_first_bytes
        finally:
            gc.enable()


def test_replay_of_ops_with_several_outputs() -> None:
    """Trap 28: siblings of a replayed output are counted once, and long shared chains end."""

    def step(scope: Scope) -> dict[str, Any]:
        x = leaf(4, 16)
        with scope():
            values, indices = (x * 2).sort(-1)
            top, positions = values.sin().topk(4, -1)
            mean, variance = torch.var_mean(top.exp(), -1)[::-1]
            shared = values.tanh()
            for _ in range(20):
                shared = shared.sin() + shared.cos() * values
            gathered = torch.gather(shared, -1, indices).cos() * torch.gather(values, -1, positions).mean()
            (gathered.sum() + (mean * variance).sum() + torch.stack(shared.unbind(1)[:3]).exp().sum()).backward()
        return {"grad": x.grad}

    assert_same_bits(step)


def test_formulas_that_ask_for_dispatch_modes() -> None:
    """Trap 29: derivatives of prod and masked_fill take another path while any mode is on."""

    def step(scope: Scope) -> dict[str, Any]:
        x, value = leaf(7, 9), torch.randn((), requires_grad=True)
        with scope():
            y = (x * 2).prod(0).sin()
            mask = torch.rand(300, 9) > 0.3
            z = (y * torch.randn(300, 9)).masked_fill(mask, value * 3)
            ((z * torch.randn(300, 9)).sum() + (x * 3).prod(1).cos().sum()).backward()
        return {"grad": x.grad, "value": value.grad}

    assert_same_bits(step)


@pytest.mark.parametrize("kind", [tuple, torch.tensor], ids=["tuples", "tensors"])
def test_connectionist_temporal_classification(kind: Any) -> None:
    """Trap 30: replaying this loss gave wrong gradients; it must not be recomputed."""

    def step(scope: Scope) -> dict[str, Any]:
        x = leaf(50, 3, 15)
        targets = torch.randint(1, 15, (3, 30), dtype=torch.int32)
        with scope():
            loss = F.ctc_loss((x * 1.5).log_softmax(-1), targets, kind([50, 50, 50]), kind([30, 25, 20]))
            (loss * 2).backward()
        return {"loss": loss, "grad": x.grad}

    assert_same_bits(step)
