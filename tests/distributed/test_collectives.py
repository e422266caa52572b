"""Collectives in the forward of a model: never replayed, and what they wrote is what backward reads."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.distributed.verdict import assert_good, judge, replayed

if TYPE_CHECKING:
    from tests.distributed.pair import Pair
    from tests.same_bits.judge import Scope, Step

SIZE = 96


class AllReduce(torch.autograd.Function):
    """Adds up in place what all ranks have, as tensor-parallel layers do after their last product."""

    @staticmethod
    def forward(_ctx: Any, x: torch.Tensor) -> torch.Tensor:
        """Add up."""
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(_ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        """Pass on."""
        return gradient


class AllReduceLater(AllReduce):
    """The same, with other work while it is under way."""

    @staticmethod
    def forward(_ctx: Any, x: torch.Tensor) -> torch.Tensor:
        """Add up, and wait at the end."""
        work = dist.all_reduce(x, async_op=True)
        torch.randn(64, 64).exp()
        work.wait()
        return x


class Gather(torch.autograd.Function):
    """Puts together what all ranks have."""

    @staticmethod
    def forward(_ctx: Any, x: torch.Tensor) -> torch.Tensor:
        """Gather by the list, and by the flat tensor: both spellings."""
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x)
        whole = x.new_empty(dist.get_world_size() * x.shape[0], *x.shape[1:])
        dist.all_gather_into_tensor(whole, x)
        return torch.cat(parts) + whole

    @staticmethod
    def backward(_ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        """Return this rank's rows."""
        return gradient.chunk(dist.get_world_size())[dist.get_rank()] * 2


class Exchange(torch.autograd.Function):
    """Sends rows to the other rank, and takes what the first one says."""

    @staticmethod
    def forward(_ctx: Any, x: torch.Tensor) -> torch.Tensor:
        """Exchange, scatter, reduce, broadcast."""
        received = torch.empty_like(x)
        dist.all_to_all_single(received, x.contiguous())
        other = torch.empty_like(x)
        requests = [
            dist.irecv(other, 1 - dist.get_rank()),
            dist.isend(received, 1 - dist.get_rank()),
        ]
        for request in requests:
            request.wait()
        total = torch.empty_like(x[: x.shape[0] // 2])
        dist.reduce_scatter_tensor(total, other + x)
        dist.broadcast(total, 0)
        return torch.cat((total, received[: x.shape[0] // 2]))

    @staticmethod
    def backward(_ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        """Pass on."""
        return gradient


def functional(x: torch.Tensor) -> torch.Tensor:
    """Reduce and gather by the functional collectives, whose results are waited for at their first use."""
    from torch.distributed import _functional_collectives as collectives

    total = collectives.all_reduce(x.detach() * 2, "sum", dist.group.WORLD)
    gathered = collectives.all_gather_tensor(x.detach(), 0, dist.group.WORLD)
    return x * total.sigmoid() + gathered.chunk(2)[0].exp()


def functional_with_gradient(x: torch.Tensor) -> torch.Tensor:
    """Reduce by the functional collective that autograd knows."""
    from torch.distributed import nn as distributed_nn

    return distributed_nn.all_reduce(x * 1.5) * x


STAGES = {
    "in place": AllReduce.apply,
    "later": AllReduceLater.apply,
    "gather": lambda x: Gather.apply(x)[: x.shape[0]],
    "exchange": Exchange.apply,
    "functional": functional,
    "with gradient": functional_with_gradient,
}


def through(name: str) -> Step:
    """Make a step whose activations pass through a collective."""

    def step(scope: Scope) -> dict[str, Any]:
        up, down = nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE)
        torch.manual_seed(dist.get_rank())
        x = torch.randn(SIZE, SIZE)
        with scope():
            for _ in range(2):
                hidden = STAGES[name](up(x).tanh() * 2)
                hidden = down(hidden.sin() * hidden).exp()
                (hidden * hidden).mean().backward()
        return {"up": up.weight.grad, "down": down.weight.grad}

    return step


@pytest.mark.parametrize("kind", ["recompute", "swap", "mixed"])
@pytest.mark.parametrize("name", STAGES)
def test_same_bits(pair: Pair, name: str, kind: str) -> None:
    """A collective writes its arguments without a word in its schema; replays must not go behind it."""
    assert_good(pair.run(judge, f"collective {name}", through, (name,), kind), kind)


@pytest.mark.parametrize("name", STAGES)
def test_no_collective_is_replayed(pair: Pair, name: str) -> None:
    """Only aten ops run again."""
    for names in pair.run(replayed, through, name):
        assert names
        assert all(replayed_name.startswith("aten.") for replayed_name in names)
