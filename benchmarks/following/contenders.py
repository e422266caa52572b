"""The ways to train that take turns, and the scopes of those that are torch's own or its users'.

A peer's name says what it does to every block of the model (a transformer layer, a bottleneck): `checkpoint` is what
`gradient_checkpointing_enable` of transformers does with `use_reentrant=False`, for any model. A checkpointed block
runs its batch norms twice a step, so that their running statistics differ from plain's; its gradients do not.
"""

from __future__ import annotations

import contextlib
import functools
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from benchmarks.following.offload import Offload
from benchmarks.turns import PLAIN, RECORD_ONLY

if TYPE_CHECKING:
    from collections.abc import Callable, Generator
    from contextlib import AbstractContextManager

    from torch import nn

CHECKPOINT, CHECKPOINT_2, SELECTIVE, OFFLOAD = "checkpoint", "checkpoint-2", "selective", "offload"
PEERS = (CHECKPOINT, CHECKPOINT_2, SELECTIVE, OFFLOAD)
REACTIVE, FOLLOWED, NO_PREFETCH = "reactive", "followed", "no-prefetch"
IN_BUDGET = (REACTIVE, FOLLOWED, NO_PREFETCH)
CONTENDERS = (PLAIN, RECORD_ONLY, *PEERS, *IN_BUDGET)

BLOCKS = (
    "GPT2Block",
    "BertLayer",
    "Bottleneck",
    "ResidualBlock",
    "PictureAttention",
    "TransformerEncoderLayer",
    "Block",
)
KEPT = frozenset(
    {
        torch.ops.aten.mm.default,
        torch.ops.aten.addmm.default,
        torch.ops.aten.bmm.default,
        torch.ops.aten.baddbmm.default,
        torch.ops.aten.convolution.default,
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    }
)
"""Ops whose outputs selective checkpointing keeps: products, convolutions and attention."""


def in_budget(name: str, label: str) -> str:
    """Return the name of one of `IN_BUDGET` in the budget of this label."""
    return f"{name} @ {label}"


def split(contender: str) -> tuple[str, str]:
    """Return a contender's kind and the label of its budget, which is empty for one without."""
    name, _, label = contender.partition(" @ ")
    return name, label


def scope(name: str, model: nn.Module) -> AbstractContextManager[object]:
    """Return the scope in which a peer, or plain, trains."""
    if name == PLAIN:
        return contextlib.nullcontext()
    if name == OFFLOAD:
        return Offload(model)
    if name == SELECTIVE:
        return checkpointed(model, context_fn=functools.partial(create_selective_checkpoint_contexts, _policy))
    return checkpointed(model, every=2 if name == CHECKPOINT_2 else 1)


def _policy(_context: Any, op: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in KEPT else CheckpointPolicy.PREFER_RECOMPUTE


@contextlib.contextmanager
def checkpointed(model: nn.Module, *, every: int = 1, context_fn: Callable[[], Any] | None = None) -> Generator[None]:
    """Checkpoint each block, or one in `every`."""
    blocks = find_blocks(model)[::every]
    settings: dict[str, Any] = {"use_reentrant": False}
    if context_fn is not None:
        settings["context_fn"] = context_fn
    for block in blocks:
        block.forward = functools.partial(checkpoint, block.forward, **settings)
    try:
        yield
    finally:
        for block in blocks:
            del block.forward


def find_blocks(model: nn.Module) -> list[nn.Module]:
    """Return the blocks of a model in their order.

    Raises:
        ValueError: It has none that this knows.
    """
    blocks = [module for module in model.modules() if type(module).__name__ in BLOCKS]
    if not blocks:
        raise ValueError(f"{type(model).__name__} has no module named {', '.join(BLOCKS)}")
    return blocks
