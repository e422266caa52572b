"""Builds the accelerator that computes late (device/racecheck.cpp), and puts it on torch as the device "racecheck"."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.accelerator import standin

if TYPE_CHECKING:
    import torch

_SOURCE = Path(__file__).parent / "device" / "racecheck.cpp"
_extensions: list[Any] = []


def load() -> Any:
    """Put it on torch and on torchdelta; the first call must come before the first backward of the process.

    Returns:
        The extension: `set_mode`, `take_complaints`, `counts`; see the end of racecheck.cpp.
    """
    if not _extensions:
        _extensions.append(standin.put_on_torch("racecheck", _SOURCE, _engine)[1])
    return _extensions[0]


def _engine(device: torch.device) -> Any:
    from torchdelta.runtime.tiers.accelerator import AcceleratorEngine

    extension = load()

    class RacecheckEngine(AcceleratorEngine):
        """Pins as CUDA's engine does: the checker knows the memory, and copies do not wait for the host."""

        def pin(self, address: int, size_bytes: int) -> None:
            """Tell the checker."""
            extension.pin(address, size_bytes)

        def unpin(self, address: int) -> None:
            """Tell the checker."""
            extension.unpin(address)

        def elapsed_s(self, start: tuple[torch.Event, ...], end: tuple[torch.Event, ...]) -> float:
            """Report who has not asked whether both are reached: the tier takes the error for a broken device."""
            try:
                return super().elapsed_s(start, end)
            except RuntimeError as error:
                extension.complain(f"times are read too early: {str(error)[:100]}")
                raise

    return RacecheckEngine(device)
