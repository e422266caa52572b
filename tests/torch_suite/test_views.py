"""Views of every kind, written in place through the view or through the base, before and after they are saved."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.torch_suite.budgets import assert_same, assert_same_failure

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.same_bits.judge import Scope

# Each takes a fresh contiguous (64, 64) tensor; what is returned is written in place.
VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "row": lambda t: t[3],
    "steps": lambda t: t[::2, 1::3],
    "transposed": lambda t: t.T,
    "diagonal": lambda t: t.diagonal(),
    "as_strided": lambda t: t.as_strided((30, 30), (65, 2), 7),
    "unfolded": lambda t: t.unfold(0, 4, 4),
    "narrowed": lambda t: t.narrow(1, 5, 20),
    "reshaped": lambda t: t.view(16, 256).movedim(0, 1)[1:3],
    "squeezed": lambda t: t.unsqueeze(0).unsqueeze(-1).squeeze(0),
    "complex": lambda t: torch.view_as_complex(t.view(64, 32, 2)).real,
    "detached": lambda t: t.detach(),
    "chain": lambda t: t[2:].T[::3].permute(1, 0)[5:9],
}


@pytest.mark.parametrize("name", VIEWS)
def test_writing_through_a_view(name: str) -> None:
    """The base is saved, written through a view, saved again, and the view is used as well."""

    def step(scope: Scope) -> dict[str, Any]:
        x, y = torch.randn(64, 64, requires_grad=True), torch.randn(64, 64, requires_grad=True)
        with scope():
            base = (x * 2).sin() * 0.5
            before = base * 3
            view = VIEWS[name](base)
            view.mul_(2).add_(0.25)
            if not view.requires_grad:
                base = base.clone()
            (base.exp() * y + before + VIEWS[name](base).cos().sum()).sum().backward()
        return {"x": x.grad, "y": y.grad, "base": base.detach()}

    assert_same(step)


def test_writing_one_of_several_views_is_torch_s_error() -> None:
    """A view from unbind or split may not be written in place while gradients are recorded."""

    def step(scope: Scope) -> dict[str, Any]:
        x = torch.randn(64, 64, requires_grad=True)
        with scope():
            first, _ = (x * 2).split(32)
            first.mul_(2)
        return {}

    assert_same_failure(step, RuntimeError)


def test_reading_several_views_of_a_base_that_is_written() -> None:
    """Views by split, chunk, unbind and tensor_split of a base that is written before they are read again."""

    def step(scope: Scope) -> dict[str, Any]:
        x = torch.randn(64, 64, requires_grad=True)
        with scope():
            base = (x * 2).sin()
            total = base.sum()
            base.mul_(2)
            for parts in (base.split(16), base.chunk(3, 1), base.unbind(), base.tensor_split(5)):
                total = total + sum((part * part.exp()).sum() for part in parts)
            total.backward()
        return {"grad": x.grad}

    assert_same(step)


def test_expanded_views() -> None:
    """Expanded tensors are saved with strides of zero, and copies of them are written."""

    def step(scope: Scope) -> dict[str, Any]:
        x = torch.randn(64, 1, requires_grad=True)
        with scope():
            wide = (x * 2).sin().expand(64, 64)
            product = wide * wide.T.expand(2, 64, 64)
            written = wide.contiguous().mul_(product[0]).exp_()
            torch.broadcast_to(written[0], (8, 64)).tanh().sum().add((product * wide).sum()).backward()
        return {"grad": x.grad}

    assert_same(step)


def test_as_strided_with_overlap() -> None:
    """Overlapping windows of one storage are saved as views of it."""

    def step(scope: Scope) -> dict[str, Any]:
        x = torch.randn(4096, requires_grad=True)
        with scope():
            hidden = (x * 2).sin()
            windows = hidden.as_strided((200, 64), (20, 1), 3)
            (windows.exp() * windows).sum().backward()
        return {"grad": x.grad}

    assert_same(step)


def test_writes_by_index_mask_and_scatter() -> None:
    """Index assignment, masks, scatters and copies into a part, of a tensor that was saved in between."""

    def step(scope: Scope) -> dict[str, Any]:
        x, y = torch.randn(64, 64, requires_grad=True), torch.randn(64, requires_grad=True)
        order = torch.randperm(64)
        with scope():
            base = (x * 2).sin()
            total = base.sum()
            base[order[:8]] = y * 2
            base = base.clone()
            total = total + base.exp().sum()
            base = base * 1
            base[base > 0.5] = 0.25
            base.index_add_(0, order, torch.ones(64, 64) * y)
            base.scatter_(1, order[None].expand(64, -1), base.detach().cos())
            base.masked_fill_(base < -1, 0).index_copy_(0, order[:2], torch.stack([y, y]))
            (total + (base * base).sum()).backward()
        return {"x": x.grad, "y": y.grad}

    assert_same(step)


def test_views_made_without_gradients() -> None:
    """A view made under no_grad of a leaf that is written there, as optimizers and initialisers do."""

    def step(scope: Scope) -> dict[str, Any]:
        x = torch.randn(64, 64, requires_grad=True)
        with scope():
            for _ in range(2):
                (x * 2).sin().exp().sum().backward()
                with torch.no_grad():
                    x[::2].mul_(0.5)
                    x.view(-1)[:10].zero_()
                    x.T.add_(x.grad, alpha=0.01)
                    x.grad.zero_()
        return {"x": x}

    assert_same(step)


def test_a_saved_view_whose_base_is_gone() -> None:
    """Only a small view of a large result is saved, and nothing else holds the result."""

    def step(scope: Scope) -> dict[str, Any]:
        x = torch.randn(64, 64, requires_grad=True)
        with scope():
            pieces = [(x * factor).sin()[factor, 3:40] for factor in range(1, 6)]
            total = sum((piece * piece).sum() for piece in pieces)
            del pieces
            total.backward()
        return {"grad": x.grad}

    assert_same(step)


def test_writes_to_what_was_saved_stay_errors() -> None:
    """Writing a saved tensor through a view of a view is seen, also after the tensor was evicted."""

    def step(scope: Scope) -> dict[str, Any]:
        x = torch.randn(64, 64, requires_grad=True)
        with scope():
            hidden = (x * 2).sin()
            out = hidden.exp() * hidden
            hidden.view(-1)[5:][::2].zero_()
            out.sum().backward()
        return {}

    assert_same_failure(step, RuntimeError)
