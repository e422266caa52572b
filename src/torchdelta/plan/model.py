"""The plan: which buffers leave the device between two of their uses, how, and at which moments.

A plan belongs to one trace and to one budget. Time is the op index, as in the trace: a plan says *at which op* memory
is given back and taken again, never after how many seconds; the seconds are the simulator's affair. So it can be
checked (`plan.validate`) by liveness alone, without believing anybody's prices.

[Note: absences]
A buffer that stays is not mentioned. Every time that one is away is an `Absence`: it leaves after one of its uses (its
birth or a read) and is there again at its next use. A buffer can be away several times in a step: the class *saved*
has at most one absence a buffer, over the gap from the last use in forward to the first one in backward; the class
*extended* any gap of any buffer, dropped again after a replay included; the class *all* those of gradients, parameters
and optimizer states too, by swap, also over the end of the step.

The buffer's memory is free at the moments `leave_op <= i < return_op`. A swapped buffer keeps its memory until its copy
has ended, and takes it again when its swap-in is issued; a recomputed one is free right after its last use, and is
there again when its replay runs, immediately before the op `return_op`.

[Note: over the end]
An absence whose `next_use_op` is `num_ops` or more reaches into the following step, which is the same step again. What
leaves is the last version of a storage that outlives the step from before it (a parameter that the optimizer has just
written), what the following step finds is the storage's first version, and its next use is the first op that reads
that one or writes over it. `leave_op` and `return_op` count on in the same way: at the moments `i` of every step with
`leave_op <= i` the last version is away, at those with `leave_op - num_ops <= i < return_op - num_ops` the first one. A
`leave_op` of `num_ops` or more is a copy that ends in the following step: until then the memory is not free there.

[Note: replays]
A `Replay` reruns ops immediately before the op `at_op`, in the order given. What it makes lives, for each buffer, until
the last op of the same replay that reads it, unless an absence of the buffer ends at `at_op` (then it stays until its
next absence or its death) or it is among `keeps`: buffers that are dead, or away, and that stay from here on until the
moment given. Everything that a rerun op reads is on the device at that moment or made earlier in the same replay. An op
writes all of its outputs whenever it runs: those that nobody needs are freed at once.
"""

from typing import Literal

import msgspec

FORMAT_NAME = "torchdelta-plan"
FORMAT_VERSION = 2
"""What is written. Version 1 had no end record, and is read."""

READABLE_VERSIONS = (1, 2)

Action = Literal["swap", "recompute"]
"""How a buffer leaves; one that stays is not mentioned in a plan."""

DecisionClass = Literal["saved", "extended", "all"]
"""Which buffers may leave, and how: plans and bounds name theirs and are compared within it.

`saved`: buffers that autograd saved in forward, once each, from the last use in forward to the first one in backward.
`extended`: any buffer born in the step, in any gap between its uses, several times. `all`: gradients, optimizer states
and parameters as well, by swap.
"""

TierName = Literal["host", "disk"]


class PlanHeader(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="record", tag="header", forbid_unknown_fields=True
):
    """What a plan was made for, and by whom. The first record of a file.

    Attributes:
        format: Always `FORMAT_NAME`.
        version: Version of the format; a reader refuses a newer one than its own.
        planner: Registered name of the planner, such as `"torchdelta"`.
        effort: Effort that it was asked for, such as `"best"`; `""` where it has only one.
        decision_class: The class of its decisions.
        machine: Name of the machine that it was priced on.
        budget_bytes: Bytes that the device may hold at any moment.
        num_ops: Ops of the trace that it belongs to.
        num_buffers: Buffers of the trace that it belongs to.
    """

    format: str = FORMAT_NAME
    version: int = FORMAT_VERSION
    planner: str
    effort: str = ""
    decision_class: DecisionClass = "saved"
    machine: str
    budget_bytes: int
    num_ops: int
    num_buffers: int


class Absence(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="record", tag="absence", forbid_unknown_fields=True, gc=False
):
    """One time that a buffer is not on the device. See [Note: absences].

    Attributes:
        buffer_id: The buffer.
        last_use_op: The op after which it leaves: the one that wrote it, one that reads it, or the `at_op` of a replay
            that reads or keeps it.
        next_use_op: The next op that reads it, or the `at_op` of the next replay that does. In the class *all* it may
            be `num_ops` or more: then it is used next by op `next_use_op - num_ops` of the following step. See
            [Note: over the end].
        action: How.
        tier: Where a swapped buffer goes.
        leave_op: First moment at which its memory is free.
        return_op: First moment at which its memory is taken again: at most `next_use_op`.
    """

    buffer_id: int
    last_use_op: int
    next_use_op: int
    action: Action
    tier: TierName = "host"
    leave_op: int
    return_op: int


class Keep(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, gc=False):
    """A buffer that a replay made on its way and that stays for a while.

    Attributes:
        buffer_id: The buffer.
        until_op: First moment at which it is no longer there.
    """

    buffer_id: int
    until_op: int


class Replay(msgspec.Struct, frozen=True, kw_only=True, tag_field="record", tag="replay", forbid_unknown_fields=True):
    """Ops that run once more. See [Note: replays].

    Attributes:
        at_op: The op immediately before which they run.
        ops: Indices of the ops, in the order in which they run.
        keeps: What stays of their outputs beside the buffers whose absence ends here.
    """

    at_op: int
    ops: tuple[int, ...]
    keeps: tuple[Keep, ...] = ()


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What leaves the device in one step, and when it comes back. `validate` states what must hold of it.

    Attributes:
        header: What it was made for.
        absences: In order of `last_use_op`, then `buffer_id`.
        replays: In order of `at_op`, at most one at each.
    """

    header: PlanHeader
    absences: tuple[Absence, ...] = ()
    replays: tuple[Replay, ...] = ()
