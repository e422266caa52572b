"""`torchdelta trace`: traces a training step without running it, or reads one from a log, a snapshot or a profile."""

import json
import sys
import time
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from torchdelta.cli.errors import check_input, check_output, fail, print_result
from torchdelta.cli.options import (
    JsonOption,
    OptimizerOption,
    a_count,
    function_named,
    machine_named,
    measured_facts,
    own_stdout,
)
from torchdelta.cli.prediction import (
    extrapolation_lines,
    interval_facts,
    launches_left_out_s,
    launches_note,
    time_text,
)
from torchdelta.cli.stderr import is_terminal, print_on_stderr
from torchdelta.machine.interval import interval_of
from torchdelta.machine.model import Machine
from torchdelta.machine.roofline import price
from torchdelta.trace.file import write_trace
from torchdelta.trace.imports.events import read_event_log
from torchdelta.trace.imports.kineto import read_profile_file
from torchdelta.trace.imports.profile import read_profile
from torchdelta.trace.imports.snapshot import read_snapshot
from torchdelta.trace.imports.timing import Match, with_measured_times
from torchdelta.trace.model import BEFORE_STEP, Trace, counts
from torchdelta.units import format_bytes

__all__ = ["trace"]

_LOGS: Final = (".jsonl", ".ndjson")
_SNAPSHOTS: Final = (".pickle", ".pkl")
_PROFILES: Final = (".json",)


