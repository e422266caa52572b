"""Fake tensors and their mode. See `__init__.py` for the rules."""

# torch's stubs do not have all that is here.
# pyright: reportAttributeAccessIssue=false, reportPrivateImportUsage=false

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

__all__ = ["FakeTensor", "FakeTensorMode", "fake_mode", "fake_mode_for_once", "fake_view"]

_FAKE = torch._C._TorchDispatchModeKey.FAKE


def fake_mode() -> Any:
    """Return the fake-tensor mode that is on in this thread, or None."""
    return torch._C._get_dispatch_mode(_FAKE)


def fake_mode_for_once() -> Any:
    """Return a fake-tensor mode that takes real tensors as well, and leaves nothing in torch's cache of its findings.

    That cache is never emptied.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    mode.cache_enabled = False
    return mode


def fake_view(mode: Any, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a meta tensor as a fake tensor on a device; the fake one keeps the other alive."""
    fake = FakeTensor(mode, tensor, device)
    fake._torchdelta_source = tensor  # it has a storage of its own: whoever holds the fake must hold what it stands for
    return fake
