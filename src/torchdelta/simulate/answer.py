"""The full answer of a simulation, out of the arrays that the kernel left."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

from torchdelta.plan.model import Absence, Plan, PlanHeader, Replay
from torchdelta.plan.over_end import parts_within_step
from torchdelta.simulate import arrays
from torchdelta.simulate.model import Code, Lane, Score, SimulatedPeak, Simulation, Span, Stall
from torchdelta.trace.model import versions_over_end

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from torchdelta.simulate.problem import Problem

__all__ = ["answer"]


def answer(
    problem: Problem, codes: NDArray[np.int8], budget_bytes: int, score: Score, *, planner: str, effort: str
) -> Simulation:
    """Return the answer to the evaluation that `problem.work` holds."""
    work, machine, num_ops = problem.work, problem.machine, len(problem.trace.ops)
    away = [(index, problem.gaps[index]) for index in map(int, codes.nonzero()[0])]
    header = PlanHeader(
        planner=planner,
        effort=effort,
        decision_class=problem.decision_class,
        machine=machine.name,
        budget_bytes=budget_bytes,
        num_ops=num_ops,
        num_buffers=len(problem.trace.buffers),
    )
    needed = {int(work.swap_gap[n]): int(work.swap_return[n]) for n in range(int(work.ints[arrays.NUM_SWAPS]))}
    absences: list[Absence] = []
    for index, gap in away:
        later = num_ops if gap.next_use_op >= num_ops else 0  # over the end the kernel counts in the following step
        return_op = int(work.return_op[index]) + later
        absences.append(
            Absence(
                buffer_id=gap.buffer_id,
                last_use_op=gap.last_use_op,
                next_use_op=needed.get(index, int(work.return_op[index])) + later,
                action="swap" if codes[index] in {Code.SWAP, Code.DISK} else "recompute",
                tier="disk" if codes[index] == Code.DISK else "host",
                leave_op=min(int(work.leave_op[index]), return_op),
                return_op=return_op,
            )
        )
    plan = Plan(
        header=header,
        absences=tuple(sorted(absences, key=lambda absence: (absence.last_use_op, absence.buffer_id))),
        replays=_replays(problem),
    )
    moved = {code: sum(gap.size_bytes for index, gap in away if codes[index] == code) for code in Code}
    return Simulation(
        score=score,
        plan=plan,
        time_s=score.time_s,
        plain_time_s=problem.plain_time_s,
        stall_s=score.stall_s,
        recompute_s=score.recompute_s,
        peak=_peak(problem, score, plan),
        plain_peak_bytes=problem.plain_peak_bytes,
        budget_bytes=budget_bytes,
        swapped_out_bytes=moved[Code.SWAP],
        swapped_in_bytes=moved[Code.SWAP],
        disk_written_bytes=moved[Code.DISK],
        disk_read_bytes=moved[Code.DISK],
        host_peak_bytes=int(work.ints[arrays.HOST_PEAK]),
        disk_peak_bytes=int(work.ints[arrays.DISK_PEAK]),
        recomputed_bytes=moved[Code.RECOMPUTE] + moved[Code.AGAIN],
        stalls=_stalls(problem, needed, codes),
        timeline=_timeline(problem, codes),
        load_bytes=tuple(map(int, work.total)),
    )


def _replays(problem: Problem) -> tuple[Replay, ...]:
    work = problem.work
    ends = work.replay_end.tolist()
    return tuple(
        Replay(at_op=op, ops=tuple(work.replay_ops[start:end].tolist()))
        for op, (start, end) in enumerate(pairwise(ends))
        if end > start
    )


def _peak(problem: Problem, score: Score, plan: Plan) -> SimulatedPeak:
    """Find who is there at the highest moment, from the plan alone."""
    op = score.peak_op
    work = problem.work
    over_end = versions_over_end(problem.trace)
    parts = [part for absence in plan.absences for part in parts_within_step(problem.trace, absence, over_end)]
    gone = {part.buffer_id for part in parts if part.leave_op <= op < part.return_op}
    in_replay = int(work.replay_peak[op]) == int(work.need[op]) > 0
    replayed_op = None
    if in_replay:
        # The op of the replay with the largest working set stands for it.
        replay = next(replay for replay in plan.replays if replay.at_op == op)
        size = problem.static.size
        replayed_op = max(
            replay.ops,
            key=lambda index: sum(
                int(size[id_]) for id_ in (*problem.trace.ops[index].reads, *problem.trace.ops[index].writes)
            ),
        )
    there = [
        buffer
        for buffer in problem.trace.buffers
        if buffer.birth_op <= op < buffer.death_op
        and buffer.id not in gone
        and not (in_replay and buffer.birth_op == op)
    ]
    there.sort(key=lambda buffer: (-buffer.size_bytes, buffer.id))
    return SimulatedPeak(
        size_bytes=score.peak_bytes, op=op, replayed_op=replayed_op, tensors=tuple(buffer.id for buffer in there)
    )


def _stalls(problem: Problem, needed: dict[int, int], codes: NDArray[np.int8]) -> tuple[Stall, ...]:
    work = problem.work
    stalls: list[Stall] = []
    for index, gap in enumerate(problem.gaps):
        if not codes[index]:
            continue
        if work.stall_out[index] > 0:
            op = int(work.leave_op[index]) % len(problem.trace.ops)
            stalls.append(Stall(buffer_id=gap.buffer_id, op=op, waited_for="out", time_s=float(work.stall_out[index])))
        if work.stall_in[index] > 0:
            op = needed[index]
            stalls.append(Stall(buffer_id=gap.buffer_id, op=op, waited_for="in", time_s=float(work.stall_in[index])))
    return tuple(sorted(stalls, key=lambda stall: (stall.op, stall.waited_for, stall.buffer_id)))


def _timeline(problem: Problem, codes: NDArray[np.int8]) -> tuple[Span, ...]:
    work = problem.work
    spans: list[Span] = []
    end_s = 0.0
    starts = work.op_start.tolist()
    for op, (start_s, replay_s, time_s) in enumerate(
        zip(starts, work.replay_s.tolist(), problem.static.time_s.tolist(), strict=False)
    ):
        if start_s > end_s:
            spans.append(Span(lane="compute", what="stall", id=op, start_s=end_s, end_s=start_s))
        if replay_s:
            spans.append(Span(lane="compute", what="replay", id=op, start_s=start_s, end_s=start_s + replay_s))
        end_s = start_s + replay_s + time_s
        spans.append(Span(lane="compute", what="op", id=op, start_s=start_s + replay_s, end_s=end_s))
    for index, gap in enumerate(problem.gaps):
        if codes[index] not in {Code.SWAP, Code.DISK}:
            continue
        lanes: tuple[Lane, Lane] = ("device_to_host", "host_to_device")
        out_lane, in_lane = lanes if codes[index] == Code.SWAP else ("disk", "disk")
        out = (float(work.out_start[index]), float(work.out_end[index]))
        back = (float(work.in_start[index]), float(work.in_end[index]))
        spans.append(Span(lane=out_lane, what="swap-out", id=gap.buffer_id, start_s=out[0], end_s=out[1]))
        spans.append(Span(lane=in_lane, what="swap-in", id=gap.buffer_id, start_s=back[0], end_s=back[1]))
    return tuple(sorted(spans, key=lambda span: (span.start_s, span.end_s, span.lane, span.id)))
