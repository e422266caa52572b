"""Persistent tensors that leave without a next use in the plan's step: in plans they count as gone from then on.

[Note: gradients that the optimizer has read]
A gradient stays in memory after the optimizer has read it, until the program frees it. No gap of a plan covers that
time, because nothing uses the gradient again. So while the optimizer runs, other tensors, which the next step needs,
would have to leave. Their copies cannot be hidden: the ops of an optimizer are short for the bytes that they read. So
if what persists and the optimizer's own memory do not fit into the budget, gradients *depart*. They are copied out in
backward, where copies run beside the compute, and their memory is freed once the optimizer has read them. As many
depart as the budget lacks bytes, those first that the optimizer reads first. A gradient whose copy would not have ended
by then stays; so does one that was written after backward, as by clipping, and one whose memory the next step uses
again. A program that reads a gradient which has departed gets it back.

On CPU only: where several streams run, a gradient without a recorded content may not be complete yet.

[Note: departures]
A plan is that of a step which repeats. Where the optimizer steps only after several micro-batches, a gradient that is
left for the next micro-batch, and a state that only the optimizer uses, have no next use in a micro-batch without the
optimizer's step, and hence no time in which they could be away: they count as here, and a budget below what persists
seems impossible. So if no plan is found for a step, it is planned a second time, and such tensors depart in it: a
gradient is copied out after its last use, and counts as gone `DEPARTURE_OPS` ops after it; a state leaves at the
beginning of the step. They come back when a later step uses them.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate
from typing import TYPE_CHECKING, Final

from msgspec import structs

from torchdelta.runtime.follow.step_log import Departure
from torchdelta.trace.model import BEFORE_STEP, load_curve, uses_of, versions_over_end

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torchdelta.machine.model import Machine
    from torchdelta.runtime.follow.step_log import StepLog
    from torchdelta.trace.model import Buffer, Trace

__all__ = ["DEPARTURE_OPS", "departures_time_s", "makes_states", "with_departures", "with_gradients_departing"]

DEPARTURE_OPS: Final = 4  # its copy out takes time
_LEAST_BYTES: Final = 2**18  # planners let smaller buffers stay
_COUNTER_BYTES: Final = 16  # a state this small, such as the step counter, may be a new tensor in each step


def with_departures(trace: Trace, log: StepLog) -> tuple[Trace, StepLog] | None:
    """Return a step in which persistent tensors without a next use depart; None if there are none.

    Args:
        trace: The step.
        log: Which of its buffers are content of persistent tensors.
    """
    num_ops = len(trace.ops)
    uses, over_end = uses_of(trace), versions_over_end(trace)
    departures: list[Departure] = []

    def depart(op: int, key: int, size_bytes: int) -> None:
        copy_op = max(0, op - DEPARTURE_OPS + 1)
        departures.append(Departure(copy_op=copy_op, leave_op=op, key=key, size_bytes=size_bytes))

    def shortened(buffer: Buffer) -> Buffer:
        key = log.persistents.get(buffer.id)
        if key is None or not buffer.size_bytes or buffer.death_op != num_ops:
            return buffer
        if not uses[buffer.id] and buffer.birth_op == BEFORE_STEP:
            depart(0, key, buffer.size_bytes)
            return structs.replace(buffer, size_bytes=0)
        death_op = (uses[buffer.id] or [buffer.birth_op])[-1] + DEPARTURE_OPS
        if buffer.id in over_end or death_op >= num_ops:
            return buffer
        depart(death_op, key, buffer.size_bytes)
        return structs.replace(buffer, death_op=death_op)

    buffers = tuple(map(shortened, trace.buffers))
    if not departures:
        return None
    return structs.replace(trace, buffers=buffers), replace(log, departures=tuple(departures))


def with_gradients_departing(
    trace: Trace, log: StepLog, machine: Machine, budget_bytes: int
) -> tuple[Trace, StepLog] | None:
    """Return a step in which gradients depart after the optimizer has read them; None if none has to.

    See [Note: gradients that the optimizer has read].

    Args:
        trace: The step.
        log: Which of its buffers are content of persistent tensors.
        machine: Its links.
        budget_bytes: The most bytes on the device.
    """
    loads_bytes = load_curve(trace, with_workspace=True)
    needs_bytes = [load for load, op in zip(loads_bytes, trace.ops, strict=True) if op.phase == "optimizer"]
    lacking_bytes = max(needs_bytes, default=0) - budget_bytes
    if log.departures or lacking_bytes <= 0 or trace.header.device != "cpu":
        return None
    departures: list[Departure] = []
    deaths: dict[int, int] = {}  # by buffer
    for read_op, buffer in sorted(_copied_in_time(trace, log, machine), key=lambda each: (each[0], each[1].id)):
        if lacking_bytes <= 0:
            break
        lacking_bytes -= buffer.size_bytes
        deaths[buffer.id] = read_op + 1
        departures.append(
            Departure(
                copy_op=buffer.birth_op + 1,
                leave_op=read_op + 1,
                key=log.persistents[buffer.id],
                size_bytes=buffer.size_bytes,
            )
        )
    if not departures:
        return None
    keys, uses = {each.key for each in departures}, uses_of(trace)

    def changed(buffer: Buffer) -> Buffer:
        if buffer.id in deaths:
            return structs.replace(buffer, death_op=deaths[buffer.id])
        is_of_step_before = buffer.birth_op == BEFORE_STEP and not uses[buffer.id]
        if is_of_step_before and log.persistents.get(buffer.id) in keys:
            return structs.replace(buffer, size_bytes=0)  # it has departed there
        return buffer

    buffers = tuple(map(changed, trace.buffers))
    return structs.replace(trace, buffers=buffers), replace(log, departures=tuple(departures))


def _copied_in_time(trace: Trace, log: StepLog, machine: Machine) -> Iterable[tuple[int, Buffer]]:
    """Yield (last op that reads it, gradient) for those whose copies out, one after another, end by that op's end."""
    num_ops, phases, uses = len(trace.ops), [op.phase for op in trace.ops], uses_of(trace)
    over_end = versions_over_end(trace)
    ends_s = list(accumulate(op.time_s for op in trace.ops))
    copied_s = 0.0
    for buffer in sorted(trace.buffers, key=lambda buffer: buffer.birth_op):
        if buffer.kind != "gradient" or buffer.id not in log.persistents or buffer.size_bytes < _LEAST_BYTES:
            continue
        if buffer.death_op != num_ops or buffer.id in over_end:
            continue
        readers = [op for op in uses[buffer.id] if op != buffer.birth_op]
        if buffer.birth_op == BEFORE_STEP or phases[buffer.birth_op] != "backward" or not readers:
            continue
        if any(phases[op] != "optimizer" for op in readers) or readers[-1] + 1 == num_ops:
            continue
        copy_s = machine.link_latency_s + buffer.size_bytes / machine.host_out_bytes_per_s
        end_s = max(copied_s, ends_s[buffer.birth_op]) + copy_s
        if end_s <= ends_s[readers[-1]]:
            copied_s = end_s
            yield readers[-1], buffer


def departures_time_s(log: StepLog, machine: Machine) -> float:
    """Return what copies of departing tensors take from kernels in a step, which no plan counts."""
    size_bytes = sum(each.size_bytes for each in log.departures)
    return size_bytes * machine.out_compute_s_per_byte + len(log.departures) * machine.copy_compute_s


def makes_states(trace: Trace) -> bool:
    """Return whether an optimizer makes its states in a step: its first one. Later steps need other memory."""
    found_there = {buffer.storage_id for buffer in trace.buffers if buffer.birth_op == BEFORE_STEP}
    states = (each for each in trace.buffers if each.kind == "optimizer_state" and each.size_bytes > _COUNTER_BYTES)
    return any(state.storage_id not in found_there and state.death_op == len(trace.ops) for state in states)
