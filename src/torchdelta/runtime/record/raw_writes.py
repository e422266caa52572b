"""Records writes that are no op: those of `Tensor.apply_`, `map_` and `map2_`, and in a backward those of storages."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import torch

from torchdelta._torch.modes import Quietly
from torchdelta.runtime.record.unseen_writes import UnseenWrites
from torchdelta.runtime.state.kinds import byte_alias

if TYPE_CHECKING:
    from collections.abc import Generator

    from torchdelta.runtime.record.python_writes import PythonWrites
    from torchdelta.runtime.record.unseen_writes import RecordsWrites

__all__ = ["RawWrites"]


class RawWrites:
    """Ends the recorded content of what such a write changes.

    Args:
        recorder: Sees all other writes.
        python_writes: Knows the native tape, and is on while Python code runs in a backward.
    """

    def __init__(self, recorder: RecordsWrites, python_writes: PythonWrites) -> None:
        self._recorder = recorder
        self._python_writes = python_writes

    @contextlib.contextmanager
    def recorded(self, written: torch.Tensor | torch.UntypedStorage) -> Generator[None]:
        """Keep the old content if a replay needs it, and begin a new one after the write."""
        with self._python_writes.off():
            with Quietly():
                tensor = written if isinstance(written, torch.Tensor) else byte_alias(written)
            if self._python_writes.before_write is not None:
                self._python_writes.before_write(tensor)
            unseen = UnseenWrites(self._recorder, (), (tensor,))
        try:
            yield
        finally:
            with self._python_writes.off():
                unseen.end()
