"""Runs an op that calls functions of the program, such as `torch.cond`: torch allows no dispatch mode inside."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torchdelta.runtime.interrupts import call_outside
from torchdelta.runtime.record.unseen_writes import UnseenWrites
from torchdelta.runtime.state.kinds import tensors_in

if TYPE_CHECKING:
    from torchdelta.runtime.record.unseen_writes import RecordsWrites

__all__ = ["run_higher_order"]


def run_higher_order(recorder: RecordsWrites, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
    """Run the op without the recorder, and end the contents of the arguments that it has written."""
    unseen = UnseenWrites(recorder, tensors_in((args, kwargs)))
    try:
        return call_outside(func, *args, **(kwargs or {}))
    finally:
        unseen.end()
