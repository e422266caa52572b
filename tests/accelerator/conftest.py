"""Conditions under which bits can be compared, and the device that the tests of this folder run on."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from tests.collector import give_back
from tests.same_bits.judge import DEVICE, comparable_conditions

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def device() -> Iterator[torch.device]:
    """Give the device with its index; factories make their tensors there."""
    with comparable_conditions(), torch.device(DEVICE):
        yield torch.device(DEVICE, 0)
    give_back()


@pytest.fixture
def second_device() -> torch.device:
    """Give the second device of the same kind."""
    if torch.accelerator.device_count() < 2:
        pytest.skip("there is one device only")
    return torch.device(DEVICE, 1)
