"""A tensor that lives across steps: a parameter, its gradient, or a state of its optimizer."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torchdelta.runtime.state.buffer import StorageRecord

__all__ = ["Persistent"]


class Persistent(NamedTuple):
    """A tensor that may leave.

    Attributes:
        record: Its storage.
        key: Identifies the tensor across steps; below 0 for a gradient.
        is_gradient: Whether it is the gradient of a parameter.
        is_state: Whether it is a state of an optimizer.
    """

    record: StorageRecord
    key: int
    is_gradient: bool = False
    is_state: bool = False
