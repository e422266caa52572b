"""How the saved tensors of a traced step were numbered, and where in the trace each was packed and unpacked.

A *save* is one call of the pack hook whose tensor may leave (tensors that stay are not numbered). Saves are numbered
from 0 in the order of a step's forward; the number is the link between a trace and later runs of the same step.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from torchdelta.runtime.state.buffer import Buffer, View
    from torchdelta.trace.model import Phase

__all__ = ["Departure", "Signature", "StepLog", "next_exact_hash", "next_shape_free_hash", "signature_of"]

Signature: TypeAlias = "tuple[torch.Size, torch.dtype, str]"
"""What has to be equal for a save to be the same as in the trace: shape, dtype, name of the op that made the tensor."""


def signature_of(buffer: Buffer, view: View) -> Signature:
    """Return the signature of a save.

    The op counts only while it is recorded: the running statistics of a batch norm, for example, come from outside in
    the first step of a scope and from an op of the step before in all others.
    """
    return view.shape, view.dtype, buffer.origin if buffer.op is not None else ""


def next_exact_hash(before: int, signature: Signature) -> int:
    """Return the hash of all saves up to this one, from that of the saves before it."""
    return hash((before, signature))


def next_shape_free_hash(before: int, signature: Signature) -> int:
    """Return the hash of all saves up to this one, without the lengths of their dimensions."""
    shape, dtype, origin = signature
    return hash((before, len(shape), dtype, origin))


@dataclass(frozen=True, slots=True, kw_only=True)
class Departure:
    """A persistent tensor that leaves in a step and is not used again in its plan: departures.py.

    Attributes:
        copy_op: Its copy out begins before this op.
        leave_op: Its memory is free from this op on.
        key: Identifies the tensor.
        size_bytes: Its size.
    """

    copy_op: int
    leave_op: int
    key: int
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLog:
    """The saves of one traced step, and its uses of persistent tensors.

    Attributes:
        signatures: By save.
        sizes_bytes: By save: bytes of the storage behind it.
        pack_ops: By save: how many ops of the trace came before it. The op that saves may be running.
        buffer_ids: By save: the buffer of the trace; -1 if the trace does not have it.
        unpacks: (save, ops of the trace before it), in the order of backward.
        num_backwards: Passes of the engine in the step, nested ones included.
        saves_in_backward: Whether tensors were saved while a backward ran, as by a reentrant checkpoint.
        uses: (key, phase, ops of the trace before it), for each use of a persistent tensor, in order. Empty where
            parameters, gradients and optimizer states may not leave.
        persistents: By id of the trace's buffers that are content of a persistent tensor: its key.
        num_ops: Ops of the trace.
        departures: The persistent tensors that leave without a next use.
        outside_s: Seconds of the step that are part of no op and that the budget did not cost, such as reading data.
        had_optimizer: Whether an optimizer stepped at its end.
    """

    signatures: tuple[Signature, ...]
    sizes_bytes: tuple[int, ...]
    pack_ops: tuple[int, ...]
    buffer_ids: tuple[int, ...]
    unpacks: tuple[tuple[int, int], ...]
    num_backwards: int
    saves_in_backward: bool
    uses: tuple[tuple[int, Phase, int], ...] = ()
    persistents: Mapping[int, int] = field(default_factory=dict)
    num_ops: int = 0
    departures: tuple[Departure, ...] = ()
    outside_s: float = 0.0
    had_optimizer: bool = True

    def why_not_followed(self) -> str:
        """Return why no program of this step can be followed; an empty string if one can."""
        if not self.signatures:
            return "no tensor that could leave was saved"
        if not self.num_backwards:
            return "the step has no backward pass"
        if self.saves_in_backward:
            return "tensors are saved while backward runs"
        return ""
