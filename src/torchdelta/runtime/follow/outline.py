"""Outlines: what the steps of a program do, and which of it has to be recorded.

[Note: recording in part]
A program replays some ops; recording all others costs Python and is of no use. So one followed step is recorded as a
whole to learn its outline: the sequence of its ops and saved tensors, which ops were replayed, which write to existing
tensors, and what each one needs. It begins where the program first has something to do; by then it is known which
step this is. Later steps are compared with it in C++ (native/gate.cpp, native/saved_hooks.cpp), and Python sees only

* the ops that were replayed in the learned step, and those that write what these or a saved tensor have read before,
* the saved tensors that leave, and those at whose unpack something is due,
* an op before which copies out have to end, since the budget has no room for it otherwise.

What is not recorded is like everything that a scope has not seen: a tensor without an op, which can be swapped and not
recomputed. So correctness does not depend on the outline. If a step differs from it, recording resumes before the op
that differs, and the policy carries out the rest of that step.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Outline"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outline:
    """The ops and saved tensors of a step, from the first saved tensor at which its program acts to its backward.

    Attributes:
        ops: For the gate.
        saves: For the hooks.
        num_ops: How many ops there are.
        num_recorded: How many of them are recorded.
    """

    ops: object
    saves: object
    num_ops: int
    num_recorded: int
