"""How a prediction is shown: one JSON object, or a few lines for people."""

import json
from typing import TYPE_CHECKING, Any

from torchdelta.cli.step import answer
from torchdelta.trace.model import Trace
from torchdelta.units import format_bytes

if TYPE_CHECKING:
    from torchdelta.simulate import Simulation  # numba takes its time

__all__ = ["facts_of", "show", "tensors_at_peak"]

_NUM_TENSORS = 5


def facts_of(simulation: "Simulation", trace: Trace) -> dict[str, Any]:
    """Return a prediction by name; names carry their units."""
    peak_op = trace.ops[simulation.peak.op] if simulation.peak.op < len(trace.ops) else None
    absences = simulation.plan.absences
    return {
        "budget_bytes": simulation.budget_bytes,
        "peak_bytes": simulation.peak.size_bytes,
        "plain_peak_bytes": simulation.plain_peak_bytes,
        "time_s": simulation.time_s,
        "plain_time_s": simulation.plain_time_s,
        "overhead": simulation.overhead,
        "stall_s": simulation.stall_s,
        "recompute_s": simulation.recompute_s,
        "swapped_out_bytes": simulation.swapped_out_bytes,
        "swapped_in_bytes": simulation.swapped_in_bytes,
        "disk_written_bytes": simulation.disk_written_bytes,
        "disk_read_bytes": simulation.disk_read_bytes,
        "host_peak_bytes": simulation.host_peak_bytes,
        "disk_peak_bytes": simulation.disk_peak_bytes,
        "num_swapped": sum(absence.action == "swap" for absence in absences),
        "num_recomputed": sum(absence.action == "recompute" for absence in absences),
        "peak_op": simulation.peak.op,
        "peak_op_name": peak_op.name if peak_op else "",
        "peak_tensors": tensors_at_peak(simulation, trace),
    }


def tensors_at_peak(simulation: "Simulation", trace: Trace) -> list[dict[str, Any]]:
    """Return the largest tensors that are on the device at the peak."""
    producer = {id_: op for op in trace.ops for id_ in op.writes}
    tensors: list[dict[str, Any]] = []
    for id_ in simulation.peak.tensors[:_NUM_TENSORS]:
        buffer, op = trace.buffers[id_], producer.get(id_)
        made_by = f"{op.name} in {op.module}" if op is not None and op.module else op.name if op is not None else ""
        tensors.append({"buffer_id": id_, "size_bytes": buffer.size_bytes, "kind": buffer.kind, "made_by": made_by})
    return tensors


def show(facts: dict[str, Any], *, as_json: bool) -> None:
    """Print a prediction on stdout."""
    if as_json:
        answer(json.dumps(facts))
        return
    lines = [
        f"planner      {facts['planner']} on {facts['machine']}",
        f"budget       {format_bytes(facts['budget_bytes'])}",
        (
            f"peak         {format_bytes(facts['peak_bytes'])}  (plain {format_bytes(facts['plain_peak_bytes'])}), "
            f"at op {facts['peak_op']} {facts['peak_op_name']}"
        ),
        (
            f"time         {facts['time_s'] * 1e3:.2f} ms  (plain {facts['plain_time_s'] * 1e3:.2f} ms, "
            f"{100 * facts['overhead']:+.2f} %)"
        ),
        f"waiting      {facts['stall_s'] * 1e3:.2f} ms, recomputing {facts['recompute_s'] * 1e3:.2f} ms",
        (
            f"swapped      {facts['num_swapped']} tensors: {format_bytes(facts['swapped_out_bytes'])} out, "
            f"{format_bytes(facts['swapped_in_bytes'])} back"
        ),
        f"recomputed   {facts['num_recomputed']} tensors",
    ]
    if "footprint_bytes" in facts:
        proved = ", the least that there is" if facts["proved_optimal"] else ""
        lines.append(
            f"footprint    {format_bytes(facts['footprint_bytes'])}: {facts['fragmentation']:.3%} above what is alive"
            f"{proved}"
        )
    if "bound_time_s" in facts:
        gap = facts["bound_time_s"] / facts["plain_time_s"] - 1 if facts["plain_time_s"] else 0.0
        lines.append(f"bound        no plan of the class {facts['bound_class']!r} is below {100 * gap:+.2f} %")
    if facts.get("is_near_least"):
        lines.append(_hint(facts))
    lines.append("largest tensors at the peak:")
    lines += [_tensor_line(tensor) for tensor in facts["peak_tensors"]]
    if "path" in facts:
        lines.append(f"plan in {facts['path']}")
    answer("\n".join(lines))


def _hint(facts: dict[str, Any]) -> str:
    least_bytes = facts["least_saved_peak_bytes"]
    advice = "--effort best or " if facts["effort"] == "fast" else ""
    times = facts["budget_bytes"] / least_bytes
    return (
        f"hint         the budget is {times:.2f} times the least ({format_bytes(least_bytes)}):\n"
        f"             {advice}--planner torchdelta-extended, which may drop a tensor twice, can be faster here"
    )


def _tensor_line(tensor: dict[str, Any]) -> str:
    made_by = f", made by {tensor['made_by']}" if tensor["made_by"] else ""
    return f"  {format_bytes(tensor['size_bytes']):>11}  {tensor['kind']}{made_by}"
