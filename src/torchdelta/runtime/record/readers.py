"""Brings back what a program reads without an op, while persistent tensors may leave (memory/persistents.py).

It also replaces the functions that would read too much at once by what calls them in pieces (pieces.py).

[Note: files that hold everything]
`torch.save` collects the storage objects of all tensors, and then writes them one at a time. If collecting brought
them back, a checkpoint would take as much memory as everything together. So inside `torch.save` an emptied storage only
tells its true size, and comes back when it is written.

[Note: readers on other threads]
Another thread cannot bring anything back, because the ledger belongs to the scope's thread. So the patched methods
raise an error there for a tensor that has left. Ops of another thread are not seen.

[Note: compiled code]
A kernel of compiled code reads memory without an op, and which tensors a compiled function reads is not known: its
closure may have any. So before it is called everything comes back, except that the forward of a module does without
optimizer states unless an optimizer steps in it. They stay until the call ends. Afterwards their copies on the tier are
discarded, because the code may have written any of them.
"""

from __future__ import annotations

import functools
import inspect
import threading
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from torchdelta._torch.compiled import note_compiled_calls
from torchdelta._torch.list_functions import patch_list_functions, patch_state_lists
from torchdelta._torch.raw_access import patch_raw_access, patch_storage_reads
from torchdelta._torch.storages import address_of, storage_address
from torchdelta.errors import ScopeError
from torchdelta.runtime.interrupts import call_outside, shielded
from torchdelta.runtime.record.pieces import call_in_pieces
from torchdelta.runtime.record.safetensors_files import identity_for, patch_safetensors

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torchdelta.runtime.memory.persistents import Persistents

__all__ = ["Readers"]

# What `torch.compile(module)` and `module.compile()` compile: neither reads the states of an optimizer.
_FORWARDS: Final = ("__call__", "_call_impl", "_wrapped_call_impl", "forward")

# Inside `torch.save`: by these torch gets at storage objects and their addresses, without reading them. A program's own
# code may run there, too (`__getstate__`), and what it reads is brought back as always.
_COLLECTING: Final = ("__reduce_ex__", "_typed_storage", "storage", "untyped_storage")
_storage_address: Final = torch.UntypedStorage.data_ptr

_lock = threading.Lock()
_watching: dict[int, Persistents] = {}  # by thread
_undo: list[Callable[[], None]] = []


class Readers:
    """The patches of one session."""

    def __init__(self, persistents: Persistents | None) -> None:
        self._persistents = persistents
        self._thread_id = 0

    def start(self) -> None:
        """Watch what this thread reads."""
        if self._persistents is None:
            return
        self._thread_id = threading.get_ident()
        with _lock:
            if not _watching:
                _undo.append(patch_raw_access(reads=_read, exports=_export, copies=_copy, saves=_save))
                _undo.append(patch_list_functions(_cut))
                _undo.append(patch_state_lists(_note_making))
                _undo.append(patch_safetensors(_here))
                _undo.append(note_compiled_calls(_begin_compiled))
                _undo.append(register_optimizer_step_pre_hook(_before_optimizer).remove)
            _watching[self._thread_id] = self._persistents

    def stop(self) -> None:
        """Stop watching."""
        if self._persistents is None:
            return
        with _lock:
            _watching.pop(self._thread_id, None)
            if not _watching:
                while _undo:
                    _undo.pop()()

    def leave_child(self) -> None:
        """Stop watching in a forked child, where the lock may be held by a thread that the child lacks."""
        _watching.clear()


def _here() -> Persistents | None:
    return _watching.get(threading.get_ident())


def _read(original: Callable[..., Any]) -> Callable[..., Any]:
    @shielded
    @functools.wraps(original)
    def read(*args: Any, **kwargs: Any) -> Any:
        persistents = _here()
        if persistents is None:
            _check_other_thread(args)
            return original(*args, **kwargs)
        if persistents.is_describing() or (persistents.candidates.is_lent and original.__name__ in _COLLECTING):
            return original(*args, **kwargs)
        persistents.begin_raw(args)
        try:
            return call_outside(original, *args, **kwargs)
        finally:
            persistents.end()

    return read


def _export(original: Callable[..., Any]) -> Callable[..., Any]:
    @shielded
    @functools.wraps(original)
    def export(*args: Any, **kwargs: Any) -> Any:
        persistents = _here()
        if persistents is None:
            _check_other_thread(args)
            return original(*args, **kwargs)
        identity = identity_for(args[0]) if original.__name__ == _storage_address.__name__ else None
        if identity is not None:
            return identity
        is_collecting = persistents.candidates.is_lent and original is _storage_address
        if not is_collecting and not persistents.num_copying:
            persistents.export(args)
        return original(*args, **kwargs)

    return export


