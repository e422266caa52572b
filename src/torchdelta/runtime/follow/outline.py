"""Outlines: which ops and saved tensors the steps of a program have, and which of these have to be recorded.

[Note: recording in part]
A program replays some ops. Recording the others takes time in Python and is of no use. So one followed step is recorded
as a whole to learn its outline: the sequence of its ops and saved tensors, which ops were replayed, which ops write to
existing tensors, and what each op needs. The outline begins at the first saved tensor: a step is expected to be like
the latest one that began with a tensor of the same shape. Later steps are compared with their outline in C++
(native/gate.cpp, native/saved_hooks.cpp), and Python sees only

* the ops that were replayed in the learned step, and the ops that overwrite an input of these or a saved tensor,
* the saved tensors that leave, and the ones at whose unpack something is due,
* each op that fits the budget only after copies out have ended.

Once the backward of such a step is known as well, most of that is done without Python, too: see lane.py.

A tensor whose op is not recorded is treated like any tensor from before the scope: it can be swapped but not
recomputed. So correctness does not depend on the outline. If a step differs from it, recording resumes before the op
that differs, and the policy carries out the rest of that step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torchdelta.runtime.follow.lane import Lane

__all__ = ["Outline"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outline:
    """The ops and saved tensors of a step, from its first saved tensor to its backward.

    Attributes:
        ops: For the gate.
        saves: For the hooks.
        lane: What the native tape does of it; None if nothing.
        settings: The numeric settings of the first op; None if none is recorded. Which ops may be replayed depends on
            them.
        num_ops: How many ops there are.
        num_recorded: How many of them are recorded.
        saved_bytes: Of the saved buffers of the step, those that are not recorded included.
    """

    ops: object
    saves: object
    lane: Lane | None
    settings: tuple[Any, ...] | None
    num_ops: int
    num_recorded: int
    saved_bytes: int
