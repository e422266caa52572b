"""The plan: a program that says which buffers leave the device, how, and at which moments each action happens.

A plan belongs to one trace and to one budget. Time is the op index, as in the trace: a plan says *at which op* each
copy is queued, memory is given back and taken again, and ops run once more, never after how many seconds. What that
means for memory is `plan/walk.py`, and nothing but liveness; what it takes on a machine is `simulate.execute`, which
prices exactly what is written here. `docs/plan-format.md` states both for everybody else.

[Note: absences]
A buffer that stays is not mentioned. Every time that one is away is an `Absence`: it leaves after one of its uses (its
birth or a read) and is there again at its next use. A buffer can be away several times in a step: the class *saved*
has at most one absence a buffer, over the gap from the last use in forward to the first one in backward; the class
*extended* any gap of any buffer, dropped again after a replay included; the class *all* those of gradients, parameters
and optimizer states too, by swap, also over the end of the step; the class *persistent* those of *saved*, and the
swaps of gradients, parameters and optimizer states.

The buffer's memory is free at the moments `leave_op <= i < return_op`. The moments of a swap are

- `out_op`: its copy out is queued after this op: right after the last use, or late in the gap;
- `leave_op`: its memory is free from here on: compute waits before this op until the copy has ended;
- `return_op`: its memory is taken again and its copy in is queued, before this op. How far ahead of the use that is
  (the prefetch) is the planner's decision;
- `next_use_op`: compute waits before this op until the copy in has ended. Nothing reads the buffer before.

Where `leave_op == return_op` the memory is never free, and compute does not wait for the copy out. A recomputed buffer
is dropped at `leave_op` and there again when its replay has run, immediately before the op `return_op`: its next use,
or earlier where the replay is issued ahead.

[Note: over the end]
An absence whose `next_use_op` is `num_ops` or more reaches into the following step, which is the same step again. What
leaves is the last version of a storage that outlives the step from before it (a parameter that the optimizer has just
written), what the following step finds is the storage's first version, and its next use is the first op that reads
that one or writes over it. `leave_op` and `return_op` count on in the same way: at the moments `i` of every step with
`leave_op <= i` the last version is away, at those with `leave_op - num_ops <= i < return_op - num_ops` the first one. A
`leave_op` of `num_ops` or more is a copy that ends in the following step: until then the memory is not free there. How
long it still takes there at most is `carried_s`, the only seconds in a plan: where it is 0 compute waits at the end of
the step until the copy out has ended. It waits there, too, for a copy in that is queued before the end.

[Note: replays]
A `Replay` reruns ops immediately before the op `at_op`, in the order given. What it makes lives, for each buffer, until
the last op of the same replay that reads it, unless an absence of the buffer ends at `at_op` (then it stays until its
next absence or its death) or it is among `keeps`: buffers that are dead, or away, and that stay from here on until the
moment given, for a later replay to read. Everything that a rerun op reads is on the device at that moment or made
earlier in the same replay. An op writes all of its outputs whenever it runs: those that nobody needs are freed at once.
An op that writes in place takes over the memory of the version before where a replay made that one, which is then gone.
"""

from typing import Literal

import msgspec

FORMAT_NAME = "torchdelta-plan"
FORMAT_VERSION = 4
"""What is written. Version 1 had no end record; version 2 had no `links`, `synchronous`, `out_op`, `return_rank` and
`carried_s`, and is read as if each copy out were queued right after the last use; version 3 had no class "persistent".
"""

READABLE_VERSIONS = (1, 2, 3, 4)

Action = Literal["swap", "recompute"]
"""How a buffer leaves; one that stays is not mentioned in a plan."""

DecisionClass = Literal["saved", "extended", "persistent", "all"]
"""Which buffers may leave, and how: plans and bounds name theirs and are compared within it.

`saved`: buffers that autograd saved in forward, once each, from the last use in forward to the first one in backward.
`extended`: any buffer born in the step, in any gap between its uses, several times. `persistent`: `saved`, and
gradients, optimizer states and parameters, by swap: what the runtime carries out with `Config(decision_class="all")`.
`all`: `extended` and `persistent` together.
"""

