"""Storages whose memory is a private mapping of pieces of a file; the C++ side is file_mapping.h.

TORCHDELTA_NATIVE=0 disables them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from torchdelta.errors import NativeError
from torchdelta.native.build import is_switched_off
from torchdelta.native.counting import loaded_module

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["FileMapper", "file_mapper"]


class FileMapper(Protocol):
    """Maps pieces of a file into storages. A piece is its offset and its size, in bytes: multiples of the page."""

    def map_pieces(
        self, storage_address: int, size_bytes: int, descriptor: int, pieces: list[Sequence[int]], keeper: object, /
    ) -> None:
        """Give an empty storage on the CPU the pieces, one after the other, as its memory.

        What is written there later is not written to the file.

        Args:
            storage_address: `UntypedStorage._cdata`.
            size_bytes: The size that the storage gets.
            descriptor: Of the file. It may be closed afterwards.
            pieces: Of the file.
            keeper: An object that lives as long as this memory.

        Raises:
            OSError: The file cannot be mapped.
        """

    def free_pieces(self, descriptor: int, pieces: list[Sequence[int]], /) -> None:
        """Free the disk space of pieces, if the file system can."""


def file_mapper() -> FileMapper | None:
    """Return what maps files. None if the native module is not available."""
    if is_switched_off():
        return None
    module: Any = loaded_module()
    return None if isinstance(module, NativeError) else module
