"""Whether a training step fits a machine, and the words for a step that does not: what a test of its size asserts.

[Note: what counts]
The step is traced on fake tensors, as `torchdelta trace` does it, so nothing is allocated and no GPU is needed. What
counts is the peak of its tensors with the workspaces of its ops, as `torchdelta fit` counts it. A step that leaves
something behind each time (a list of outputs) is judged by its peak after many steps.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from torchdelta.errors import ConfigError, InfeasibleError
from torchdelta.machine.catalog import find
from torchdelta.machine.model import Machine, device_of, reserve_bytes
from torchdelta.machine.roofline import price
from torchdelta.trace.model import Buffer, Op, Peak, Trace, live_buffers, peak
from torchdelta.units import format_bytes, parse_size

if TYPE_CHECKING:
    from collections.abc import Callable

    from torchdelta.planners.fitting import LeastBudget

__all__ = ["Limit", "Size", "limit_of", "message", "size_of"]

_NUM_TENSORS = 5
_INSTALL = "pip install 'torchdelta[pytest]'"


class Limit(msgspec.Struct, frozen=True, kw_only=True):
    """What a step may take.

    Attributes:
        machine: Where it has to fit.
        size_bytes: The most that its tensors may take.
        inside_budget: Whether it has to fit inside a `MemoryBudget` of that size and not as it is.
        num_steps: The number of steps that a training run has: growth adds up so many times.
        optimizer: What updates the parameters where the function returns no step.
    """

    machine: Machine
    size_bytes: int
    inside_budget: bool = False
    num_steps: int = 1000
    optimizer: str = "adamw"


class Size(msgspec.Struct, frozen=True, kw_only=True):
    """What a step takes.

    Attributes:
        trace: The step, priced for the machine.
        plain_peak: The most that it holds as it is, workspaces included.
        growth_bytes: Bytes that each step leaves behind.
        fits: Whether it stays within the limit to the last step.
    """

    trace: Trace
    plain_peak: Peak
    growth_bytes: int
    fits: bool


def limit_of(
    size: int | str | None = None,
    *,
    machine: str | None = None,
    inside_budget: bool = False,
    num_steps: object = 1000,
    optimizer: str = "adamw",
) -> Limit:
    """Return the limit that the arguments of a test's marker stand for.

    Args:
        size: The most bytes that the tensors of the step may take: an int, or text such as `"8GiB"` or `"80%"` of the
            machine's memory. None: all but the reserve for context and allocator.
        machine: Name in the catalog, such as `"rtx4090"`.
        inside_budget: Whether the step has to fit inside a `MemoryBudget` of that size, and not as it is.
        num_steps: How many steps a run has.
        optimizer: none, sgd, sgd-momentum or adamw: what updates the parameters where the function returns no step.

    Raises:
        SizeError: The size cannot be parsed.
        ConfigError: There is no machine, it has less memory than the size, or an argument has a wrong type.
        MachineError: There is no machine of that name.
    """
    if not isinstance(machine, str):
        raise ConfigError("fits needs a machine by its name in the catalog, such as machine='rtx4090'")
    if isinstance(num_steps, bool) or not isinstance(num_steps, int) or num_steps < 1:
        raise ConfigError(f"num_steps {num_steps!r} is no number of steps: use an int from 1, such as 1000")
    hardware = find(machine)
    room_bytes = hardware.memory_bytes - reserve_bytes(hardware)
    if size is None:
        size_bytes = room_bytes
    else:
        size_bytes = parse_size(size, total_bytes=hardware.memory_bytes, name="size")
        if size_bytes > room_bytes:
            raise ConfigError(
                f"size {size!r} is {format_bytes(size_bytes)}, but tensors can take at most "
                f"{format_bytes(room_bytes)} of the {format_bytes(hardware.memory_bytes)} of {machine}: context and "
                f"allocator take the rest; leave the size out to use the most"
            )
    return Limit(
        machine=hardware,
        size_bytes=size_bytes,
        inside_budget=inside_budget,
        num_steps=num_steps,
        optimizer=optimizer,
    )


def size_of(function: Callable[[], Any], limit: Limit) -> Size:
    """Trace the step that a function builds, and compare it with a limit.

    Args:
        function: Returns `(model, inputs)` or `(model, inputs, step)`, as for `torchdelta trace`.
        limit: What the step may take.

    Raises:
        TraceError: The function returns something else, or its step cannot be traced.
        ModuleNotFoundError: A budget has to be planned, and numba is not installed.
    """
    from torchdelta.trace.symbolic import traced_step

    # Which names of optimizers there are, it says itself.
    options: dict[str, Any] = {"optimizer": limit.optimizer, "device": device_of(limit.machine)}
    traced = traced_step(function, **options)
    trace = price(traced.trace, limit.machine)
    plain_peak = peak(trace, with_workspace=True)
    left_bytes = limit.size_bytes - traced.growth_bytes * (limit.num_steps - 1)
    fits = plain_peak.size_bytes <= left_bytes
    if not fits and limit.inside_budget:
        fits = left_bytes > 0 and _has_plan(trace, limit.machine, left_bytes)
    return Size(trace=trace, plain_peak=plain_peak, growth_bytes=traced.growth_bytes, fits=fits)


def _has_plan(trace: Trace, machine: Machine, budget_bytes: int) -> bool:
    from torchdelta.planners import get

    try:
        get("torchdelta")(trace, machine, budget_bytes, "fast")
    except InfeasibleError:
        return False
    return True


def message(size: Size, limit: Limit) -> str:
    """Return the words for a step that outgrows its limit: the peak, what sets it, and the least budget."""
    step, top = size.trace, size.plain_peak
    where = f"{format_bytes(limit.size_bytes)} on {limit.machine.name}"
    last_bytes = top.size_bytes + size.growth_bytes * (limit.num_steps - 1)
    over_bytes = top.size_bytes - limit.size_bytes
    lines = [f"the step outgrows {where}: its peak is {format_bytes(top.size_bytes)}"]
    lines[0] += f", {format_bytes(over_bytes)} too much" if over_bytes > 0 else ""
    if size.growth_bytes:
        lines.append(
            f"each step leaves {format_bytes(size.growth_bytes)} in memory that the next one does not free: step "
            f"{limit.num_steps} peaks at {format_bytes(last_bytes)} (is a tensor, or a loss with its graph, kept?)"
        )
    op = step.ops[top.op]
    place = f" in {op.module}" if op.module else ""
    lines.append(f"the peak is set by op {top.op} of {len(step.ops)}, {op.name}{place} ({op.phase}), and")
    if op.workspace_bytes:
        lines.append(f"  {format_bytes(op.workspace_bytes):>11}  workspace of that op")
    made_by = {id_: op for op in step.ops for id_ in op.writes}
    lines += [_tensor_line(one, made_by.get(one.id)) for one in live_buffers(step, top.op)[:_NUM_TENSORS]]
    lines.append(_budget_line(size, limit))
    return "\n".join(lines)


def _tensor_line(buffer: Buffer, op: Op | None) -> str:
    by = "" if op is None else f", made by {op.name}" + (f" in {op.module}" if op.module else "")
    by = by or (", kept from before the step" if buffer.kind == "constant" else "")
    return f"  {format_bytes(buffer.size_bytes):>11}  {buffer.kind}{by}"


def _budget_line(size: Size, limit: Limit) -> str:
    try:
        least = _least_budget(size.trace, limit.machine)
    except ModuleNotFoundError as error:
        return f"the least budget is not known: planning needs {error.name} ({_INSTALL})"
    text = f"the least budget is {format_bytes(least.budget_bytes, rounds_up=True)}"
    if size.growth_bytes:
        return f"{text}, plus what each step leaves"
    if least.budget_bytes <= limit.size_bytes:
        return f"{text}: inside MemoryBudget({format_bytes(limit.size_bytes)!r}) it would still train"
    return f"{text}: it does not fit inside a MemoryBudget either"


def _least_budget(trace: Trace, machine: Machine) -> LeastBudget:
    from torchdelta.planners import get
    from torchdelta.planners.fitting import least_budget

    return least_budget(trace, machine, get("torchdelta"))
