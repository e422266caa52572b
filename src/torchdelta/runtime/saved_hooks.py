"""The saved-tensor hooks of a session."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from torchdelta._torch.modes import remove_saved_hooks

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["SavedHooks"]


class SavedHooks:
    """What autograd calls on the session's thread when it saves a tensor, and when it reads one. Mutable."""

    def __init__(self) -> None:
        self._hooks: torch.autograd.graph.saved_tensors_hooks | None = None
        self._removed: tuple[Callable[..., Any], Callable[..., Any]] | None = None

    def enter(self, pack: Callable[..., Any], unpack: Callable[..., Any]) -> None:
        """Put them on the thread."""
        self._hooks = torch.autograd.graph.saved_tensors_hooks(pack, unpack)
        self._hooks.__enter__()

    def remove(self) -> None:
        """Remove them, wherever they are among those of the thread."""
        if self._hooks is not None:
            self._removed = self._hooks.pack_hook, self._hooks.unpack_hook
            remove_saved_hooks(*self._removed)
            self._hooks = None

    def remove_again(self) -> None:
        """Remove what the engine has put back after they were removed in a backward."""
        if self._removed is not None:
            remove_saved_hooks(*self._removed)
