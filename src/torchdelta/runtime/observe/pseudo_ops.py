"""Pseudo-ops for content that no recorded op made: sums made by the engine, and code whose ops are not recorded.

See [Note: content that no op made] in trace_builder.py.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import torch
from msgspec import structs

from torchdelta._torch.tensors import version_of
from torchdelta.runtime.observe.draft import size_of
from torchdelta.runtime.observe.step_draft import StepDraft, guarded
from torchdelta.trace.model import Op

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torchdelta.runtime.observe.draft import PlainStorage, PlainVersion
    from torchdelta.runtime.state import buffer as live

__all__ = ["PseudoOps"]


class PseudoOps(StepDraft):
    """Writes the pseudo-ops of a step."""

    @guarded
    def on_backward_start(self, gradients: Any) -> None:
        """Move the ops that have just made the gradients of the loss from the forward to the backward."""
        self._num_backwards += 1
        versions = [self._known(gradient) for gradient in gradients or () if isinstance(gradient, torch.Tensor)]
        ids = {version.id for version in versions if version is not None}
        for index in range(len(self._draft.ops) - 1, max(-1, len(self._draft.ops) - 1 - len(ids)), -1):
            op = self._draft.ops[index]
            if not op.writes or not ids.issuperset(op.writes):
                return
            self._draft.ops[index] = structs.replace(op, phase="backward", module="")
            for id_ in op.writes:
                self._draft.versions[id_].storage.birth_phase = "backward"

    @guarded
    def on_gradients(self, gradients: Iterable[torch.Tensor | None]) -> None:
        """Record the input gradients of a node that is about to run. Some may be sums made by the engine."""
        flowing: set[PlainStorage] = set()
        for gradient in gradients:
            record = self._record(gradient) if gradient is not None else None
            if gradient is None or record is None:
                continue
            flowing.add(self._accumulated(record, gradient).storage)
        self._draft.flowing = flowing
        self._draft.start_of_node = len(self._draft.ops)

    @guarded
    def on_leaf_gradient(self, leaf: torch.Tensor, gradient: torch.Tensor) -> None:
        """Record the `.grad` of a leaf that the engine has just accumulated into."""
        owner = self._known(leaf)
        if owner is not None:
            owner.storage.kind = "parameter"
        record = self._record(gradient)
        if record is None:
            return
        storage = self._accumulated(record, gradient).storage
        storage.kind = "gradient"
        storage.noted_version = version_of(gradient)

    def _accumulated(self, record: live.StorageRecord, gradient: torch.Tensor) -> PlainVersion:
        """Return the version of a gradient, with a pseudo-op if the engine has made it or added to it."""
        version = self._draft.by_record.get(record.id)
        if version is None:
            return self._accumulate(record, None)
        if _is_added_to(version.storage, gradient):
            version = self._accumulate(record, version)
            version.storage.noted_version = version_of(gradient)
        return version

    def _accumulate(self, record: live.StorageRecord, old: PlainVersion | None) -> PlainVersion:
        index = len(self._draft.ops)
        reads = [] if old is None else [old.id]
        reads += self._draft.sources_of_sum(size_of(record), 2 - len(reads))
        version = self._born(record, index, "backward") if old is None else self._draft.overwritten(old, record, index)
        name = "torchdelta.accumulate" if reads else "torchdelta.external"
        self._add(Op(index=index, name=name, phase="backward", reads=tuple(reads), writes=(version.id,)))
        return version

    @guarded
    def on_opaque_start(self, arguments: Iterable[Any] = (), workspace_bytes: int = 0) -> None:
        """Begin a pseudo-op for code whose ops are not recorded."""
        self._opaque_reads = {}
        self._read_all(arguments, self._opaque_reads)
        self._opaque_workspace_bytes = workspace_bytes
        self._opaque_start_s = time.perf_counter()

    @guarded
    def on_opaque_end(self, name: str, outputs: Any, *, node: str = "", workspace_bytes: int = 0) -> None:
        """Add the pseudo-op for code whose ops are not recorded. The ledger knows its outputs already."""
        time_s = time.perf_counter() - self._opaque_start_s
        reads, self._opaque_reads = self._opaque_reads, None
        if reads is None:
            return
        index, phase = len(self._draft.ops), self._steps.phase
        writes: list[int] = []
        stack = [outputs]
        while stack:
            item = stack.pop()
            if isinstance(item, tuple | list):
                stack.extend(reversed(item))
            elif isinstance(item, torch.Tensor):
                record = self._record(item)
                if record is not None and record.id not in self._draft.by_record:
                    writes.append(self._born(record, index, phase).id)
        self._add(
            Op(
                index=index,
                name=name,
                phase=phase,
                module=self._paths.current() if phase == "forward" else "",
                reads=tuple(
                    id_
                    for id_ in reads
                    if self._draft.versions[id_].storage.current.id == id_
                    and self._draft.versions[id_].storage.is_alive
                ),
                writes=tuple(writes),
                time_s=time_s,
                workspace_bytes=max(self._opaque_workspace_bytes, workspace_bytes),
                node=node,
            )
        )
        self._draft.end_of_op = index + 1


def _is_added_to(storage: PlainStorage, gradient: torch.Tensor) -> bool:
    """Return whether the engine has added to a gradient in place since the last look at it."""
    is_gradient = storage.kind == "gradient" or storage.birth_phase == "backward"
    return is_gradient and version_of(gradient) > storage.noted_version
