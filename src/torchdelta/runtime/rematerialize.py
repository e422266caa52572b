"""Rematerializer: runs recorded ops again to get back a buffer that was dropped.

Complexity: linear in the missing ops of the chain; each is run once, and whatever saved buffer comes along on the way
is retained.

[Note: no reference cycles]
A cycle that touches a storage keeps it until the garbage collector runs; a recursive closure here once made the
recomputing peak higher than the plain one. So: no recursive closures, no exception objects stored, and locals that hold
storages are cleared in `finally` (tested with gc.disable()).
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import torch

from torchdelta.aten.facts import Kind
from torchdelta.errors import ReplayError, SavedTensorError
from torchdelta.runtime.buffer import Buffer, View
from torchdelta.runtime.residency import digest_of
from torchdelta.runtime.retry import may_replay_again
from torchdelta.runtime.tape import Fresh, OpEntry, Scratch, run_again, sources, written_sources

if TYPE_CHECKING:
    from torchdelta.runtime.counters import Counters
    from torchdelta.runtime.ledger import Ledger
    from torchdelta.runtime.residency import Residency

# A cost estimate walks at most this many missing ops: beyond it the answer is "too dear" anyway.
COST_WALK_OPS = 400


class Rematerializer:
    """Gets dropped buffers back by replaying their ops from buffers that are there."""

    def __init__(self, ledger: Ledger, residency: Residency, counters: Counters) -> None:
        self.ledger = ledger
        self.residency = residency
        self.counters = counters
        self._depth = 0

    def recompute(self, target: Buffer) -> torch.UntypedStorage:
        """Recompute a buffer and return its storage. Call it inside `Quietly`.

        Raises:
            ReplayError: A source was changed where nobody could see it, or the replay gave something else than the
                first time.
        """
        start_s = time.perf_counter()
        self._depth += 1
        locked: list[Buffer] = []
        kept: dict[int, torch.UntypedStorage] = {}
        try:
            order, uses = self._plan(target, locked)
            return self._carry_out(target, order, uses, kept)
        finally:
            kept.clear()
            for buffer in locked:
                buffer.num_locks -= 1
            self._depth -= 1
            if self._depth == 0 and self.ledger.device.type == "cpu":
                self.counters.recompute_s += time.perf_counter() - start_s

    def missing_time_s(self, target: Buffer) -> float:
        """Return the seconds that recomputing a buffer would take now.

        Its own op and every missing op above it, swap-ins included.
        """
        if target.op is None:
            return float("inf")
        time_s = target.op.time_s
        seen = {id(target)}
        stack = list(sources(target.op))
        resident = self.residency.resident
        while stack:
            buffer = stack.pop()
            if id(buffer) in seen:
                continue
            seen.add(id(buffer))
            if buffer.strong is not None or resident(buffer) is not None:
                continue
            if buffer.copy is not None:
                time_s += self.residency.swap_time_s(buffer)
                continue
            if buffer.op is None or len(seen) > COST_WALK_OPS:
                return float("inf")
            time_s += buffer.op.time_s
            stack.extend(sources(buffer.op))
        return time_s

    def _plan(self, target: Buffer, locked: list[Buffer]) -> tuple[list[Buffer], dict[int, int]]:
        """Return the missing buffers in the order of recomputation, and how often each buffer will be read.

        Lock what the plan counts on.
        """
        order: list[Buffer] = []
        uses: dict[int, int] = {}
        seen: dict[int, Buffer] = {}
        stack: list[tuple[Buffer, bool]] = [(target, False)]
        resident = self.residency.resident
        while stack:
            buffer, is_done = stack.pop()
            if is_done:
                order.append(buffer)
                continue
            if id(buffer) in seen:
                continue
            seen[id(buffer)] = buffer
            if buffer is not target and (
                buffer.copy is not None or buffer.fetching is not None or resident(buffer) is not None
            ):
                buffer.num_locks += 1
                locked.append(buffer)
                continue
            if buffer.op is None:
                msg = (
                    f"the content of {buffer.origin or 'a tensor'} ({buffer.size_bytes} bytes), which a recomputation "
                    "reads, was overwritten unseen"
                )
                raise SavedTensorError(msg)
            stack.append((buffer, True))
            for source in sources(buffer.op):
                uses[id(source)] = uses.get(id(source), 0) + 1
                stack.append((source, False))
        return order, uses

    def _carry_out(
        self, target: Buffer, order: list[Buffer], uses: dict[int, int], kept: dict[int, torch.UntypedStorage]
    ) -> torch.UntypedStorage:
        for buffer in order:
            if id(buffer) not in kept:
                storage = self.residency.resident(buffer)
                if storage is None:
                    self._replay(buffer, target, uses, kept)
                elif uses.get(id(buffer)) or buffer is target:
                    kept[id(buffer)] = storage
                storage = None
            entry = buffer.op
            assert entry is not None
            for source in sources(entry):
                left = uses[id(source)] = uses[id(source)] - 1
                if left == 0 and source is not target:
                    kept.pop(id(source), None)
        storage = kept.get(id(target))
        return storage if storage is not None else self.residency.bring(target)

    def _replay(
        self, buffer: Buffer, target: Buffer, uses: dict[int, int], kept: dict[int, torch.UntypedStorage]
    ) -> None:
        entry = buffer.op
        assert entry is not None
        if self.residency.surveys:
            self._count_replay(entry, buffer, target, uses, kept)
            return
        build = _Arguments(self, entry, kept)
        self.counters.num_recomputed_ops += 1
        try:
            args = [build.one(argument) for argument in entry.args]
            kwargs = {name: build.one(argument) for name, argument in entry.kwargs.items()} if entry.kwargs else {}
            if entry.facts.kind is Kind.COMPUTE or entry.facts.keeps_statistics:
                size_bytes = entry.output_bytes + entry.workspace_bytes
                self.residency.room(size_bytes, f"{entry.facts.name} (recomputed)")
            elif entry.workspace_bytes:  # it writes a copy, which is there already
                self.residency.room(entry.workspace_bytes, f"{entry.facts.name} (recomputed)")
            try:
                outputs = run_again(entry, args, kwargs)
            except RuntimeError as error:
                if not may_replay_again(error, entry.facts, self.residency):
                    raise
                outputs = run_again(entry, args, kwargs)
            if self.ledger.device.type != "cpu":  # there the host's clock does not see the ops
                self.counters.recompute_s += entry.time_s
            args = kwargs = None
            self._take(entry, outputs, build.written, buffer, target, uses, kept)
        finally:
            args = kwargs = outputs = None
            build.clear()
        self.ledger.clock += 1

    def _count_replay(
        self,
        entry: OpEntry,
        wanted: Buffer,
        target: Buffer,
        uses: dict[int, int],
        kept: dict[int, torch.UntypedStorage],
    ) -> None:
        """In a survey: make room and storages for a replay, but run nothing."""
        sources_there = [self.residency.bring(source) for source in sources(entry) if id(source) not in kept]
        expected = [buffer for reference in entry.outputs if (buffer := reference()) is not None]
        self.residency.room(entry.output_bytes + entry.workspace_bytes, f"{entry.facts.name} (recomputed)")
        for buffer in expected:
            storage = torch.UntypedStorage(buffer.size_bytes, device=self.ledger.new_device)
            self.ledger.know(storage)
            if buffer is wanted or (
                self.residency.resident(buffer) is None and (buffer.num_saved or uses.get(id(buffer)))
            ):
                self.residency.adopt(buffer, storage)
                if buffer is target or uses.get(id(buffer)):
                    kept[id(buffer)] = storage
        sources_there.clear()
        self.ledger.clock += 1

    def _take(
        self,
        entry: OpEntry,
        outputs: Any,
        written: list[torch.UntypedStorage],
        wanted: Buffer,
        target: Buffer,
        uses: dict[int, int],
        kept: dict[int, torch.UntypedStorage],
    ) -> None:
        writes = entry.facts.kind is Kind.WRITE and not entry.facts.keeps_statistics
        results = outputs if isinstance(outputs, tuple | list) else (outputs,)
        for reference in entry.outputs:
            buffer = reference()
            if buffer is None:
                continue
            storage = written[buffer.output_index] if writes else results[buffer.output_index].untyped_storage()
            size_bytes = storage.nbytes() if storage.device in self.ledger.counted_devices else 0
            if size_bytes != buffer.size_bytes:
                msg = (
                    f"recomputing {entry.facts.name} gave {size_bytes} bytes "
                    f"where the first run gave {buffer.size_bytes}"
                )
                raise ReplayError(msg)
            if buffer is wanted or (
                self.residency.resident(buffer) is None and (buffer.num_saved or uses.get(id(buffer)))
            ):
                if buffer.digest is not None and digest_of(storage) != buffer.digest:
                    msg = (
                        f"recomputing {entry.facts.name} gave other content than the first run: "
                        "it is not deterministic here; keep it (decisions='keep')"
                    )
                    raise ReplayError(msg)
                self.residency.adopt(buffer, storage)
                self.counters.recomputed_bytes += buffer.size_bytes
                if buffer is target or uses.get(id(buffer)):
                    kept[id(buffer)] = storage
        if not writes:
            for result in results:
                if isinstance(result, torch.Tensor):
                    self.ledger.know(result.untyped_storage())


def _check_version(buffer: Buffer) -> None:
    """Refuse a source whose content was changed where the recorder could not see it."""
    if buffer.witness is not None and buffer.witness._version != buffer.witness_version:
        msg = (
            f"a tensor of {buffer.size_bytes} bytes that a recomputation reads was changed in place "
            "where the budget could not see it "
            f"(version {buffer.witness._version}, recorded {buffer.witness_version}): "
            "keep the scope open around the whole loop"
        )
        raise ReplayError(msg)


class _Arguments:
    """Rebuilds an op's arguments, and holds their storages and locks until the op has run."""

    def __init__(self, owner: Rematerializer, entry: OpEntry, kept: dict[int, torch.UntypedStorage]) -> None:
        self.owner = owner
        self.kept = kept
        writes = entry.facts.kind is Kind.WRITE and not entry.facts.keeps_statistics
        self.overwritten = written_sources(entry) if writes else frozenset[int]()
        self.clones: dict[int, torch.UntypedStorage] = {}
        self.written: list[torch.UntypedStorage] = []  # in the order of the entry's outputs
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
                self.owner.residency.room(argument.size_bytes, "recompute")
            storage = torch.UntypedStorage(argument.size_bytes, device=argument.device)
            self.owner.ledger.know(storage)
            self.written.append(storage)
            return torch.empty(0, dtype=argument.dtype, device=storage.device).set_(
                storage, argument.offset, argument.shape, argument.stride
            )
        return argument

    def _view(self, view: View) -> torch.Tensor:
        buffer = view.buffer
        if view.tensor is not None and buffer.strong is not None:
            # A number stands for itself while nobody wrote it; afterwards its old content is in the copy that was kept.
            if view.tensor is buffer.witness or view.tensor is buffer.strong:
                _check_version(buffer)
                return view.tensor
            return view.on(buffer.strong.untyped_storage())
        residency = self.owner.residency
        _check_version(buffer)
        storage = self.kept.get(id(buffer))
        if storage is None:
            storage = residency.bring(buffer)
        if id(buffer) in self.overwritten:
            # The op writes it: give it a copy of the WHOLE storage, the same one for every argument on it, and never
            # the resident one.
            clone = self.clones.get(id(buffer))
            if clone is None:
                buffer.num_locks += 1
                self.locked.append(buffer)
                residency.room(buffer.size_bytes, "recompute of an in-place op")
                clone = storage.clone()
                self.owner.ledger.know(clone)
                self.clones[id(buffer)] = clone
                self.written.append(clone)
            storage = clone
        else:
            buffer.num_locks += 1
            self.locked.append(buffer)
        self.storages.append(storage)
        return view.on(storage)

    def clear(self) -> None:
        self.storages.clear()
        self.clones.clear()
        self.written.clear()
        for buffer in self.locked:
            buffer.num_locks -= 1
        self.locked.clear()
