"""The conditions of same_bits/ hold here too: one thread, fixed seeds, the collector kept quick."""

from __future__ import annotations

from tests.same_bits.conftest import _comparable, _thaw

__all__ = ["_comparable", "_thaw"]
