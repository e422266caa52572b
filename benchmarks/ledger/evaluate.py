"""Predicts what was published: times, peaks, the largest batch that runs, rates of a machine."""

from __future__ import annotations

from collections import Counter
from functools import cache
from typing import TYPE_CHECKING, Final

import msgspec
from msgspec.structs import replace

from benchmarks.ledger.fitting import Timed
from benchmarks.ledger.tracing import step_trace
from torchdelta.machine.catalog import find
from torchdelta.machine.interval import kind_of
from torchdelta.machine.kernels import CUDA_SHARES, Family
from torchdelta.machine.links import with_link
from torchdelta.machine.model import reserve_bytes
from torchdelta.machine.roofline import op_bytes, op_time_s, price
from torchdelta.trace.model import BEFORE_STEP, peak

if TYPE_CHECKING:
    from collections.abc import Callable

    from benchmarks.ledger.figures import Figure, Step
    from torchdelta.machine.model import Machine
    from torchdelta.trace.model import Op

__all__ = ["FITTED_PARTS", "BatchCase", "batch_cases", "kind_of_step", "machine_of", "predicted", "timed_of"]

_GIB: Final = 2**30
_MIB: Final = 2**20
_MICRO_STEPS: Final = 4  # of the accumulated steps
_OLD_CUDNN: Final = 8
_HALF: Final = 0.5  # of a convolution's backward: two products of the same size

_PARTS: Final[dict[str, tuple[str, str, float]]] = {
    "conv_forward": ("aten.convolution", "forward", 1.0),
    "conv_backward_both": ("aten.convolution_backward", "backward", 1.0),
    "conv_backward_input": ("aten.convolution_backward", "backward", _HALF),
    "conv_backward_weight": ("aten.convolution_backward", "backward", _HALF),
    "batch_norm_forward": ("aten.native_batch_norm", "forward", 1.0),
    "batch_norm_backward": ("aten.native_batch_norm_backward", "backward", 1.0),
    "relu_forward": ("aten.relu_", "forward", 1.0),
    "relu_backward": ("aten.threshold_backward", "backward", 1.0),
}
"""Kernels of one profile: the op's name before its overload, its phase, and the share of its time."""

FITTED_PARTS: Final = ("conv_forward", "conv_backward_both", "batch_norm_forward", "batch_norm_backward")
"""Of these, what the shares are fitted to as well."""


@cache
def _ops(step: Step) -> tuple[tuple[Op, int, int], ...]:
    """Return the ops of a step that take time, alike ones once, with what each moves and their number."""
    trace = step_trace(step)
    counts: Counter[tuple[Op, int]] = Counter()
    for op in trace.ops:
        moved_bytes = op_bytes(op, trace)
        if (moved_bytes or op.flops) and (op.phase == "forward" or not step.forward_only):
            # Of what it writes only the number matters to its price.
            writes = tuple(range(min(len(op.writes), 4)))
            alike = replace(op, index=0, module="", reads=(), writes=writes, time_s=0.0, workspace_bytes=0, node="")
            counts[alike, moved_bytes] += 1
    return tuple((op, moved_bytes, count) for (op, moved_bytes), count in counts.items())


def timed_of(figure: Figure) -> Timed | None:
    """Return a published time with its ops, None for any other figure."""
    step = figure.step
    if step is None or not figure.machine or figure.quantity not in {"step_time", "forward_time", "kernel_time"}:
        return None
    ops = _ops(step)
    if figure.quantity == "kernel_time":
        part = figure.id.rsplit("/", 1)[-1]
        ops = tuple(row for row in ops if _is_part(row[0], part))
    return Timed(
        id=figure.id,
        published_s=figure.published * 1e-3,
        machine=machine_of(figure),
        ops=ops,
        groups={
            "model": (step.family, step.model),
            "gpu": figure.machine.split("-")[0],
            "source": figure.source,
        },
        is_step=figure.quantity != "kernel_time",
    )


def _is_part(op: Op, part: str) -> bool:
    name, phase, _ = _PARTS[part]
    return op.name.rsplit(".", 1)[0] == name and op.phase == phase


def predicted(figure: Figure) -> float | None:
    """Return the prediction of a figure in its unit; None where the catalog lacks the machine."""
    if figure.step is None:
        if not figure.machine:
            return None
        if figure.kernel is not None:
            return 1e6 * op_time_s(figure.kernel.op(), figure.kernel.moved_bytes, find(figure.machine))
        return _rate(figure)
    match figure.quantity:
        case "step_time" | "forward_time":
            return 1e3 * _time_s(figure.step, machine_of(figure))
        case "kernel_time":
            part = figure.id.rsplit("/", 1)[-1]
            return 1e3 * _PARTS[part][2] * _time_s(figure.step, machine_of(figure), lambda op: _is_part(op, part))
        case "optimizer_step_time":
            return 1e3 * _accumulated_s(figure.step, machine_of(figure))
        case "checkpointing_overhead":
            plain, checkpointed = (replace(figure.step, checkpointed=is_so) for is_so in (False, True))
            return _accumulated_s(checkpointed, machine_of(figure)) / _accumulated_s(plain, machine_of(figure))
        case "peak_allocated":
            return _peak_bytes(figure) / _GIB
        case "nvidia_smi_less_context":
            return _peak_bytes(figure) / _MIB
        case "largest_batch":
            return float(_largest_of_ladder(figure))
        case _:
            return None


