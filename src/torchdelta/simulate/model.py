"""What goes into a simulation and what comes out: decisions and options, the score and the full result.

A planner that tries thousands of decisions speaks in *codes*: one small integer for each gap of `PlanningProblem.gaps`.
"""

from enum import IntEnum
from typing import Literal

import msgspec

from torchdelta.plan.model import Action, Plan, TierName

__all__ = ["Code", "Decision", "Options", "Score", "SimulatedPeak", "Simulation", "Span", "Stall"]

Lane = Literal["compute", "device_to_host", "host_to_device", "disk"]
"""The queues of the simulation."""


class Code(IntEnum):
    """What happens to a buffer over one gap between two of its uses."""

    KEEP = 0
    SWAP = 1
    """To the host and back."""
    DISK = 2
    """To the disk and back."""
    RECOMPUTE = 3
    """Dropped; made again before its next use, or earlier by a replay that needs it: then it stays from there on."""
    AGAIN = 4
    """Dropped; a replay that needs it makes it for itself alone, and it is made once more before its next use."""


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """That one buffer leaves over one gap.

    Attributes:
        buffer_id: The buffer.
        action: How it leaves.
        tier: Where a swapped one goes.
        last_use_op: The use after which it leaves; None for the gap from its last use in forward to its first use in
            backward, which is the only one of the class *saved*.
        stays_when_met: Whether a replay that meets a dropped buffer on its way leaves it on the device (as the class
            *saved* does) or frees it again.
    """

    buffer_id: int
    action: Action
    tier: TierName = "host"
    last_use_op: int | None = None
    stays_when_met: bool = True


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """How the runtime that is simulated behaves, and what it may take beside the device's memory.

    Attributes:
        prefetch: Whether swap-ins are issued ahead of need. Without, each is issued when its buffer is used.
        synchronous: Whether the compute queue waits for every transfer, as where a thread copies by itself.
        host_budget_bytes: The most bytes on the host; None for the machine's own figure.
        disk_budget_bytes: The most bytes on the disk; None for the machine's own figure.
    """

    prefetch: bool = True
    synchronous: bool = False
    host_budget_bytes: int | None = None
    disk_budget_bytes: int | None = None


class Score(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The result in short, for planners.

    Attributes:
        time_s: Seconds of the step; infinite where something cannot be recomputed.
        peak_bytes: Most bytes on the device.
        peak_op: First op at which they are reached.
        excess_bytes: How far the peak is above the budget, 0 if it is not: nothing was left to wait for.
        excess_sum_bytes: The same added up over all ops, the host's and the disk's excess included: falls with every
            step in the right direction. No more than 4 EiB.
        stall_s: Seconds that compute waited for transfers.
        recompute_s: Seconds of all replays.
        host_excess_bytes: How far the host's budget is passed.
        disk_excess_bytes: How far the disk's budget is passed.
    """

    time_s: float
    peak_bytes: int
    peak_op: int
    excess_bytes: int
    excess_sum_bytes: int
    stall_s: float
    recompute_s: float
    host_excess_bytes: int
    disk_excess_bytes: int

    @property
    def is_feasible(self) -> bool:
        """Whether every budget holds and everything that was dropped can be had again."""
        return (
            self.excess_bytes == 0
            and self.host_excess_bytes == 0
            and self.disk_excess_bytes == 0
            and self.time_s < float("inf")
        )


class SimulatedPeak(msgspec.Struct, frozen=True, kw_only=True):
    """The highest moment.

    Attributes:
        size_bytes: Bytes on the device, workspace and transients of replays included.
        op: Index of the op, or of the one before which the replay runs.
        replayed_op: The op of the replay at which it is reached; None if at the op itself.
        tensors: Ids of the trace's buffers that are on the device there, largest first.
    """

    size_bytes: int
    op: int
    replayed_op: int | None
    tensors: tuple[int, ...]


class Stall(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """How long compute waited for one buffer.

    Attributes:
        buffer_id: The buffer.
        op: The op that waited.
        waited_for: `"in"`: for its content; `"out"`: for its memory.
        time_s: Seconds.
    """

    buffer_id: int
    op: int
    waited_for: Literal["in", "out"]
    time_s: float


class Span(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One piece of work on one queue.

    Attributes:
        lane: The queue.
        what: `"op"`, `"replay"`, `"stall"`, `"copy"` (what a copy takes of compute), `"swap-out"` or `"swap-in"`.
        id: Op index on the compute queue, buffer id on the others.
        start_s: Seconds from the start of the step.
        end_s: Seconds from the start of the step.
    """

    lane: Lane
    what: str
    id: int
    start_s: float
    end_s: float


class Simulation(msgspec.Struct, frozen=True, kw_only=True):
    """What the step does under a plan.

    Attributes:
        score: The result in short.
        plan: The whole plan: when each buffer leaves and comes back, and what is replayed.
        time_s: Seconds of the step.
        plain_time_s: Seconds of the step when nothing leaves.
        stall_s: Seconds that compute waited for transfers.
        recompute_s: Seconds of all replays.
        peak: The highest moment.
        plain_peak_bytes: Its height when nothing leaves.
        budget_bytes: The budget.
        swapped_out_bytes: Bytes to the host.
        swapped_in_bytes: Bytes from the host.
        disk_written_bytes: Bytes to the disk.
        disk_read_bytes: Bytes from the disk.
        host_peak_bytes: Most bytes on the host.
        disk_peak_bytes: Most bytes on the disk.
        recomputed_bytes: Bytes of the buffers that leave by being dropped.
        stalls: Every wait, in order.
        timeline: Everything on every queue, by start.
        load_bytes: Bytes on the device at each op, the replay before it included.
    """

    score: Score
    plan: Plan
    time_s: float
    plain_time_s: float
    stall_s: float
    recompute_s: float
    peak: SimulatedPeak
    plain_peak_bytes: int
    budget_bytes: int
    swapped_out_bytes: int
    swapped_in_bytes: int
    disk_written_bytes: int
    disk_read_bytes: int
    host_peak_bytes: int
    disk_peak_bytes: int
    recomputed_bytes: int
    stalls: tuple[Stall, ...]
    timeline: tuple[Span, ...]
    load_bytes: tuple[int, ...]

    @property
    def overhead(self) -> float:
        """The slowdown as a share: 0.1 is 10 % more time than plain."""
        return self.time_s / self.plain_time_s - 1 if self.plain_time_s > 0 else 0.0
