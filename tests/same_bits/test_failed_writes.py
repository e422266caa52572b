"""Ops that raise while they write, and are caught: a write that may have happened in part is a write."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.same_bits.judge import assert_same_bits

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.same_bits.judge import Scope

SIZE = 4096


class RaisesInOps(torch.Tensor):
    """A tensor whose ops raise, as those of a DTensor do beside plain tensors."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Raise in all but `detach`."""
        if func is torch.ops.aten.detach.default:
            return super().__torch_dispatch__(func, types, args, kwargs or {})
        raise ValueError("mixed")


def _beyond_its_end() -> torch.Tensor:
    return torch.cat([torch.arange(SIZE - 1), torch.tensor([SIZE])])


WRITES: dict[str, Callable[[torch.Tensor], object]] = {
    "another shape": lambda x: x.add_(torch.ones(5)),
    "the second of a list": lambda x: torch._foreach_add_([x, torch.ones(3)], [torch.ones(SIZE), torch.ones(5)]),  # type: ignore[arg-type]
    "scatter_": lambda x: x.scatter_(0, _beyond_its_end(), torch.ones(SIZE)),
    "index_put_": lambda x: x.index_put_((_beyond_its_end(),), torch.ones(SIZE)),
    "resize_": lambda x: x.untyped_storage().resize_(-1),
}


@pytest.mark.parametrize("way", WRITES)
@pytest.mark.parametrize("in_hook", [False, True], ids=["in forward", "in a hook"])
def test_a_write_that_raises(way: str, *, in_hook: bool) -> None:
    """Replays read what was there before, the program what is there now; and torch's own error is raised."""

    def step(scope: Scope) -> dict[str, Any]:
        source, weight = torch.arange(1.0, SIZE + 1) / SIZE, torch.ones(SIZE, requires_grad=True)

        def write(*_gradient: torch.Tensor) -> None:
            with torch.no_grad(), pytest.raises((RuntimeError, IndexError)):
                WRITES[way](source)

        with scope():
            product = source * 3 * weight
            if in_hook:
                product.register_hook(write)
            else:
                write()
            (product * 2 + source).sin().sum().backward()
        return {"gradient": weight.grad, "source": source}

    assert_same_bits(step)


def test_a_subclass_that_raises_where_it_would_write_a_saved_tensor() -> None:
    """The plain tensor beside it keeps its content, which autograd has saved."""

    def step(scope: Scope) -> dict[str, Any]:
        source, weight = torch.arange(1.0, SIZE + 1) / SIZE, torch.ones(SIZE, requires_grad=True)
        with scope():
            loss = (source * weight).sum()
            with pytest.raises(ValueError, match="mixed"):
                source.add_(torch.ones(SIZE).as_subclass(RaisesInOps))
            loss.backward()
        return {"gradient": weight.grad}

    assert_same_bits(step)


def test_an_optimizer_step_that_raises_in_its_middle() -> None:
    """Parameters that it has updated keep their updates, and the next step trains."""

    def step(scope: Scope) -> dict[str, Any]:
        model = torch.nn.Sequential(*(torch.nn.Linear(32, 32) for _ in range(3)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=True)
        with scope():
            for index in range(3):
                model(torch.randn(64, 32)).square().mean().backward()
                if index == 1:
                    optimizer.state[model[1].weight]["momentum_buffer"] = torch.zeros(3)
                    with pytest.raises(RuntimeError):
                        optimizer.step()
                    optimizer.state[model[1].weight]["momentum_buffer"] = torch.zeros(32, 32)
                else:
                    optimizer.step()
        return dict(model.named_parameters())

    assert_same_bits(step)
