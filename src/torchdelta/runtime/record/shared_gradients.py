"""Keeps a leaf's `.grad` apart from a saved tensor that the program still holds.

[Note: saved tensors that are gradients]
The backward of a custom Function may return a saved tensor as the gradient of a leaf. Autograd makes such a tensor the
leaf's `.grad` itself if nobody else holds it, and else copies it. Without a budget, the saved tensor is the program's
own. In a budget it is a new tensor on the same storage, which only autograd would hold: later writes to `.grad` would
change the program's tensor, too. So if others hold the storage, that new tensor is held until the backward ends.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from torchdelta._torch.engine import call_at_backward_end, running_function
from torchdelta._torch.storages import storage_address

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["keep_apart"]


def keep_apart(tensor: torch.Tensor) -> None:
    """Let autograd copy a saved tensor if the custom Function whose backward runs returns it as a leaf's gradient.

    Args:
        tensor: Has just been unpacked; others hold its storage.
    """
    function = running_function()
    if function is None:
        return
    address = storage_address(tensor)

    def hold_returned(gradients: Sequence[torch.Tensor | None], _: Sequence[torch.Tensor | None]) -> None:
        hook.remove()
        held = [gradient for gradient in gradients if gradient is not None and _is_at(gradient, address)]
        if held:
            call_at_backward_end(held.clear)

    hook = function.register_hook(hold_returned)


def _is_at(gradient: torch.Tensor, address: int) -> bool:
    return gradient.layout is torch.strided and not gradient.is_nested and storage_address(gradient) == address
