"""The plan of a decision: with the moments that the kernel found, out of the arrays that it left."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from typing import TYPE_CHECKING, Protocol

from torchdelta.plan.model import Absence, Links, Plan, PlanHeader, Replay
from torchdelta.simulate import arrays
from torchdelta.simulate.model import Code, Options

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from torchdelta.machine.model import Machine
    from torchdelta.plan.model import DecisionClass
    from torchdelta.simulate.gaps import Gap
    from torchdelta.trace.model import Trace

__all__ = ["Evaluated", "links_of", "program"]


class Evaluated(Protocol):
    """What is needed of a `PlanningProblem`, which imports this file."""

    trace: Trace
    machine: Machine
    decision_class: DecisionClass
    gaps: tuple[Gap, ...]
    options: Options
    work: arrays.Work


def program(problem: Evaluated, codes: NDArray[np.int8], budget_bytes: int, *, planner: str, effort: str) -> Plan:
    """Return the plan of the evaluation that `problem.work` holds."""
    work, num_ops, num_gaps = problem.work, len(problem.trace.ops), len(problem.gaps)
    num_swaps = int(work.ints[arrays.NUM_SWAPS])
    needed_op: dict[int, int] = {}
    rank: dict[int, int] = {}
    queued_before: Counter[int] = Counter()
    for gap, needed in zip(work.swap_gap[:num_swaps].tolist(), work.swap_return[:num_swaps].tolist(), strict=True):
        needed_op[gap] = needed
        return_op = int(work.return_op[gap])
        rank[gap] = queued_before[return_op]
        queued_before[return_op] += 1
    absences: list[Absence] = []
    for index in map(int, codes.nonzero()[0]):
        gap = problem.gaps[index]
        swaps = codes[index] in {Code.SWAP, Code.DISK}
        is_over_end = gap.next_use_op >= num_ops
        later = num_ops if is_over_end else 0  # over the end the kernel counts in the following step
        return_op = int(work.return_op[index]) + later
        absences.append(
            Absence(
                buffer_id=gap.buffer_id,
                last_use_op=gap.last_use_op,
                next_use_op=needed_op.get(index, return_op - later) + later,
                action="swap" if swaps else "recompute",
                tier="disk" if codes[index] == Code.DISK else "host",
                out_op=gap.last_use_op if swaps else None,
                leave_op=min(int(work.leave_op[index]), return_op),
                return_op=return_op,
                return_rank=rank.get(index, 0),
                carried_s=float(work.out_end[num_gaps + index]) if is_over_end else 0.0,
            )
        )
    ends = work.replay_end.tolist()
    replays = tuple(
        Replay(at_op=op, ops=tuple(work.replay_ops[start:end].tolist()))
        for op, (start, end) in enumerate(pairwise(ends))
        if end > start
    )
    header = PlanHeader(
        planner=planner,
        effort=effort,
        decision_class=problem.decision_class,
        machine=problem.machine.name,
        budget_bytes=budget_bytes,
        num_ops=num_ops,
        num_buffers=len(problem.trace.buffers),
        synchronous=problem.options.synchronous,
        links=links_of(problem.machine),
    )
    absences.sort(key=lambda absence: (absence.last_use_op, absence.buffer_id))
    return Plan(header=header, absences=tuple(absences), replays=replays)


def links_of(machine: Machine) -> Links:
    """Return what copies take on a machine, as a plan states it."""
    return Links(
        host_out_bytes_per_s=machine.host_out_bytes_per_s,
        host_in_bytes_per_s=machine.host_in_bytes_per_s,
        link_latency_s=machine.link_latency_s,
        both_ways_factor=machine.both_ways_factor,
        out_compute_s_per_byte=machine.out_compute_s_per_byte,
        in_compute_s_per_byte=machine.in_compute_s_per_byte,
        copy_compute_s=machine.copy_compute_s,
        replay_compute_s=machine.replay_compute_s,
        disk_write_bytes_per_s=machine.disk_write_bytes_per_s,
        disk_read_bytes_per_s=machine.disk_read_bytes_per_s,
        disk_latency_s=machine.disk_latency_s,
    )
