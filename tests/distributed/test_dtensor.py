"""DTensor: layers split over two real processes, and tensors that change their placement."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from tests.distributed.verdict import KINDS, PRESSED, assert_good, judge, replayed
from tests.runtime.parts import running_session
from tests.same_bits.judge import UNLIMITED, Scope, Step
from tests.sampling import keep
from torchdelta import MemoryBudget

if TYPE_CHECKING:
    from tests.distributed.pair import Pair

WIDTH = 64


class FeedForward(nn.Module):
    """Two products with an activation between them."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute."""
        return self.down(nn.functional.gelu(self.up(self.norm(x))))


def tensor_parallel(scope: Scope) -> dict[str, Any]:
    """Train blocks whose products are split by columns, then by rows, the norm by sequence."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    mesh = init_device_mesh("cpu", (2,))
    blocks = nn.ModuleList(FeedForward() for _ in range(3))
    for index, block in enumerate(blocks):
        plan: dict[str, Any] = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        if index == 1:
            plan = {
                "": PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Shard(1)),
                "norm": SequenceParallel(),
                "up": ColwiseParallel(input_layouts=Shard(1)),
                "down": RowwiseParallel(output_layouts=Shard(1)),
            }
        parallelize_module(block, mesh, plan)
    optimizer = torch.optim.AdamW(blocks.parameters(), lr=1e-2)
    losses, gradients = [], []
    rank = torch.distributed.get_rank()
    with scope():
        for _ in range(3):
            hidden = torch.randn(8, 32, WIDTH)
            hidden = hidden + nn.functional.dropout(blocks[0](hidden), 0.1)
            part = hidden.chunk(2, 1)[rank].contiguous()
            part = part + blocks[1](part).tanh()
            loss = part.exp().mean() + blocks[2](hidden).square().mean()
            loss.backward()
            losses.append(loss.detach())
            gradients += [local(parameter.grad) for parameter in blocks.parameters()]
            optimizer.step()
            optimizer.zero_grad()
    return {"losses": losses, "gradients": gradients, "parameters": [local(p.detach()) for p in blocks.parameters()]}


def redistributions(scope: Scope) -> dict[str, Any]:
    """Compute on tensors that are sharded, gathered, reduced and resharded on their way."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2,))
    weight = nn.Parameter(distribute_tensor(torch.randn(WIDTH, WIDTH), mesh, [Shard(0)]))
    x = torch.randn(32, WIDTH)
    with scope():
        for _ in range(2):
            rows = distribute_tensor(x, mesh, [Shard(0)])
            hidden = (rows @ weight.redistribute(mesh, [Replicate()])).sin()
            columns = hidden.redistribute(mesh, [Shard(1)]).exp()
            partial = (columns.t() @ columns).redistribute(mesh, [Replicate()])
            full = partial.full_tensor().tanh()
            again = DTensor.from_local(full[:16].contiguous(), mesh, [Shard(0)]) * 2
            (again.to_local().square().sum() + hidden.to_local().square().sum()).backward()
    return {"grad": local(weight.grad)}


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a tensor."""
    from torch.distributed.tensor import DTensor

    part = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    wait = getattr(part, "wait", None)  # a collective that is still under way
    return (wait() if wait is not None else part).clone()


def built(step: Step) -> Step:
    """Pass on a step that takes no arguments."""
    return step


@pytest.mark.parametrize("kind", keep(KINDS, ["recompute", PRESSED]))
def test_tensor_parallel(pair: Pair, kind: str) -> None:
    """What the split layers save is kept, what lies between them leaves, and no bit changes."""
    assert_good(pair.run(judge, "tensor parallel", built, (tensor_parallel,), kind, 0.9), kind)


@pytest.mark.parametrize("kind", ["recompute", "swap", "mixed"])
def test_redistribute(pair: Pair, kind: str) -> None:
    """Collectives inside and between DTensors are waited for, and nothing is taken for what it was before them."""
    assert_good(pair.run(judge, "redistribute", built, (redistributions,), kind), "")


def test_no_collective_is_replayed(pair: Pair) -> None:
    """Only aten ops run again."""
    for names in pair.run(replayed, built, tensor_parallel):
        assert names
        assert all(name.startswith("aten.") for name in names)


def peaks(rank: int) -> tuple[int, int]:
    """Return the bytes that a DTensor adds to what is counted, and those that its local part has."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    del rank
    mesh = init_device_mesh("cpu", (2,))
    full = torch.randn(1000, 100)
    with MemoryBudget(UNLIMITED):
        session = running_session()
        tensor = distribute_tensor(full, mesh, [Shard(0)])
        before_bytes = session.ledger.usage.live_bytes
        doubled = tensor * 2
        size_bytes = session.ledger.usage.live_bytes - before_bytes
        del doubled
        assert session.ledger.usage.live_bytes == before_bytes
    return size_bytes, tensor.to_local().numel() * 4


def test_local_bytes_are_counted(pair: Pair) -> None:
    """A DTensor counts with the bytes of its local part, and no longer than it lives."""
    for size_bytes, local_bytes in pair.run(peaks):
        assert size_bytes == local_bytes
