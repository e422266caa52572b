"""Replays recorded ops to bring back a buffer that was dropped.

Complexity: linear in the number of missing ops in the chain. Each is replayed once, and every saved buffer that this
produces stays resident.

[Note: no reference cycles]
A reference cycle that contains a storage keeps it alive until the garbage collector runs. A recursive closure here once
made the peak with recomputation higher than the plain one. Therefore this file uses no recursive closures, stores no
exception objects, and clears locals that hold storages in `finally` (tested with gc.disable()).
"""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from torchdelta._torch.storages import storage_address, storage_behind
from torchdelta._torch.tensors import storage_of, version_of
from torchdelta.aten.facts import Kind
from torchdelta.errors import ReplayError, SavedTensorError
from torchdelta.runtime.memory.costs import resident
from torchdelta.runtime.memory.retry import may_retry_replay, prepare_retry, run_again
from torchdelta.runtime.memory.room import digest_of
from torchdelta.runtime.state.buffer import Buffer, OpEntry, View
from torchdelta.runtime.state.contents import UNKNOWN_VERSION, is_same_number
from torchdelta.runtime.state.tape import Fresh, Scratch, replay_op, sources, written_sources

if TYPE_CHECKING:
    from collections.abc import Callable

    from torchdelta.runtime.memory.room import Room
    from torchdelta.runtime.state.ledger import Ledger

__all__ = ["Replayer", "raise_changed"]


