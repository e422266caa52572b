"""An engine for a CUDA device: it pins existing host memory by registering it with the driver."""

from __future__ import annotations

import contextlib
from typing import Any, Final

import torch

from torchdelta._torch.modes import Quietly
from torchdelta.runtime.tiers.accelerator import AcceleratorEngine

__all__ = ["CudaEngine"]

_PORTABLE: Final = 1  # cudaHostRegisterPortable: pinned for every device of this process


class CudaEngine(AcceleratorEngine):
    """One CUDA device; see `engine.Engine`."""

    def pin(self, address: int, size_bytes: int) -> None:
        """Register host memory with the driver."""
        runtime: Any = torch.cuda.cudart()
        with torch.cuda.device(self.device):
            status = runtime.cudaHostRegister(address, size_bytes, _PORTABLE)
            if int(status) != 0:
                self.forget_error()
                raise OSError(f"cudaHostRegister of {size_bytes} bytes: {runtime.cudaGetErrorString(status)}")

    def unpin(self, address: int) -> None:
        """Undo the registration."""
        runtime: Any = torch.cuda.cudart()
        with torch.cuda.device(self.device):
            if int(runtime.cudaHostUnregister(address)) != 0:
                self.forget_error()

    def forget_error(self) -> None:
        """Clear the runtime's last error; otherwise torch's next kernel launch would report it."""
        with contextlib.suppress(RuntimeError), Quietly():
            torch.empty(1, device=self.device).fill_(0)