def trace(
    function: Annotated[
        str,
        typer.Argument(
            metavar="MODULE:FUNCTION|FILE",
            help="Returns (model, inputs) or (model, inputs, step); takes the batch size, if any. Or an event log "
            "(.jsonl), a CUDA memory snapshot (.pickle) or a profile of torch.profiler (.json).",
            show_default=False,
        ),
    ],
    *,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", help="The trace file to write; by default FUNCTION.trace here.", show_default=False
        ),
    ] = None,
    batch_size: Annotated[
        int | None, typer.Option(callback=a_count, help="The argument of the function.", show_default=False)
    ] = None,
    device: Annotated[str, typer.Option(help="Device that the step would run on: cuda or cpu.")] = "cuda",
    optimizer: OptimizerOption = "adamw",
    machine: Annotated[
        str | None, typer.Option(help="Price the ops on this machine, such as a100-80g.", show_default=False)
    ] = None,
    profile: Annotated[
        Path | None,
        typer.Option(
            help="A profile of this step on a GPU (.json): its op times replace the computed ones.", show_default=False
        ),
    ] = None,
    whole: Annotated[bool, typer.Option("--whole", help="Treat the whole FILE as one step.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Trace one training step symbolically, without memory and without a GPU.

    The function builds model and inputs on CPU. Steps that read the value of a tensor cannot be traced. In an event log
    or a memory snapshot, plain or gzip-compressed, the iteration is found by its repetition, in a profile by its marks.
    """
    start_s = time.monotonic()
    output = _default_output(function) if output is None else output
    check_output(output, others={"the input": Path(function) if _is_file(function) else None, "the profile": profile})
    priced_on = machine_named(machine) if machine is not None else None
    if is_terminal(sys.stderr):
        print_on_stderr(f"tracing {function} ...")
    if profile is not None:
        _check_profile(function, profile, priced_on)
    measured = None if profile is None else read_profile_file(profile, whole=whole)
    step = _imported(function, whole=whole)
    match: Match | None = None
    if step is None:
        build = function_named(function)
        from torchdelta.trace.symbolic import traced_step

        options: dict[str, Any] = {"optimizer": optimizer, "comment": function, "with_growth": False}
        with own_stdout():
            traced = traced_step(build, batch_size=batch_size, device=device, **options)
        step = traced.trace
        if measured is not None and priced_on is not None:
            priced = price(step, priced_on)
            step, match = with_measured_times(priced, traced.shapes, measured, source=str(profile))
    if priced_on is not None and any(op.flops or op.moved_bytes for op in step.ops):
        step = price(step, priced_on)
    write_trace(step, output)
    facts = {"path": str(output), "function": function, **_facts(step), "machine": priced_on and priced_on.name}
    facts |= {} if machine is None else measured_facts(machine)
    facts |= _match_facts(match)
    facts["launches_left_out_s"] = 0.0 if priced_on is None else launches_left_out_s(step, priced_on)
    if priced_on is not None and match is None:
        facts |= interval_facts(interval_of(step, priced_on), time=sum(op.time_s for op in step.ops))
    facts["tracing_s"] = round(time.monotonic() - start_s, 3)
    print_result(json.dumps(facts) if as_json else _text(facts))


def _default_output(function: str) -> Path:
    """Return a name in the current directory: that of the function, or of the file without its suffixes."""
    name = Path(function.rpartition(":")[2]).name
    for suffix in (".gz", *_LOGS, *_SNAPSHOTS, *_PROFILES):
        name = name.removesuffix(suffix)
    return Path(f"{name or 'step'}.trace")


def _is_file(name: str) -> bool:
    """Return whether a name is that of a log, a snapshot or a profile, as its suffix tells, and not of a function."""
    return name.removesuffix(".gz").endswith((*_LOGS, *_SNAPSHOTS, *_PROFILES))


def _imported(name: str, *, whole: bool) -> Trace | None:
    """Read the step of a log, a snapshot or a profile, told by the suffix of its name; None for other names."""
    if not _is_file(name):
        return None
    kind = name.removesuffix(".gz")
    check_input(Path(name))
    if kind.endswith(_PROFILES):
        return read_profile(name, whole=whole)
    return read_event_log(name, whole=whole) if kind.endswith(_LOGS) else read_snapshot(name, whole=whole)


def _check_profile(function: str, profile: Path, machine: Machine | None) -> None:
    """Refuse a profile that nothing can be done with, before any work is done."""
    if _is_file(function):
        fail("--profile replaces op times of a traced step: name the MODULE:FUNCTION to trace as well")
    if machine is None:
        fail("--profile needs --machine, to price the ops that the profile does not show")
    check_input(profile)


def _match_facts(match: Match | None) -> dict[str, Any]:
    """Return how much of a step a profile shows, by name; nothing without one."""
    if match is None:
        return {}
    return {
        "profiled_ops": match.num_ops,
        "profiled_share": match.share,
        "matrix_factor": match.matrix_factor,
        "other_factor": match.other_factor,
        "profiled_time_s": match.profiled_s,
    }


def _facts(step: Trace) -> dict[str, Any]:
    """Return the key numbers of a trace."""
    number = counts(step)
    peak = step.ops[number.peak.op]
    parameters = (b for b in step.buffers if b.kind == "parameter" and b.birth_op == BEFORE_STEP)
    return {
        "batch_size": step.header.batch_size,
        "device": step.header.device,
        "num_ops": number.num_ops,
        "num_buffers": number.num_buffers,
        "parameter_bytes": sum(buffer.size_bytes for buffer in parameters),
        "before_step_bytes": number.before_step_bytes,
        "saved_bytes": number.saved_bytes,
        "peak_bytes": number.peak.size_bytes,
        "peak_op": number.peak.op,
        "peak_op_name": peak.name,
        "peak_phase": peak.phase,
        "peak_module": peak.module,
        "flops": sum(op.flops for op in step.ops),
        "time_s": number.time_s,
    }


def _text(facts: dict[str, Any]) -> str:
    where = f"in {facts['peak_module']}" if facts["peak_module"] else f"in the {facts['peak_phase']}"
    batch = "" if facts["batch_size"] is None else f" at batch size {facts['batch_size']}"
    lines = [
        f"{facts['path']}: {facts['function']}{batch}, on {facts['device']}",
        f"  {facts['num_ops']} ops, {facts['num_buffers']} buffers, {facts['flops'] / 1e9:.1f} GFLOP",
        f"  {format_bytes(facts['parameter_bytes'])} of parameters",
        f"  {format_bytes(facts['before_step_bytes'])} before the step, parameters and optimizer states included",
        f"  {format_bytes(facts['saved_bytes'])} saved for backward",
        f"  {format_bytes(facts['peak_bytes'])} at the peak, op {facts['peak_op']} ({facts['peak_op_name']}) {where}",
    ]
    if "profiled_ops" in facts:
        shown = f"{facts['profiled_ops']} ops, {facts['profiled_share']:.0%} of the time"
        lines += [
            f"  {facts['time_s'] * 1e3:.2f} ms: {shown}, as profiled ({facts['profiled_time_s'] * 1e3:.2f} ms in all)",
            f"  others by roofline, times {facts['matrix_factor']:.2f} (products) and {facts['other_factor']:.2f}",
        ]
    elif not facts["flops"] and facts["time_s"]:
        lines.append(f"  {facts['time_s'] * 1e3:.2f} ms as recorded")
    elif facts["machine"] is not None:
        lines.append(f"  {time_text(facts, 'time')} on {facts['machine']} by roofline")
        lines += [f"  {line}" for line in extrapolation_lines(facts, width=14)]
        if facts["launches_left_out_s"]:
            lines.append(f"  {launches_note(facts['launches_left_out_s'], facts['num_ops'])}")
    return "\n".join(lines)
