"""Lists the native modules: what tests and wheels build before the first use."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from torchdelta.native import arena, caching, counting, gate, saved_hooks, tape

if TYPE_CHECKING:
    from torchdelta.native.build import NativeModule

__all__ = ["NATIVE_MODULES"]

NATIVE_MODULES: Final[tuple[NativeModule, ...]] = (
    tape.MODULE,
    gate.MODULE,
    saved_hooks.MODULE,
    arena.MODULE,
    caching.MODULE,
    counting.MODULE,
)
"""Each has a source file of its own; those that take longest to build come first."""
