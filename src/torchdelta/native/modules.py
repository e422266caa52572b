"""Lists the native modules: what tests and wheels build before the first use."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from torchdelta.native import arena, caching, counting, device_watch, gate, saved_hooks, tape
from torchdelta.native.build import has_cuda_headers

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
    *((device_watch.MODULE,) if has_cuda_headers() else ()),
)
"""Each has a source file of its own; those that take longest to build come first."""
