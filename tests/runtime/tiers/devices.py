"""The memory of a real accelerator, for the schedules that the simulated one plays as well."""

import random
import weakref

import torch
from torch.cuda import _sleep as sleep


class AcceleratorDevice:
    """Memory of a real device, its contents made and compared by kernels, with pauses of random length between them."""

    def __init__(self, device: torch.device, seed: int, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self.used_bytes = 0
        self._device = device
        self._random = random.Random(seed)
        self._num_wrong = torch.zeros((), dtype=torch.int64, device=device)

    @property
    def complaints(self) -> list[str]:
        """Say how many bytes the kernels found wrong so far."""
        num_wrong = int(self._num_wrong)
        return [f"{num_wrong} bytes were wrong"] if num_wrong else []

    def allocate(self, size_bytes: int) -> torch.UntypedStorage | None:
        """Allocate from torch's allocator, within the budget."""
        if self.used_bytes + size_bytes > self.budget_bytes:
            return None
        storage = torch.UntypedStorage(size_bytes, device=self._device)
        self.used_bytes += size_bytes
        weakref.finalize(storage, self._freed, size_bytes)
        return storage

    def fill(self, storage: torch.UntypedStorage, number: int) -> None:
        """Make a content."""
        self._pause()
        self._view(storage).copy_(self._content(number, storage.nbytes()))

    def check(self, storage: torch.UntypedStorage, number: int) -> None:
        """Compare with a content; the verdict stays on the device."""
        self._pause()
        self._num_wrong += (self._view(storage) != self._content(number, storage.nbytes())).sum()

    def settle(self) -> None:
        """Finish all work."""
        torch.accelerator.synchronize(self._device.index)

    def _freed(self, size_bytes: int) -> None:
        self.used_bytes -= size_bytes

    def _view(self, storage: torch.UntypedStorage) -> torch.Tensor:
        return torch.empty(0, dtype=torch.uint8, device=self._device).set_(storage, 0, (storage.nbytes(),), (1,))

    def _content(self, number: int, size_bytes: int) -> torch.Tensor:
        places = torch.arange(size_bytes, device=self._device)
        return ((places * 31 + places // 253 + number * 97) % 256).to(torch.uint8)

    def _pause(self) -> None:
        if self._device.type == "cuda" and self._random.random() < 0.3:
            sleep(self._random.randrange(1_000_000))
