"""The interface through which the runtime reports what happens in a step, and the observer that ignores it.

During the first step, observe/ writes a trace from these calls. Afterwards the null object below is the observer, and a
step costs a few empty calls.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch

    from torchdelta.aten.facts import OpFacts
    from torchdelta.runtime.state.buffer import Buffer, OpEntry, StorageRecord, View
    from torchdelta.runtime.state.need import Timing
    from torchdelta.runtime.state.persistent import Persistent
    from torchdelta.trace.model import BufferKind

__all__ = ["Observer", "Observing"]


class Observer:
    """Ignores what happens in a step. The base class of the observers that do something."""

    wants_every_op = False  # whether ops of backward are recorded even if backward fits
    wants_uses = False  # whether uses of persistent tensors are reported even if none of them has left

    def module_of(self, record: StorageRecord) -> str:
        """Return the path of the module whose op made a storage, or an empty string if it is not known."""
        del record
        return ""

    def on_found(self, record: StorageRecord, tensor: torch.Tensor, kind: BufferKind | None = None) -> None:
        """A storage exists before the step, seen through one of its tensors."""

    def on_storage_death(self, record: StorageRecord) -> None:
        """A living storage died."""

    def on_return(self, buffer: Buffer, record: StorageRecord) -> None:
        """A buffer was brought back into a new storage."""

    def on_save(self, buffer: Buffer, view: View) -> None:
        """Autograd saved a tensor whose buffer may leave."""

    def on_stay(self, tensor: torch.Tensor) -> None:
        """Autograd saved a tensor that stays."""

    def on_unsave(self, buffer: Buffer) -> None:
        """No handle of a saved tensor needs a buffer any more."""

    def on_unpack(self, tensor: torch.Tensor, save: int = -1) -> None:
        """Backward reads a saved tensor. `save` is its number in the step, -1 if it stays."""

    def on_persistent(self, known: Persistent) -> None:
        """A persistent tensor was found."""

    def on_use(self, record: StorageRecord, key: int) -> None:
        """Something is about to use a persistent tensor, which `key` identifies across steps."""

    def on_op(
        self,
        facts: OpFacts,
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None,
        out: Any,
        time_s: float,
        *,
        written: Iterable[torch.Tensor] = (),
        entry: OpEntry | None = None,
        workspace_bytes: int = 0,
        possible_bytes: int = 0,
        timing: Timing | None = None,
    ) -> None:
        """An op has run. `written` are the arguments that it wrote, `entry` is what can replay it.

        `possible_bytes` is what it may take beyond its workspace, where nothing measures that.
        """

    def on_backward_start(self, gradients: Any) -> None:
        """A backward begins with these gradients of its outputs."""

    def on_gradients(self, gradients: Iterable[torch.Tensor | None]) -> None:
        """An autograd node is about to run on these gradients."""

    def on_leaf_gradient(self, leaf: torch.Tensor, gradient: torch.Tensor) -> None:
        """The `.grad` of a leaf was accumulated into."""

    def on_opaque_start(self, arguments: Iterable[Any] = (), workspace_bytes: int = 0) -> None:
        """Code whose ops are not recorded begins: a compiled region, or a node that runs without the dispatch mode."""

    def on_opaque_end(self, name: str, outputs: Any, *, node: str = "", workspace_bytes: int = 0) -> None:
        """Code whose ops are not recorded has ended."""


class Observing:
    """Holds the current observer. Mutable; one for each session, shared by all parts that report to it."""

    __slots__ = ("observer",)

    def __init__(self) -> None:
        self.observer = Observer()
