"""Fake tensors and their mode. See `__init__.py` for the rules."""

# torch's stubs do not have all that is here.
# pyright: reportAttributeAccessIssue=false, reportPrivateImportUsage=false

from __future__ import annotations

import logging
from typing import Any, Final

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

__all__ = ["FakeModeForOnce", "FakeTensor", "FakeTensorMode", "fake_mode", "fake_view"]

_FAKE = torch._C._TorchDispatchModeKey.FAKE
_LOG: Final = logging.getLogger("torch._subclasses.fake_tensor")


def fake_mode() -> Any:
    """Return the fake-tensor mode that is on in this thread, or None."""
    return torch._C._get_dispatch_mode(_FAKE)


class FakeModeForOnce(FakeTensorMode):
    """A fake-tensor mode that takes real tensors as well, and can be ended.

    It leaves nothing in torch's cache of its findings, which is never emptied. An op that fails is not logged: its
    caller handles the error.

    Attributes:
        num_running: How many ops run in the mode now. During these, torch looks at the storages of real tensors only
            to make fake tensors.
    """

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self.cache_enabled = False
        self.num_running = 0
        self._ended = ""

    def end(self, message: str) -> None:
        """Make every op on a tensor of this mode raise, and pickling it too.

        Raises (later): RuntimeError: with `message`.
        """
        self._ended = message

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an op. The signature is torch's."""
        if self._ended:
            raise RuntimeError(self._ended)
        was_disabled, _LOG.disabled = _LOG.disabled, True  # torch logs a traceback as an error
        try:
            self.num_running += 1
            return super().__torch_dispatch__(func, types, args, kwargs)
        finally:
            self.num_running -= 1
            _LOG.disabled = was_disabled

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse to be pickled, as a part of a tensor."""
        if self._ended:
            raise RuntimeError(self._ended)
        return super().__reduce_ex__(protocol)


def fake_view(mode: Any, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a meta tensor as a fake tensor on a device; the fake one keeps the other alive."""
    fake = FakeTensor(mode, tensor, device)
    fake._torchdelta_source = tensor  # it has a storage of its own: whoever holds the fake must hold what it stands for
    return fake