class Replayer:
    """Recomputes dropped buffers from the buffers that their ops read.

    Args:
        ledger: The ledger.
        room: Makes room for what a replay allocates.
        bring: Returns a storage with the content of a buffer that a replay reads.
    """

    def __init__(self, ledger: Ledger, room: Room, bring: Callable[[Buffer], torch.UntypedStorage]) -> None:
        self.ledger = ledger
        self.room = room
        self.counters = room.counters
        self.bring = bring
        self._depth = 0
        self.on_replay: Callable[[OpEntry], None] | None = None  # while the outline of a step is learned

    def recompute(self, target: Buffer) -> torch.UntypedStorage:
        """Recompute a buffer and return its storage. Call this inside `Quietly`.

        Raises:
            SavedTensorError: The content of a source was overwritten by code that is not recorded.
            ReplayError: A source was changed by code that is not recorded, or the replay gave a different result.
        """
        storage = self._run(_Chain([target])).get(id(target))
        return storage if storage is not None else self.bring(target)

    def recompute_group(self, targets: list[Buffer]) -> None:
        """Recompute buffers in one chain of replays, and leave nothing else of it. Call this inside `Quietly`.

        Raises:
            SavedTensorError, ReplayError: As `recompute`.
        """
        self._run(_Chain(targets, keeps_others=False))

    def _run(self, chain: _Chain) -> dict[int, torch.UntypedStorage]:
        """Run a chain, and return the storages of its targets by the ids of their buffers."""
        start_s = time.perf_counter()
        self._depth += 1
        locked: dict[int, Buffer] = {}
        try:
            self._carry_out(chain, self.plan(chain, locked), locked)
            return dict(chain.held)
        finally:
            chain.held.clear()
            for buffer in locked.values():
                buffer.num_locks -= 1
            self._depth -= 1
            if self._depth == 0 and self.room.device.times_on_host:
                self.counters.recompute_s += time.perf_counter() - start_s

    def plan(self, chain: _Chain, locked: dict[int, Buffer]) -> list[Buffer]:
        """Return the missing buffers in the order of recomputation, and count how often each buffer will be read.

        Lock the available buffers that the replays will read, so that they are not evicted before their last read.
        """
        order: list[Buffer] = []
        uses = chain.uses
        seen: dict[int, Buffer] = {}
        stack: list[tuple[Buffer, bool]] = [(target, False) for target in chain.targets.values()]
        while stack:
            buffer, is_done = stack.pop()
            if is_done:
                order.append(buffer)
                continue
            if id(buffer) in seen:
                continue
            seen[id(buffer)] = buffer
            if id(buffer) not in chain.targets and (
                buffer.copy is not None or buffer.fetching is not None or resident(buffer) is not None
            ):
                buffer.num_locks += 1
                locked[id(buffer)] = buffer
                continue
            if buffer.op is None:
                msg = (
                    f"{buffer.origin or 'a tensor'} of {buffer.size_bytes} bytes is needed to recompute a saved "
                    "tensor, but was overwritten by code that is not recorded: keep the MemoryBudget open around the "
                    "whole loop"
                )
                raise SavedTensorError(msg)
            stack.append((buffer, True))
            for source in sources(buffer.op):
                uses[id(source)] = uses.get(id(source), 0) + 1
                stack.append((source, False))
        # In the order of their first run: whatever the program made late, such as a large constant right before its
        # use, is made late again. A depth-first order may hold all such constants of a chain at once.
        order.sort(key=_creation_order)
        return order

    def _carry_out(self, chain: _Chain, order: list[Buffer], locked: dict[int, Buffer]) -> None:
        uses, held = chain.uses, chain.held
        for buffer in order:
            if id(buffer) not in held:
                storage = resident(buffer)
                if storage is None:
                    self._replay(buffer, chain)
                else:
                    chain.hold(buffer, storage)
                storage = None
            entry = buffer.op
            assert entry is not None
            for source in sources(entry):
                left = uses[id(source)] = uses[id(source)] - 1
                if left == 0 and locked.pop(id(source), None) is not None:
                    source.num_locks -= 1
                if left == 0 and id(source) not in chain.targets:
                    held.pop(id(source), None)
                    if chain.passing.pop(id(source), None) is not None:
                        self.ledger.release(source)
                        self.room.costs.note_dropped(source)

    def _replay(self, buffer: Buffer, chain: _Chain) -> None:
        entry = buffer.op
        assert entry is not None
        if self.ledger.surveys:
            self._count_replay(entry, buffer, chain)
            return
        if self.on_replay is not None:
            self.on_replay(entry)
        build = _Arguments(self, entry, chain.held)
        self.counters.num_recomputed_ops += 1
        try:
            args = [build.one(argument) for argument in entry.args]
            kwargs = {name: build.one(argument) for name, argument in entry.kwargs.items()} if entry.kwargs else {}
            if entry.facts.kind is Kind.COMPUTE or entry.facts.keeps_statistics:
                size_bytes = entry.output_bytes + entry.workspace_bytes
                self.room.make(size_bytes, f"{entry.facts.name} (replayed)")
            elif entry.workspace_bytes:  # it writes a copy that exists already
                self.room.make(entry.workspace_bytes, f"{entry.facts.name} (replayed)")
            try:
                outputs = replay_op(entry, args, kwargs)
            except RuntimeError as error:
                run = partial(replay_op, entry, args, kwargs)
                may = may_retry_replay(error, entry.facts)
                if not (may and prepare_retry(error, entry.facts, self.room, run)):
                    raise
                outputs = run_again(error, entry.facts, self.room, run)
            if not self.room.device.times_on_host:
                self.counters.recompute_s += entry.time_s
            args = kwargs = run = None
            self._take(entry, outputs, build.written(), buffer, chain)
        finally:
            args = kwargs = outputs = run = None
            build.clear()
        self.ledger.clock += 1

    def _count_replay(self, entry: OpEntry, wanted: Buffer, chain: _Chain) -> None:
        """Simulate a replay in a survey: make room and storages, but run nothing."""
        sources_alive = [self.bring(source) for source in sources(entry) if id(source) not in chain.held]
        expected = [buffer for reference in entry.outputs if (buffer := reference()) is not None]
        persistents = self.room.persistents
        if persistents is not None:
            persistents.in_use.begin(sources_alive)  # a real replay holds them, so that they stay
        try:
            self.room.make(entry.output_bytes + entry.workspace_bytes, f"{entry.facts.name} (replayed)")
        finally:
            if persistents is not None:
                persistents.in_use.end()
        for buffer in expected:
            storage = torch.UntypedStorage(buffer.size_bytes, device=self.ledger.new_device)
            self.ledger.know(storage)
            if buffer is wanted or chain.misses(buffer):
                self.ledger.brought_back(buffer, storage)
                chain.hold(buffer, storage)
        sources_alive.clear()
        self.ledger.clock += 1

    def _take(
        self, entry: OpEntry, outputs: Any, written: list[torch.UntypedStorage], wanted: Buffer, chain: _Chain
    ) -> None:
        writes = entry.facts.kind is Kind.WRITE and not entry.facts.keeps_statistics
        results = outputs if isinstance(outputs, tuple | list) else (outputs,)
        for reference in entry.outputs:
            buffer = reference()
            if buffer is None:
                continue
            storage = written[buffer.output_index] if writes else storage_behind(results[buffer.output_index])
            size_bytes = storage.nbytes() if storage.device in self.ledger.counted_devices else 0
            if size_bytes != buffer.size_bytes:
                msg = (
                    f"recomputing {entry.facts.name} gave {size_bytes} bytes, but its first run gave "
                    f"{buffer.size_bytes} bytes: keep it (decisions='keep')"
                )
                raise ReplayError(msg)
            if buffer is wanted or chain.misses(buffer):
                if buffer.digest is not None and digest_of(storage) != buffer.digest:
                    msg = (
                        f"recomputing {entry.facts.name} gave other values than its first run, so the op is not "
                        "deterministic here: keep it (decisions='keep')"
                    )
                    raise ReplayError(msg)
                self.ledger.brought_back(buffer, storage)
                self.counters.recomputed_bytes += buffer.size_bytes
                chain.hold(buffer, storage)
                if not chain.keeps_others and id(buffer) not in chain.targets:
                    chain.passing[id(buffer)] = buffer
        if not writes:
            for result in results:
                storage = storage_of(result) if isinstance(result, torch.Tensor) else None
                if storage is not None:
                    self.ledger.know(storage)