def _copy(original: Callable[..., Any]) -> Callable[..., Any]:
    @shielded
    @functools.wraps(original)
    def copy(*args: Any, **kwargs: Any) -> Any:
        persistents = _here()
        tensors = [t for a in args[:1] for t in (a.parameters() if isinstance(a, torch.nn.Module) else (a,))]
        if persistents is None:
            _check_other_thread(tensors)
            return original(*args, **kwargs)
        persistents.begin_raw(tensors)
        persistents.num_copying += 1
        try:
            return call_outside(original, *args, **kwargs)
        finally:
            persistents.num_copying -= 1
            persistents.end()

    return copy


@shielded
def _begin_compiled(function: Any, _inputs: Any) -> Callable[[], None] | None:
    persistents = _here()
    if persistents is None:
        return None
    persistents.compiled.begin(with_states=not _is_forward(function))
    return shielded(persistents.compiled.end)


@shielded
def _before_optimizer(_optimizer: Any, _args: Any, _kwargs: Any) -> None:
    """Have optimizer states here if the forward of a compiled module makes an optimizer step."""
    persistents = _here()
    if persistents is not None:
        persistents.compiled.let_read_states()


def _is_forward(function: Any) -> bool:
    """Return whether a function is that of a module, which does not read the states of an optimizer."""
    if callable(function):
        function = inspect.unwrap(function)  # torch wraps modules, and functions of its own
    if isinstance(function, torch.nn.Module):
        return True
    return isinstance(getattr(function, "__self__", None), torch.nn.Module) and function.__name__ in _FORWARDS


def _cut(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def update(*args: Any, **kwargs: Any) -> Any:
        persistents = _here()
        if persistents is None:
            return original(*args, **kwargs)
        return call_in_pieces(original, args, kwargs, persistents.piece_bytes)

    return update


def _note_making(states: list[Any]) -> None:
    persistents = _here()
    if persistents is not None:
        persistents.candidates.note_making(states)


def _save(original: Callable[..., Any]) -> Callable[..., Any]:
    def save(obj: Any, zip_file: Any, *args: Any, **kwargs: Any) -> Any:
        persistents = _here()
        if persistents is None:
            return original(obj, zip_file, *args, **kwargs)
        if persistents.candidates.is_lent:  # a `__getstate__` of the program saves inside a `torch.save`
            return original(obj, _Writer(zip_file, persistents), *args, **kwargs)
        persistents.emptying.finish_spares()  # they hold storages
        with _lock:
            undo = patch_storage_reads(sizes=_true_size, reads=_read_storage)
        persistents.candidates.lend()
        try:
            return original(obj, _Writer(zip_file, persistents), *args, **kwargs)
        finally:
            persistents.candidates.take_back()
            with _lock:
                undo()

    return save


class _Writer:
    """Writes a file for `torch.save`; brings each storage back before it is written."""

    def __init__(self, zip_file: Any, persistents: Persistents) -> None:
        self._zip_file = zip_file
        self._persistents = persistents

    def __getattr__(self, name: str) -> Any:
        return getattr(self._zip_file, name)

    @shielded
    def write_record(self, name: str, data: Any, size_bytes: int) -> None:
        """Write one entry."""
        if not isinstance(data, torch.UntypedStorage):
            self._zip_file.write_record(name, data, size_bytes)
            return
        self._persistents.begin_raw((data,))
        try:
            self._zip_file.write_record(name, data, size_bytes)
        finally:
            self._persistents.end()


def _true_size(original: Callable[..., Any]) -> Callable[..., Any]:
    def nbytes(storage: torch.UntypedStorage) -> int:
        size_bytes = original(storage)
        if not size_bytes:
            for persistents in list(_watching.values()):
                record = persistents.ledger.records.get(address_of(storage))
                if record is not None and record.emptied is not None:
                    return record.emptied.size_bytes
        return size_bytes

    return nbytes


def _read_storage(original: Callable[..., Any]) -> Callable[..., Any]:
    @shielded
    def read(storage: torch.UntypedStorage, *args: Any, **kwargs: Any) -> Any:
        persistents = _here()
        if persistents is None:
            return original(storage, *args, **kwargs)
        persistents.begin_raw((storage,))
        try:
            return original(storage, *args, **kwargs)
        finally:
            persistents.end()

    return read


def _addresses(things: Any) -> Iterator[int]:
    for thing in things:
        try:
            if isinstance(thing, torch.Tensor):
                yield storage_address(thing)
            elif isinstance(thing, torch.UntypedStorage):
                yield address_of(thing)
        except RuntimeError:  # it has no storage
            continue


def _check_other_thread(things: Any) -> None:
    """Raise if a thread without a scope reads what has left. See [Note: readers on other threads]."""
    for address in _addresses(things):
        for persistents in list(_watching.values()):
            record = persistents.ledger.records.get(address)
            if record is not None and record.emptied is not None:
                msg = (
                    "another thread reads a parameter, gradient or optimizer state that has left the device: read it "
                    "on the thread of the MemoryBudget (a clone for the other thread), or use decision_class='saved'"
                )
                raise ScopeError(msg)
