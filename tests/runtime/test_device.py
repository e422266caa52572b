"""How much memory there is."""

from __future__ import annotations

import os

from torchdelta.runtime.device import device_memory_bytes


def test_memory_of_this_machine() -> None:
    """On CPU never more than the RAM, and never nothing."""
    ram_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert 2**20 < device_memory_bytes() <= ram_bytes
