"""Captures an op for the tape: everything that its replay needs, or None where it cannot be replayed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from torchdelta._torch.storages import storage_behind
from torchdelta._torch.tensors import is_dense
from torchdelta.aten.batch_norm import STATISTICS_POSITIONS, TRAINING_POSITION
from torchdelta.aten.facts import Kind
from torchdelta.runtime.state.buffer import OpEntry
from torchdelta.runtime.state.kinds import tensors_in
from torchdelta.runtime.state.tape import Fresh, Scratch, capture, sources

if TYPE_CHECKING:
    from torchdelta.aten.facts import OpFacts
    from torchdelta.runtime.device.device import Device
    from torchdelta.runtime.state.buffer import Buffer
    from torchdelta.runtime.state.ledger import Ledger

__all__ = ["Capturer", "is_differentiated", "statistics_of"]


def statistics_of(facts: OpFacts, args: tuple[Any, ...]) -> list[torch.Tensor]:
    """Return the running statistics that a batch norm in training mode writes; [] for every other op."""
    if not facts.keeps_statistics or len(args) <= TRAINING_POSITION or not args[TRAINING_POSITION]:
        return []
    return [args[i] for i in STATISTICS_POSITIONS if isinstance(args[i], torch.Tensor)]


class Capturer:
    """Captures ops whose replay gives the same bits."""

    def __init__(self, ledger: Ledger, device: Device) -> None:
        self.ledger = ledger
        self.device = device

    def capture(
        self,
        func: Any,
        facts: OpFacts,
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None,
        targets: list[torch.Tensor],
    ) -> OpEntry | None:
        """Return the op's entry for the tape, or None if it cannot be replayed.

        An in-place op can be replayed if it overwrites the whole storage, or if the old content can be recomputed (the
        replay writes a copy of it). A constant cannot where grad mode is off: a C++ extension may be about to write it.
        """
        if not self.device.may_replay(facts, args, kwargs):
            return None
        if facts.is_constant and not torch.is_grad_enabled():  # as in the forward of a custom Function
            return None
        if facts.kind is Kind.COMPUTE or facts.keeps_statistics:
            return self._entry(func, facts, args, kwargs, hides=bool(targets))
        if facts.kind is not Kind.WRITE or not targets:
            return None
        try:
            covers = facts.overwrites and len(targets) == 1 and targets[0] is args[0] and _covers_storage(targets[0])
            if covers:
                entry = self._entry(func, facts, args[1:], kwargs, hides=False)
                if entry is not None:
                    entry.args.insert(0, Fresh(targets[0], storage_behind(targets[0]).nbytes()))
                return entry
            if not all(map(self._is_recomputable, targets)):
                return None
        except RuntimeError:
            return None
        return self._entry(func, facts, args, kwargs, hides=False)

    def _is_recomputable(self, tensor: torch.Tensor) -> bool:
        record = self.ledger.find(tensor)
        return record is not None and record.current is not None and record.current.op is not None

    def _entry(
        self, func: Any, facts: OpFacts, args: tuple[Any, ...], kwargs: dict[str, Any] | None, *, hides: bool
    ) -> OpEntry | None:
        """Return the op with its arguments by value, or None if it reads what a replay might not find.

        That is a tensor without a storage, a storage that is freed and filled again, or memory outside of torch.

        With `hides`, the replay writes scratch tensors in place of batch norm's running statistics.
        """
        ledger = self.ledger
        view_of = ledger.view_of
        if ledger.has_resizable and _reads_resizable(ledger, (*args, *(kwargs or {}).values())):
            return None
        try:
            captured: list[Any] = []
            for index, a in enumerate(args):
                if hides and index in STATISTICS_POSITIONS and isinstance(a, torch.Tensor):
                    captured.append(Scratch(a))
                elif isinstance(a, torch.Tensor):
                    captured.append(view_of(a))
                elif a.__class__ is list or a.__class__ is tuple:
                    captured.append(capture(a, view_of))
                else:
                    captured.append(a)
            captured_kwargs = {name: capture(a, view_of) for name, a in kwargs.items()} if kwargs else None
        except RuntimeError:
            return None
        entry = OpEntry(func, facts, captured, captured_kwargs)
        return None if ledger.has_outside and any(map(_is_outside, sources(entry))) else entry


def _is_outside(source: Buffer) -> bool:
    return source.record is not None and source.record.is_outside is True


def _covers_storage(tensor: torch.Tensor) -> bool:
    """Return whether what is written through a tensor is all of its storage, as it is written."""
    if tensor.is_conj() or tensor.is_neg() or not is_dense(tensor):
        return False
    return tensor.numel() * tensor.element_size() == storage_behind(tensor).nbytes()


def _reads_resizable(ledger: Ledger, arguments: tuple[Any, ...]) -> bool:
    """Return whether an argument's storage is freed and filled again without autograd's knowledge (resized.py)."""
    for tensor in tensors_in(arguments):
        try:
            record = ledger.find(tensor)
        except RuntimeError:  # no storage
            continue
        if record is not None and record.is_resizable:
            return True
    return False


def is_differentiated(args: tuple[Any, ...]) -> bool:
    """Return whether autograd differentiates an op with these arguments."""
    for argument in args:
        for item in argument if argument.__class__ is list or argument.__class__ is tuple else (argument,):
            if isinstance(item, torch.Tensor) and item.requires_grad:
                return True
    return False