def machine_of(figure: Figure) -> Machine:
    """Return the machine of a figure, with the kernels of the library that it ran with."""
    machine = find(figure.machine)
    return replace(machine, kernels="cuda-cudnn8") if figure.cudnn == _OLD_CUDNN else machine


def _time_s(step: Step, machine: Machine, is_counted: Callable[[Op], bool] = lambda _: True) -> float:
    rows = (row for row in _ops(step) if is_counted(row[0]))
    return sum(count * op_time_s(op, moved_bytes, machine) for op, moved_bytes, count in rows)


def kind_of_step(step: Step, machine: Machine) -> Family:
    """Return of which kind a step is for its interval."""
    return kind_of(price(step_trace(step), machine))


def _accumulated_s(step: Step, machine: Machine) -> float:
    """Return the time of several micro-steps and one update."""
    update_s = _time_s(step, machine, lambda op: op.phase == "optimizer")
    return _MICRO_STEPS * (_time_s(step, machine) - update_s) + update_s


def _peak_bytes(figure: Figure) -> int:
    assert figure.step is not None
    trace = step_trace(figure.step)
    if "before the optimizer" in figure.note:
        # Its own AdamW has two states of each parameter's size.
        states = 2 * sum(b.size_bytes for b in trace.buffers if b.kind == "parameter" and b.birth_op == BEFORE_STEP)
        first = next(op.index for op in trace.ops if op.phase == "optimizer")
        alive = [0] * (len(trace.ops) + 1)
        for buffer in trace.buffers:
            alive[max(buffer.birth_op, 0)] += buffer.size_bytes
            alive[buffer.death_op] -= buffer.size_bytes
        load, most = 0, 0
        for op in range(first):
            load += alive[op]
            most = max(most, load + trace.ops[op].workspace_bytes)
        return most - states
    return peak(trace, with_workspace=True).size_bytes


class BatchCase(msgspec.Struct, frozen=True, kw_only=True):
    """A batch that ran on a machine, or did not.

    Attributes:
        id: Of the figure.
        batch: Samples.
        ran: Whether it ran.
        peak_bytes: Predicted.
        fits: Whether that is within the machine's memory less the reserve.
    """

    id: str
    batch: int
    ran: bool
    peak_bytes: int
    fits: bool


@cache
def batch_cases(figure: Figure) -> tuple[BatchCase, ...]:
    """Return what a ladder of batches says: the rung that ran, and the next one, which did not."""
    assert figure.step is not None
    following = figure.note.rsplit(" ", 1)[-1]
    rungs = [(figure.step.batch, True), *([(int(following), False)] if following.isdigit() else [])]
    machine: Machine = find(figure.machine)
    budget_bytes = machine.memory_bytes - reserve_bytes(machine)
    cases: list[BatchCase] = []
    for batch, ran in rungs:
        size_bytes = peak(step_trace(replace(figure.step, batch=batch)), with_workspace=True).size_bytes
        cases.append(
            BatchCase(id=figure.id, batch=batch, ran=ran, peak_bytes=size_bytes, fits=size_bytes <= budget_bytes)
        )
    return tuple(cases)


def _largest_of_ladder(figure: Figure) -> int:
    """Return the largest rung that is predicted to run, of the two that are known; 0 if none is."""
    return max((case.batch for case in batch_cases(figure) if case.fits), default=0)


def _rate(figure: Figure) -> float | None:
    machine = find(figure.machine)
    rates = machine.flops_per_s
    match figure.quantity:
        case "matmul_fp16":
            return rates["float16"] / 1e12
        case "matmul_tf32_or_fp32":
            return rates.get("tf32", rates["float32"]) / 1e12
        case "streaming_rate" | "elementwise_over_64MB":
            return machine.memory_bytes_per_s * CUDA_SHARES.stream / 1e9
        case "kernel_under_1MB":
            return CUDA_SHARES.launch_s * 1e6
        case "pinned_h2d" | "pinned_h2d_sm_copy":
            return machine.host_in_bytes_per_s / 1e9
        case "pinned_d2h" | "pinned_d2h_sm_copy":
            return machine.host_out_bytes_per_s / 1e9
        case "pinned_h2d_while_d2h":
            return machine.host_in_bytes_per_s * machine.both_ways_factor / 1e9
        case "pageable_h2d":
            return with_link(machine, "pcie3-x16-pageable").host_in_bytes_per_s / 1e9
        case _:
            return None
