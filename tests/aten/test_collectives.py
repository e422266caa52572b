"""What is known of collectives beyond their schemas."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from torchdelta.aten.collectives import may_be_under_way
from torchdelta.aten.facts import Kind, facts_of

if not torch.distributed.is_available():
    pytest.skip("torch was built without torch.distributed", allow_module_level=True)
import torch.distributed._functional_collectives  # registers `_c10d_functional`

c10d, functional = torch.ops.c10d, torch.ops._c10d_functional


@pytest.mark.parametrize(
    ("op", "positions"),
    [
        (c10d.allreduce_.default, (0,)),
        (c10d.broadcast_.default, (0,)),
        (c10d.reduce_.default, (0,)),
        (c10d.recv_.default, (0,)),
        (c10d.allgather_.default, (0,)),
        (c10d._allgather_base_.default, (0,)),
        (c10d.reduce_scatter_.default, (0,)),
        (c10d.alltoall_base_.default, (0,)),
        (c10d.gather_.default, (0,)),
        (c10d.scatter_.default, (0,)),
        *([(functional.irecv.default, (0,))] if hasattr(functional, "irecv") else []),  # from torch 2.12 on
    ],
)
def test_what_they_write(op: Any, positions: tuple[int, ...]) -> None:
    """Their outputs are written, their inputs are not, and none is ever replayed."""
    facts = facts_of(op)
    assert facts.kind is Kind.WRITE
    assert facts.written_positions == positions
    assert facts.is_collective
    assert not facts.is_recomputable


SILENT = [getattr(c10d, name).default for name in ("send", "barrier", "check_for_nan") if hasattr(c10d, name)]


@pytest.mark.parametrize("op", SILENT)
def test_what_writes_nothing(op: Any) -> None:
    """Sending and waiting leave tensors alone."""
    assert facts_of(op).kind is Kind.NO_OUTPUT


def test_what_passes_its_argument_on() -> None:
    """Waiting gives back the tensor that it took."""
    assert facts_of(functional.wait_tensor.default).kind is Kind.VIEW


def test_when_they_are_over() -> None:
    """Without `async_op` the caller waits at once; without the argument nobody knows."""
    arguments = ([torch.ones(1)], None, None, None)
    assert not may_be_under_way(c10d.allreduce_.default, (*arguments, False), None)
    assert may_be_under_way(c10d.allreduce_.default, (*arguments, True), None)
    assert may_be_under_way(c10d.allreduce_.default, arguments, None)
    assert not may_be_under_way(c10d.allreduce_.default, arguments, {"async_op": False})
    assert may_be_under_way(functional.all_reduce_.default, arguments, None)
    assert not may_be_under_way(torch.ops.aten.add.Tensor, arguments, None)