TierName = Literal["host", "disk"]


class Links(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What copies take on the machine that a plan was made for: the fields of `machine.model.Machine` of these names.

    Attributes:
        host_out_bytes_per_s: Device to host.
        host_in_bytes_per_s: Host to device.
        link_latency_s: Seconds of each copy to or from the host beside its bytes.
        both_ways_factor: Share of its rate that each direction keeps while the other one is busy.
        out_compute_s_per_byte: What each byte copied from the device takes of compute.
        in_compute_s_per_byte: The same for bytes copied to the device.
        copy_compute_s: What each copy takes of compute beside its bytes.
        replay_compute_s: What each op of a replay takes of compute beside its own time.
        disk_write_bytes_per_s: Device to disk; 0.0 without a disk.
        disk_read_bytes_per_s: Disk to device; 0.0 without a disk.
        disk_latency_s: Seconds of each copy to or from the disk beside its bytes.
    """

    host_out_bytes_per_s: float
    host_in_bytes_per_s: float
    link_latency_s: float = 0.0
    both_ways_factor: float = 1.0
    out_compute_s_per_byte: float = 0.0
    in_compute_s_per_byte: float = 0.0
    copy_compute_s: float = 0.0
    replay_compute_s: float = 0.0
    disk_write_bytes_per_s: float = 0.0
    disk_read_bytes_per_s: float = 0.0
    disk_latency_s: float = 0.0


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
        synchronous: Whether compute waits for every copy as soon as it is queued.
        links: What copies take on that machine; None in a file of version 1 or 2, and where nobody priced the plan.
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
    synchronous: bool = False
    links: Links | None = None


class Absence(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="record", tag="absence", forbid_unknown_fields=True, gc=False
):
    """One time that a buffer is not on the device. See [Note: absences].

    Attributes:
        buffer_id: The buffer.
        last_use_op: The op after which it leaves: the one that wrote it, one that reads it, or the `at_op` of a replay
            that reads or keeps it.
        next_use_op: The next op that reads it, or the `at_op` of the next replay that does: compute waits there for its
            copy in. In the classes *persistent* and *all* it may be `num_ops` or more: then it is used next by op
            `next_use_op - num_ops` of the following step. See [Note: over the end].
        action: How.
        tier: Where a swapped buffer goes.
        out_op: The op after which its copy out is queued; None for right after `last_use_op`, and where it is
            recomputed. Copies that are queued after the same op go by `last_use_op`, then by buffer.
        leave_op: First moment at which its memory is free.
        return_op: First moment at which its memory is taken again, where its copy in is queued: at most `next_use_op`.
        return_rank: Copies in that are queued before the same op go by this, then by `last_use_op`, then by buffer.
        carried_s: Seconds that its copy out still takes, at most, when the following step begins; 0.0 if compute waits
            for it at the end of the step. See [Note: over the end].
    """

    buffer_id: int
    last_use_op: int
    next_use_op: int
    action: Action
    tier: TierName = "host"
    out_op: int | None = None
    leave_op: int
    return_op: int
    return_rank: int = 0
    carried_s: float = 0.0

    @property
    def queued_op(self) -> int:
        """The op after which its copy out is queued."""
        return self.last_use_op if self.out_op is None else self.out_op


class Keep(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, gc=False):
    """A buffer that a replay made on its way and that stays for a while.

    Attributes:
        buffer_id: The buffer: one that the replay writes.
        until_op: First moment at which it is no longer there, unless an absence of it ends before. At most `num_ops`.
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
    """What leaves the device in one step, and when it comes back: a program. `validate` states what must hold of it.

    Attributes:
        header: What it was made for.
        absences: In order of `last_use_op`, then `buffer_id`.
        replays: In order of `at_op`, at most one at each.
    """

    header: PlanHeader
    absences: tuple[Absence, ...] = ()
    replays: tuple[Replay, ...] = ()
