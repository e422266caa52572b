"""Shows a prediction: one JSON object, or a few lines of text."""

import json
from typing import TYPE_CHECKING, Any, Final

from torchdelta.cli.errors import print_result
from torchdelta.machine.interval import Interval, range_text
from torchdelta.machine.model import Machine
from torchdelta.trace.model import Trace
from torchdelta.units import format_bytes

if TYPE_CHECKING:
    from torchdelta.planners import Prediction  # importing numba is slow

__all__ = [
    "extrapolation_lines",
    "facts_of",
    "interval_facts",
    "launches_left_out_s",
    "launches_note",
    "show",
    "tensor_line",
    "tensors_at_peak",
    "time_text",
]

_NUM_TENSORS = 5
# A launch from eager torch takes 5 to 10 us; from this share of a step's time on it is said that they are left out.
_LAUNCH_S: Final = 5e-6
_WORTH_A_NOTE: Final = 0.1


def launches_left_out_s(step: Trace, machine: Machine) -> float:
    """Return what the launches of a step's ops would take, if a machine's times leave out so much that it matters."""
    if machine.op_latency_s or machine.kernels:  # then each op's time has its launch in it
        return 0.0
    times_s = [op.time_s for op in step.ops if op.time_s]
    launches_s = _LAUNCH_S * len(times_s)
    return launches_s if launches_s > _WORTH_A_NOTE * sum(times_s) else 0.0


def launches_note(launches_s: float, num_ops: int) -> str:
    """Return what is said of a step that small ops make up."""
    return f"launches are left out of these times: {num_ops} ops take about {launches_s * 1e3:.2f} ms to launch"


def interval_facts(interval: Interval | None, **times_s: float) -> dict[str, Any]:
    """Return how far times may be off, by name: `time_low_s` and `time_high_s` for `time=...`, and why it extrapolates.

    Args:
        interval: None where nothing is known: then there are no such facts.
        times_s: Predicted times in seconds by the word that their facts begin with.
    """
    if interval is None:
        return {}
    ends = {"low": interval.low, "high": interval.high}
    facts: dict[str, Any] = {
        f"{name}_{end}_s": time_s * factor for name, time_s in times_s.items() for end, factor in ends.items()
    }
    return facts | {"extrapolates": list(interval.extrapolates)}


def time_text(facts: dict[str, Any], name: str) -> str:
    """Return a time of `interval_facts` with its interval: "412.10 ms, 350 to 480", the time alone if it has none."""
    text = f"{facts[f'{name}_s'] * 1e3:.2f} ms"
    if f"{name}_low_s" not in facts:
        return text
    return f"{text}, {range_text(facts[f'{name}_low_s'], facts[f'{name}_high_s'])}"


def extrapolation_lines(facts: dict[str, Any], width: int) -> list[str]:
    """Return what is said of a step unlike all that predictions were compared with, one line a reason."""
    return [f"{'extrapolated':<{width}}{reason}" for reason in facts.get("extrapolates", ())]


def facts_of(prediction: "Prediction") -> dict[str, Any]:
    """Return a prediction by name; names carry their units.

    What a machine without a host memory of its own swaps is told as going to its disk: see [Note: where swaps go] in
    machine/model.py.
    """
    trace, machine, simulation = prediction.trace, prediction.machine, prediction.simulation
    to_disk = machine.swaps_to == "disk"
    peak_op = trace.ops[simulation.peak.op] if simulation.peak.op < len(trace.ops) else None
    absences = simulation.plan.absences
    return {
        "budget_bytes": simulation.budget_bytes,
        "peak_bytes": simulation.peak.size_bytes,
        "plain_peak_bytes": simulation.plain_peak_bytes,
        "time_s": simulation.time_s,
        "plain_time_s": simulation.plain_time_s,
        **interval_facts(prediction.interval, time=simulation.time_s, plain_time=simulation.plain_time_s),
        "overhead": simulation.overhead,
        "num_ops": len(trace.ops),
        "launches_left_out_s": launches_left_out_s(trace, machine),
        "stall_s": simulation.stall_s,
        "recompute_s": simulation.recompute_s,
        "swapped_out_bytes": simulation.swapped_out_bytes,
        "swapped_in_bytes": simulation.swapped_in_bytes,
        "swaps_to": machine.swaps_to,
        "disk_written_bytes": simulation.swapped_out_bytes if to_disk else simulation.disk_written_bytes,
        "disk_read_bytes": simulation.swapped_in_bytes if to_disk else simulation.disk_read_bytes,
        "host_peak_bytes": prediction.pinned_host_bytes,
        "disk_peak_bytes": simulation.host_peak_bytes if to_disk else simulation.disk_peak_bytes,
        "num_swapped": sum(absence.action == "swap" for absence in absences),
        "num_recomputed": sum(absence.action == "recompute" for absence in absences),
        "peak_op": simulation.peak.op,
        "peak_op_name": peak_op.name if peak_op else "",
        "peak_tensors": tensors_at_peak(prediction),
    }


