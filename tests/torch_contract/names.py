"""A mode that tells which ops were dispatched to it."""

from __future__ import annotations

from typing import Any

from torchdelta._torch.modes import DispatchMode


class Names(DispatchMode):
    """Notes the names of the ops that it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Note, and run."""
        del types
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))
