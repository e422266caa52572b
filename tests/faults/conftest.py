"""Conditions under which bits can be compared; nothing may be left on torch after any test."""

from __future__ import annotations

from tests.runtime.conftest import _clean as clean
from tests.same_bits.conftest import _comparable as comparable
from tests.same_bits.conftest import _thaw as thaw

__all__ = ["clean", "comparable", "thaw"]