def tensors_at_peak(prediction: "Prediction") -> list[dict[str, Any]]:
    """Return the largest tensors that are on the device at the peak."""
    trace, simulation = prediction.trace, prediction.simulation
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
        print_result(json.dumps(facts))
        return
    lines = [
        f"planner      {facts['planner']} on {facts['machine']}, class {facts['decision_class']}",
        f"budget       {format_bytes(facts['budget_bytes'])}",
        (
            f"peak         {format_bytes(facts['peak_bytes'])}  (plain {format_bytes(facts['plain_peak_bytes'])}), "
            f"at op {facts['peak_op']} {facts['peak_op_name']}"
        ),
        (
            f"time         {time_text(facts, 'time')}  (plain {time_text(facts, 'plain_time')}; "
            f"{100 * facts['overhead']:+.2f} %)"
        ),
        f"waiting      {facts['stall_s'] * 1e3:.2f} ms, recomputing {facts['recompute_s'] * 1e3:.2f} ms",
        (
            f"swapped      {facts['num_swapped']} tensors: {format_bytes(facts['swapped_out_bytes'])} out, "
            f"{format_bytes(facts['swapped_in_bytes'])} back"
        ),
        f"recomputed   {facts['num_recomputed']} tensors",
    ]
    if facts["launches_left_out_s"]:
        lines.insert(4, f"note         {launches_note(facts['launches_left_out_s'], facts['num_ops'])}")
    lines[4:4] = extrapolation_lines(facts, width=13)
    if facts["host_peak_bytes"]:
        lines.append(f"host memory  {format_bytes(facts['host_peak_bytes'])} pinned, at most at once")
    if facts["disk_peak_bytes"]:
        lines.append(f"disk         {format_bytes(facts['disk_peak_bytes'])}, at most at once")
    if "planning_s" in facts:
        lines.append(f"planning     {facts['planning_s']:.2f} s")
    if "footprint_bytes" in facts:
        proved = ", proved optimal" if facts["proved_optimal"] else ""
        lines.append(
            f"footprint    {format_bytes(facts['footprint_bytes'])}: {facts['fragmentation']:.3%} above the live bytes"
            f"{proved}"
        )
    if "bound_time_s" in facts and facts["bound_time_s"] is None:
        lines.append(f"bound        no plan of the class {facts['bound_class']!r} fits")
    elif "bound_time_s" in facts:
        gap = facts["bound_time_s"] / facts["plain_time_s"] - 1 if facts["plain_time_s"] else 0.0
        lines.append(f"bound        no plan of the class {facts['bound_class']!r} is below {100 * gap:+.2f} %")
    if facts.get("is_near_least"):
        lines.append(_hint(facts))
    lines.append("largest tensors at the peak:")
    lines += [tensor_line(tensor) for tensor in facts["peak_tensors"]]
    if "path" in facts:
        lines.append(f"plan in {facts['path']}")
    print_result("\n".join(lines))


def _hint(facts: dict[str, Any]) -> str:
    least_bytes = facts["least_saved_peak_bytes"]
    advice = "--effort best or " if facts["effort"] == "fast" else ""
    times = facts["budget_bytes"] / least_bytes
    return (
        f"hint         the budget is {times:.2f} times the least, "
        f"{format_bytes(least_bytes, rounds_up=True)} ({least_bytes} bytes):\n"
        f"             {advice}--class extended, which may drop a tensor twice, can be faster here"
    )


def tensor_line(tensor: dict[str, Any]) -> str:
    """Return one of `tensors_at_peak` as text."""
    made_by = f", made by {tensor['made_by']}" if tensor["made_by"] else ""
    return f"  {format_bytes(tensor['size_bytes']):>11}  {tensor['kind']}{made_by}"