class _Chain:
    """The state of one chain of replays.

    Args:
        targets: What it brings back.
        keeps_others: Whether other buffers that saved tensors need stay where the chain makes them on its way.
    """

    def __init__(self, targets: list[Buffer], *, keeps_others: bool = True) -> None:
        self.targets = {id(target): target for target in targets}
        self.keeps_others = keeps_others
        self.uses: dict[int, int] = {}  # how often each buffer will still be read, by id
        self.held: dict[int, torch.UntypedStorage] = {}  # of the targets, and of buffers that will still be read
        self.passing: dict[int, Buffer] = {}  # brought back on the way: released after their last use

    def misses(self, buffer: Buffer) -> bool:
        """Return whether to bring back a buffer that a replay has made on the side: not if it is being fetched."""
        if buffer.fetching is not None or resident(buffer) is not None:
            return False
        if id(buffer) in self.targets or self.uses.get(id(buffer)):
            return True
        return self.keeps_others and buffer.num_saved > 0

    def hold(self, buffer: Buffer, storage: torch.UntypedStorage) -> None:
        """Hold a storage if it is a target's or will still be read."""
        if id(buffer) in self.targets or self.uses.get(id(buffer)):
            self.held[id(buffer)] = storage


def _creation_order(buffer: Buffer) -> int:
    return buffer.id


def _check_version(buffer: Buffer) -> None:
    """Raise ReplayError if code that is not recorded has changed a source.

    A witness that has exchanged its storage since (`set_`, `.data = other`) counts that, and writes to the other one.
    """
    witness = buffer.witness
    if witness is None or buffer.witness_version in (version_of(witness), UNKNOWN_VERSION):
        return
    if storage_address(witness) == buffer.witness_address:
        raise_changed(buffer.size_bytes, version_of(witness), buffer.witness_version)


