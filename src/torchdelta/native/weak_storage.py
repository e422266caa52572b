"""Weak references to storages that create no Python object for them; the C++ side is weak_storage.h.

TORCHDELTA_NATIVE=0 disables them: then the runtime keeps a weak reference to the storage's Python object.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from torchdelta.errors import NativeError
from torchdelta.native.build import is_switched_off
from torchdelta.native.counting import loaded_module

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["WeakStorage", "weak_storage_type"]


class WeakStorage(Protocol):
    """Made from the address of a live storage; while this exists, no other storage has that address."""

    def num_holders(self) -> int:
        """Return the number of references to the storage; 0 if it is dead."""
        ...

    def deleter(self) -> int:
        """Return the address of the function that will free the memory of the storage, which must be alive."""
        ...


def weak_storage_type() -> Callable[[int], WeakStorage] | None:
    """Return the type; build it first if needed. None if it is not available."""
    if is_switched_off():
        return None
    module: Any = loaded_module()
    return None if isinstance(module, NativeError) else module.WeakStorage
