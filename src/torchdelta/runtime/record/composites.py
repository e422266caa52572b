"""Runs an op that returns either a view or a copy as the ops that it consists of, each of which is one or the other.

Autograd runs such ops (`contiguous`, `reshape`, `to`) as their parts, so a dispatch mode sees only these. In inference
mode, and in what a program's own dispatch mode or a tensor subclass calls, autograd is off, and the ops arrive whole.
Their schema says that they return views, but a copy needs room.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from torchdelta._torch.ops import decompose

if TYPE_CHECKING:
    from torchdelta._torch.modes import TorchDispatchMode
    from torchdelta.runtime.follow.learning import Learning

__all__ = ["run_parts", "runs_as_parts"]


def runs_as_parts(tensor: torch.Tensor) -> bool:
    """Return whether a composite op on a tensor runs as its parts: for other layouts it may have another kernel."""
    return tensor.layout is torch.strided and not tensor.is_nested


def run_parts(
    recorder: TorchDispatchMode, learning: Learning | None, func: Any, args: tuple[Any, ...], kwargs: Any
) -> Any:
    """Run a composite op, with the recorder on for its parts."""
    if learning is not None:
        learning.on_composite()
    return decompose(func, recorder, args, kwargs)