def _is_as_seen(tensor: torch.Tensor, view: View) -> bool:
    """Return whether a number that was passed to an op is still what the op has seen: nobody exchanged its storage."""
    buffer = view.buffer
    if tensor is buffer.strong:
        return True
    return (
        tensor is buffer.witness and storage_address(tensor) == buffer.witness_address and is_same_number(tensor, view)
    )


def raise_changed(size_bytes: int, version: int, expected: int) -> None:
    """Raise ReplayError for a source that code has changed which is not recorded."""
    msg = (
        f"a tensor of {size_bytes} bytes is needed to recompute a saved tensor, but was changed in place by code that "
        f"is not recorded (version {version}, recorded {expected}): keep the MemoryBudget open around the whole loop"
    )
    raise ReplayError(msg)


class _Arguments:
    """Rebuilds an op's arguments, and holds their storages and locks until the op has been replayed."""

    def __init__(self, owner: Replayer, entry: OpEntry, held: dict[int, torch.UntypedStorage]) -> None:
        self.owner = owner
        self.held = held
        writes = entry.facts.kind is Kind.WRITE and not entry.facts.keeps_statistics
        self.overwritten = {id(buffer): buffer for buffer in written_sources(entry)} if writes else {}
        self.clones: dict[int, torch.UntypedStorage] = {}
        self.fresh: list[torch.UntypedStorage] = []
        self.storages: list[torch.UntypedStorage] = []
        self.locked: list[Buffer] = []

    def one(self, argument: Any) -> Any:
        if argument.__class__ is View:
            return self._view(argument)
        if argument.__class__ is list:
            return [self.one(item) for item in argument]
        if argument.__class__ is Scratch:
            return torch.ones(argument.shape, dtype=argument.dtype, device=argument.device)
        if argument.__class__ is Fresh:
            if argument.device in self.owner.ledger.counted_devices:
                self.owner.room.make(argument.size_bytes, "a replay")
            storage = torch.UntypedStorage(argument.size_bytes, device=argument.device)
            self.owner.ledger.know(storage)
            self.fresh.append(storage)
            return torch.empty(0, dtype=argument.dtype, device=storage.device).set_(
                storage, argument.offset, argument.shape, argument.stride
            )
        return argument

    def _view(self, view: View) -> torch.Tensor:
        buffer = view.buffer
        if view.tensor is not None and buffer.strong is not None:
            # Scalars are passed through unless overwritten. Then their old content is in a copy.
            if _is_as_seen(view.tensor, view):
                _check_version(buffer)
                return view.tensor
            return view.on(storage_behind(buffer.strong))
        _check_version(buffer)
        storage = self.held.get(id(buffer))
        if storage is None:
            storage = self.owner.bring(buffer)
        if id(buffer) in self.overwritten:
            # The op writes this storage: pass a copy of the WHOLE storage, the same copy for every argument on it, and
            # never the resident storage.
            clone = self.clones.get(id(buffer))
            if clone is None:
                buffer.num_locks += 1
                self.locked.append(buffer)
                self.owner.room.make(buffer.size_bytes, "the replay of an in-place op")
                clone = storage.clone()
                self.owner.ledger.know(clone)
                self.clones[id(buffer)] = clone
            storage = clone
        else:
            buffer.num_locks += 1
            self.locked.append(buffer)
        self.storages.append(storage)
        return view.on(storage)

    def written(self) -> list[torch.UntypedStorage]:
        """Return what the op writes, in the order of the entry's outputs."""
        return self.fresh or [self.clones[id_] for id_ in self.overwritten]

    def clear(self) -> None:
        self.storages.clear()
        self.clones.clear()
        self.fresh.clear()
        for buffer in self.locked:
            buffer.num_locks -= 1
        self.locked.clear()
