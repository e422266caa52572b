"""Storages that are resized or moved without autograd's knowledge, as FSDP does with the parameters that it gathers.

[Note: parameters that come and go]
FSDP frees a gathered parameter with `storage.resize_(0)` after a module's forward, and fills the same storage again
before the module's backward. No dispatch mode sees that. Reading such a storage in between would crash, so

- a storage that was resized once, or that FSDP filled, stays on the device: FSDP manages its memory already;
- no op that reads one is replayed: its outputs are kept or swapped;
- the first resize ends the recorded content, as any other write does: the old content is copied first if a replay
  depends on it and it cannot be recomputed; saved tensors follow the storage, as they do in plain autograd;
- reading a storage that is smaller than its content is an error (`restore.check_size`).

`share_memory_` moves a storage's content to other memory in place, on any thread: the queues of `torch.multiprocessing`
call it. A copy that reads the old memory has to arrive first.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from typing import TYPE_CHECKING, Any

from torchdelta._torch.doors import patch_storage_resize, patch_storage_sharing
from torchdelta._torch.storages import address_of
from torchdelta.errors import TierError
from torchdelta.runtime.state.kinds import byte_alias

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from torchdelta.runtime.memory.restore import Restorer
    from torchdelta.runtime.state.buffer import Buffer, StorageRecord

_lock = threading.Lock()
_watching: weakref.WeakSet[Resizes] = weakref.WeakSet()
_undo: list[Callable[[], None]] = []


class Resizes:
    """Watches for storages that are resized, and makes them stay on the device.

    Args:
        restorer: Knows the ledger and the room.
        before_resize: Called on the session's thread before a storage is resized there.
    """

    def __init__(self, restorer: Restorer, before_resize: Callable[[], object] = lambda: None) -> None:
        self.restorer = restorer
        self.ledger = restorer.ledger
        self._before_resize = before_resize
        self._thread_id = 0

    def start(self) -> None:
        """Watch `UntypedStorage.resize_` on every thread: the backward of a GPU runs on a thread of its own."""
        self._thread_id = threading.get_ident()
        with _lock:
            if not _watching:
                _undo.extend((patch_storage_resize(_make_resize), patch_storage_sharing(_make_share)))
            _watching.add(self)

    def stop(self) -> None:
        """Stop watching."""
        with _lock:
            _watching.discard(self)
            if not _watching:
                while _undo:
                    _undo.pop()()

    def leave_child(self) -> None:
        """Stop watching in a forked child, where the lock may be held by a thread that the child lacks."""
        _watching.discard(self)

    def record_of(self, storage: torch.UntypedStorage) -> StorageRecord | None:
        """Return the record of a storage; a new record if this thread resizes an unknown storage."""
        record = self.ledger.records.get(address_of(storage))
        if record is None and threading.get_ident() == self._thread_id:
            record = self.ledger.know(storage)
        return record

    def wait_for_copy(self, storage: torch.UntypedStorage) -> None:
        """Wait until nothing reads a storage's memory any more. Changes nothing, so any thread may call this."""
        record = self.ledger.records.get(address_of(storage))
        for holder in (record.current, record.spare) if record is not None else ():
            transfer = getattr(holder.copy, "transfer", None) if holder is not None else None
            if transfer is not None:
                with contextlib.suppress(TierError):  # whoever needs the copy is told
                    transfer.wait()

    def announce(self) -> None:
        """Tell the session that a storage is about to be resized on its thread."""
        if threading.get_ident() == self._thread_id:
            self._before_resize()

    def prepare(self, record: StorageRecord, storage: torch.UntypedStorage, size_bytes: int) -> None:
        """Make room for a storage that is about to be resized, and invalidate its content."""
        if storage.device in self.ledger.counted_devices:
            self.restorer.room.make(size_bytes - record.size_bytes, "a storage that grows")
        self.restorer.before_write(record, storage)

    def undo(self, record: StorageRecord, old: Buffer | None, storage: torch.UntypedStorage) -> None:
        """Undo `prepare`, because it or the resize failed."""
        if old is not None:
            self.ledger.reinstate(record, old, byte_alias(storage, 0))

    def finish(self, record: StorageRecord, old: Buffer | None, storage: torch.UntypedStorage) -> None:
        """Note that a storage was resized; saved tensors on its `old` content follow it."""
        self.ledger.written(byte_alias(storage, 0), old, None, "a storage that is freed and filled again", 0)
        self.ledger.stay_resizable(record)


def _make_resize(original: Callable[..., Any]) -> Callable[..., Any]:
    def resize_(storage: torch.UntypedStorage, size_bytes: int) -> Any:
        if storage.nbytes() == size_bytes:
            return original(storage, size_bytes)
        known: list[tuple[Resizes, StorageRecord, Buffer | None]] = []
        try:
            for resizes in tuple(_watching):
                resizes.announce()
                record = resizes.record_of(storage)
                if record is not None:
                    known.append((resizes, record, record.current))
                    resizes.prepare(record, storage, size_bytes)
            out = original(storage, size_bytes)
        except BaseException:
            for resizes, record, old in known:
                resizes.undo(record, old, storage)
            raise
        for resizes, record, old in known:
            resizes.finish(record, old, storage)
        return out

    return resize_


def _make_share(original: Callable[..., Any]) -> Callable[..., Any]:
    def share(storage: torch.UntypedStorage, *args: Any, **kwargs: Any) -> Any:
        for resizes in tuple(_watching):
            resizes.wait_for_copy(storage)
        return original(storage, *args, **kwargs)

    return share
