"""The bytes in use on a CUDA device, their peak and a limit, from the events of torch's own allocator.

Reading the allocator's statistics costs tens of microseconds, and shows no peak of a part of a step without resetting
that of the process. The C++ side, device_watch.cpp, is told of each allocation instead. It needs CUDA's headers, which
come with torch's own CUDA packages. TORCHDELTA_NATIVE=0 disables it.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from torchdelta.errors import NativeError
from torchdelta.native.build import NativeModule, is_switched_off, loaded

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

__all__ = ["MODULE", "DeviceWatch", "new_watch"]

_logger = logging.getLogger("torchdelta")

# Where the module is built there may be no device: only what needs none is tested here. tests/cuda has the rest.
_SELF_TEST: Final = """
passed = []
def set_live(size):
    module.set_live(3, size, module.live_bytes(3))
set_live(1000)
assert module.live_bytes(3) == module.take_peak(3) == 1000
assert "torchdelta.live_bytes" in repr(module.live_capsule(3))
module.set_limit(3, 2000, lambda: passed.append(1))
assert not passed
set_live(3000)
set_live(500)
for _ in range(3):
    pass
assert passed == [1] and module.take_peak(3) == 3000 and module.take_peak(3) == 500
set_live(600)
module.mark(3)
assert module.take_peak(3) == 600 and module.live_bytes(3) == 600
set_live(900)
set_live(700)
set_live(800)
assert module.growth_bytes(3) == 300 and module.take_peak(3) == 900 and module.take_peak(3) == 800
assert module.passed_bytes(3) == 3000
module.set_limit(3, 100, lambda: passed.append(2))
for _ in range(3):
    pass
assert passed == [1]
set_live(810)
for _ in range(3):
    pass
assert passed == [1, 2] and module.passed_bytes(3) == 810
module.clear_limit(3)
set_live(10000)
assert passed == [1, 2]
try:
    module.live_bytes(64)
except ValueError as error:
    assert "the last one is 63" in str(error), error
else:
    raise AssertionError("a device that does not exist was watched")
"""

MODULE: Final = NativeModule(
    source=Path(__file__).with_name("device_watch.cpp"),
    name="torchdelta_device_watch",
    self_test=_SELF_TEST,
    needs_cuda=True,
)


class DeviceWatch:
    """The bytes in use on one CUDA device. Mutable; one for each session on it.

    Args:
        module: The C++ side.
        device: With its index.
    """

    def __init__(self, module: Any, device: torch.device) -> None:
        self._module = module
        self._index = device.index
        self.is_on = False  # whether allocations are counted

    def set_live(self, size_bytes: int, counted_bytes: int) -> None:
        """Correct the bytes in use. CUDA must have been initialized.

        Args:
            size_bytes: What the allocator says.
            counted_bytes: What `live_bytes` returned just before it was asked.
        """
        if not self.is_on:
            self._module.attach()
            self.is_on = True
        self._module.set_live(self._index, size_bytes, counted_bytes)

    def live_bytes(self) -> int:
        """Return the bytes in use: those that were set, and what was allocated since."""
        return int(self._module.live_bytes(self._index))

    def live_capsule(self) -> object:
        """Return a capsule with the address of these bytes, for other native modules."""
        return self._module.live_capsule(self._index)

    def take_peak_bytes(self) -> int:
        """Return the peak of the bytes in use since the last call; 0 before they were first set."""
        return int(self._module.take_peak(self._index)) if self.is_on else 0

    def mark(self) -> None:
        """Start to measure growth."""
        self._module.mark(self._index)

    def growth_bytes(self) -> int:
        """Return the largest growth since the mark."""
        return int(self._module.growth_bytes(self._index))

    def set_limit(self, limit_bytes: int, read: Callable[[], int], on_limit: Callable[[], object]) -> None:
        """Call a function once when the bytes in use pass a limit: on the main thread, between two instructions.

        Freed blocks may have held more than what was asked for, so the count may be too high between two readings. Such
        a limit is set again.

        Args:
            limit_bytes: The limit.
            read: Reads what the allocator says, and calls `set_live`.
            on_limit: The function.
        """

        def check() -> None:
            counted_bytes = self._module.live_bytes(self._index)
            excess_bytes = max(0, counted_bytes - read())
            if self._module.passed_bytes(self._index) - excess_bytes > limit_bytes:
                on_limit()
            else:
                self._module.set_limit(self._index, limit_bytes, check)

        self._module.set_limit(self._index, limit_bytes, check)

    def clear_limit(self) -> None:
        """Remove the limit."""
        self._module.clear_limit(self._index)


def new_watch(device: torch.device) -> DeviceWatch | None:
    """Return what watches a device; build the module first if needed. None if that fails, or for other devices."""
    if device.type != "cuda" or is_switched_off():
        return None
    module = loaded(MODULE)
    if isinstance(module, NativeError):
        _logger.info("every step is recorded: %s", module)
        return None
    return DeviceWatch(module, device)
