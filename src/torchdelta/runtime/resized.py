"""Storages that somebody resizes behind autograd's back, as FSDP does with the parameters that it gathers.

[Note: parameters that come and go]
FSDP frees a gathered parameter with `storage.resize_(0)` after a module's forward, and fills the same storage anew
before the module's backward. No op is seen of that. Reading such a storage in between would crash, so

- a storage that was resized once, or that FSDP filled, stays where it is: what autograd saves of it is kept, as FSDP
  manages it already;
- no op that reads one is recomputed: its outputs are kept or swapped;
- what was recorded before a storage showed its nature is parted from it, as by any other write: the old content is
  copied away first if a replay depends on it and nothing can recompute it, while saved tensors go on to follow the
  storage, as autograd's own would;
- and whoever reads a storage that is smaller than the content it should hold is refused (`check_size`).
"""

from __future__ import annotations

import logging
import threading
import weakref
from typing import TYPE_CHECKING, Any

import torch

from torchdelta._torch import NoDispatch, NoFunction, patch_storage_resize
from torchdelta.errors import SavedTensorError
from torchdelta.runtime.buffer import Buffer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torchdelta.runtime.buffer import StorageRecord
    from torchdelta.runtime.session import Session

_lock = threading.Lock()
_watching: weakref.WeakSet[Resizes] = weakref.WeakSet()
_undo: list[Callable[[], None]] = []


class Resizes:
    """What a session knows of storages that come and go."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.has_seen_any = False
        self._thread_id = 0

    def start(self) -> None:
        """Watch `UntypedStorage.resize_`, on every thread: the backward of a GPU has its own."""
        self._thread_id = threading.get_ident()
        with _lock:
            if not _watching:
                _undo.append(patch_storage_resize(_make_resize))
            _watching.add(self)

    def stop(self) -> None:
        """Stop watching."""
        with _lock:
            _watching.discard(self)
            if not _watching:
                while _undo:
                    _undo.pop()()

    def leave_child(self) -> None:
        """Stop watching in a forked child, where the lock may be held by a thread that is not there."""
        _watching.discard(self)

    def reads_any(self, arguments: Iterable[Any]) -> bool:
        """Say whether one of an op's arguments lies on a storage that comes and goes."""
        for argument in arguments:
            if isinstance(argument, torch.Tensor):
                try:
                    record = self.session.ledger.find(argument)
                except RuntimeError:  # no storage
                    continue
                if record is not None and record.is_resizable:
                    return True
            elif isinstance(argument, list | tuple) and self.reads_any(argument):
                return True
        return False

    def record_of(self, storage: torch.UntypedStorage) -> StorageRecord | None:
        """Return the record of a storage; one that this thread resizes is known from then on."""
        ledger = self.session.ledger
        record = ledger.records.get(storage._cdata)
        if record is None and threading.get_ident() == self._thread_id:
            record = ledger.know(storage)
        return record

    def mark(self, record: StorageRecord) -> None:
        """Note that a storage comes and goes."""
        if not self.has_seen_any:
            self.has_seen_any = True
            logging.getLogger("torchdelta").info(
                "some storages are freed and filled again (FSDP): they are kept, and ops that read them are not "
                "recomputed"
            )
        record.is_resizable = True
        if record.current is not None:
            record.current.is_pinned = True

    def prepare(self, record: StorageRecord, storage: torch.UntypedStorage, size_bytes: int) -> None:
        """Make room for a storage that is about to get another size, and part it from what it holds."""
        session = self.session
        if storage.device in session.ledger.counted_devices:
            session.residency.room(size_bytes - record.size_bytes, "a storage that grows")
        old = record.current
        if old is not None:
            session.residency.settle_copy(old)
            session.ledger.let_go(old)
            record.current = old.record = None
            # More views than saved tensors: a replay reads it.
            if old.op is None and old.copy is None and old.num_views > old.num_saved:
                session.residency.preserve(old, storage)

    def undo(self, record: StorageRecord, old: Buffer | None, storage: torch.UntypedStorage) -> None:
        """Go back to before `prepare`: the storage could not get its size."""
        if old is not None:
            record.current, old.record = old, record
            if old.num_saved:
                self.session.ledger.hold(old, _alias(storage))

    def finish(self, record: StorageRecord, old: Buffer | None, storage: torch.UntypedStorage) -> None:
        """Take note of a storage that has got another size; what saved its `old` content follows it."""
        ledger = self.session.ledger
        if storage.device in ledger.counted_devices:
            ledger.resize(record, storage, storage.nbytes())
        buffer = Buffer(record.size_bytes)
        buffer.record = record
        buffer.origin = "a storage that is freed and filled again"
        record.current = buffer
        self.mark(record)
        if old is not None and old.num_saved:
            old.successor = buffer
            buffer.num_saved = old.num_saved
            buffer.save_order = old.save_order
            ledger.hold(buffer, _alias(storage))


def check_size(buffer: Buffer, storage: torch.UntypedStorage) -> None:
    """Refuse a storage that was shrunk where nobody could see it.

    Raises:
        SavedTensorError: The content is gone.
    """
    if storage.nbytes() < buffer.size_bytes:
        msg = (
            f"the content of a saved {buffer.origin or 'tensor'} of {buffer.size_bytes} bytes is gone: its storage was "
            f"resized to {storage.nbytes()} bytes"
        )
        raise SavedTensorError(msg)


def _alias(storage: torch.UntypedStorage) -> torch.Tensor:
    with NoDispatch(), NoFunction(), torch.no_grad():
        return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, 0, (0,), (1,))


def _make_resize(original: Callable[..., Any]) -> Callable[..., Any]:
    def resize_(storage: torch.UntypedStorage, size_bytes: int) -> Any:
        if storage.nbytes() == size_bytes:
            return original(storage, size_bytes)
        known: list[tuple[Resizes, StorageRecord, Buffer | None]] = []
        for resizes in tuple(_watching):
            record = resizes.record_of(storage)
            if record is not None:
                known.append((resizes, record, record.current))
                resizes.prepare(record, storage, size_bytes)
        try:
            out = original(storage, size_bytes)
        except BaseException:
            for resizes, record, old in known:
                resizes.undo(record, old, storage)
            raise
        for resizes, record, old in known:
            resizes.finish(record, old, storage)
        return out

    return resize_
