"""Lets safetensors write tensors that have left the device (memory/persistents.py).

`safetensors.torch.save_file` takes the addresses of all tensors, and then writes the file. If each tensor had to be in
memory until then, a file would take as much memory as everything together. So a tensor that is away is replaced by one
over a mapping of its copy on the tier, which takes nothing of the budget. The others stay while the file is written:
without a disk tier, that is all of them, which may be more than the budget holds.

transformers and huggingface_hub first look for tensors that share a storage, by the addresses of their memory. A
storage that is away has none, so these get the address of the storage object instead, which is as unique.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from typing import TYPE_CHECKING, Any, Final

import torch

from torchdelta._torch.doors import replace
from torchdelta._torch.modes import NoDispatch, NoFunction
from torchdelta._torch.storages import address_of, storage_address
from torchdelta.runtime.interrupts import destructor

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from types import FrameType

    from torchdelta.runtime.memory.persistents import Persistents
    from torchdelta.runtime.state.buffer import StorageRecord

__all__ = ["identity_for", "patch_safetensors"]

_FLATTEN: Final = "_flatten_as_ptr"  # (tensors, list of what has to live until the file is written)
# Functions that only compare addresses with each other, by module. Every function that looks at the same tensors has to
# be named.
_LIBRARY: Final = {"_end_ptr", "_filter_shared_not_shared", "_is_complete", "storage_ptr"}
_COMPARING: Final = {
    "huggingface_hub.serialization._torch": _LIBRARY,
    "safetensors.torch": _LIBRARY,
    "transformers.modeling_utils": {"_end_ptr", "_find_disjoint", "_find_identical"},
}
_OWN: Final = __name__.partition(".")[0]
_PLAIN: Final = (torch.Tensor, torch.nn.Parameter)


def patch_safetensors(here: Callable[[], Persistents | None]) -> Callable[[], None]:
    """Give safetensors what it can write, where it is installed; returns what undoes it.

    Args:
        here: Returns what has left in the scope of the calling thread, or None.
    """
    try:
        module = importlib.import_module("safetensors.torch")
    except ImportError:
        return _nothing
    if not hasattr(module, _FLATTEN):
        return _nothing  # of another version: what it saves stays

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def flatten(tensors: Any, lives: list[Any], *args: Any, **kwargs: Any) -> Any:
            persistents = here()
            if persistents is None or not isinstance(tensors, dict):
                return original(tensors, lives, *args, **kwargs)
            stand_ins = _StandIns(persistents)
            lives.append(stand_ins)
            found = stand_ins.of(tensors)
            persistents.num_copying += 1
            try:
                with NoDispatch():
                    return original(found, lives, *args, **kwargs)
            finally:
                persistents.num_copying -= 1

        return flatten

    return replace(module, _FLATTEN, make)


def _nothing() -> None:
    pass


def identity_for(thing: Any) -> int | None:
    """Return what stands for the address of a tensor or storage if the caller only compares; None if it may read."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__", "").startswith(_OWN):
        frame = frame.f_back
    if frame is None or frame.f_code.co_name not in _COMPARING.get(frame.f_globals.get("__name__", ""), ()):
        return None
    if isinstance(thing, torch.Tensor):
        return storage_address(thing) + int(thing.storage_offset()) * thing.element_size()
    return address_of(thing)


class _StandIns:
    """Tensors for a file, as long as this lives."""

    def __init__(self, persistents: Persistents) -> None:
        self._persistents = persistents
        self._staying: list[StorageRecord] = []
        self._mapped: dict[int, torch.UntypedStorage] = {}  # by the id of the record

    def of(self, tensors: Mapping[str, Any]) -> dict[str, Any]:
        """Return the tensors, those that are away over mappings of their copies."""
        return {name: self._of(tensor) for name, tensor in tensors.items()}

    def _of(self, tensor: Any) -> Any:
        if not isinstance(tensor, torch.Tensor) or tensor.layout is not torch.strided:
            return tensor
        try:
            record = self._persistents.ledger.records.get(storage_address(tensor))
        except RuntimeError:  # it has no storage
            return tensor
        if record is None:
            return tensor
        storage = self._mapping_of(record) if type(tensor) in _PLAIN else None
        if storage is None:
            if record.emptied is not None:
                self._persistents.bring_record(record)
            record.num_writing += 1
            self._staying.append(record)
            return tensor
        with NoDispatch(), NoFunction(), torch.no_grad():
            empty = torch.empty(0, dtype=tensor.dtype)
            return empty.set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())

    def _mapping_of(self, record: StorageRecord) -> torch.UntypedStorage | None:
        if record.emptied is None or record.size_bytes:  # it is here, or is being read
            return None
        if record.id not in self._mapped:
            storage = torch.UntypedStorage(0)
            if not self._persistents.emptying.map_copy(record.emptied, storage):
                return None
            self._mapped[record.id] = storage
        return self._mapped[record.id]

    @destructor
    def __del__(self) -> None:
        """The file is written."""
        with contextlib.suppress(AttributeError):  # the constructor has failed
            for record in self._staying:
                record.num_writing -= 1
