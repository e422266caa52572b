"""How much memory there is."""

from __future__ import annotations

import os

import pytest
import torch

from torchdelta.errors import NativeError
from torchdelta.native.counting import new_counter
from torchdelta.runtime.device.memory import PeakMeter, device_memory_bytes
from torchdelta.runtime.state.ledger import Ledger


def test_memory_of_this_machine() -> None:
    """On CPU never more than the RAM, and never nothing."""
    ram_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert 2**20 < device_memory_bytes() <= ram_bytes


def test_the_meter_is_exact_where_the_allocator_is_counted() -> None:
    """What was taken and given back in between is measured to the byte."""
    counter = new_counter()
    if isinstance(counter, NativeError):
        pytest.skip(f"no counting allocator here: {counter}")
    ledger = Ledger("cpu")
    ledger.usage.count_with(counter)
    try:
        with PeakMeter(ledger.device, ledger.usage) as meter:
            torch.empty(1000)
            torch.empty(2000)
    finally:
        counter.stop()
    assert meter.extra_bytes == 8000
