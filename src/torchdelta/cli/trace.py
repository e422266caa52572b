"""`torchdelta trace`: traces a training step without running it, or reads it from an event log or a snapshot."""

import json
import sys
import time
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from torchdelta.cli.prediction import launches_left_out_s, launches_note
from torchdelta.cli.step import (
    check_batch_size,
    check_input,
    check_output,
    function_named,
    machine_named,
    measured_facts,
    one_line_errors,
    own_stdout,
    print_result,
)
from torchdelta.machine.roofline import price
from torchdelta.trace.file import write_trace
from torchdelta.trace.imports.events import read_event_log
from torchdelta.trace.imports.snapshot import read_snapshot
from torchdelta.trace.model import BEFORE_STEP, Trace, counts
from torchdelta.units import format_bytes

__all__ = ["trace"]

_LOGS: Final = (".jsonl", ".ndjson")
_SNAPSHOTS: Final = (".pickle", ".pkl")


def trace(
    function: Annotated[
        str,
        typer.Argument(
            metavar="MODULE:FUNCTION|FILE",
            help="Returns (model, inputs) or (model, inputs, step); takes the batch size, if any. Or an event log "
            "(.jsonl) or a CUDA memory snapshot (.pickle).",
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
    batch_size: Annotated[int | None, typer.Option(help="The argument of the function.", show_default=False)] = None,
    device: Annotated[str, typer.Option(help="Device that the step would run on: cuda or cpu.")] = "cuda",
    optimizer: Annotated[
        str, typer.Option(help="If the function returns no step: none, sgd, sgd-momentum or adamw.")
    ] = "adamw",
    machine: Annotated[
        str | None, typer.Option(help="Price the ops on this machine, such as a100-80g.", show_default=False)
    ] = None,
    whole: Annotated[bool, typer.Option("--whole", help="Treat the whole FILE as one step.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Trace one training step symbolically, without memory and without a GPU.

    The function builds model and inputs on CPU. Steps that read the value of a tensor cannot be traced. In an event log
    or a memory snapshot, plain or gzip-compressed, the iteration is found by its repetition.
    """
    start_s = time.monotonic()
    output = _default_output(function) if output is None else output
    check_output(output)
    check_batch_size(batch_size)
    with one_line_errors():
        priced_on = machine_named(machine) if machine is not None else None
        if sys.stderr.isatty():
            typer.echo(f"tracing {function} ...", err=True)
        step = _imported(function, whole=whole)
        if step is None:
            build = function_named(function, optimizer=optimizer, device=device)
            from torchdelta.trace.symbolic import trace_step

            options: dict[str, Any] = {"optimizer": optimizer, "comment": function}
            with own_stdout():
                step = trace_step(build, batch_size=batch_size, device=device, **options)
        if priced_on is not None:
            step = price(step, priced_on)
        write_trace(step, output)
    facts = {"path": str(output), "function": function, **_facts(step), "machine": priced_on and priced_on.name}
    facts |= {} if machine is None else measured_facts(machine)
    facts["launches_left_out_s"] = 0.0 if priced_on is None else launches_left_out_s(step, priced_on)
    facts["tracing_s"] = round(time.monotonic() - start_s, 3)
    print_result(json.dumps(facts) if as_json else _text(facts))


def _default_output(function: str) -> Path:
    """Return a name in the current directory: that of the function, or of the file without its suffixes."""
    name = Path(function.rpartition(":")[2]).name
    for suffix in (".gz", *_LOGS, *_SNAPSHOTS):
        name = name.removesuffix(suffix)
    return Path(f"{name or 'step'}.trace")


def _imported(name: str, *, whole: bool) -> Trace | None:
    """Read the step of an event log or a snapshot, told by the suffix of its name; None for other names."""
    kind = name.removesuffix(".gz")
    if not kind.endswith((*_LOGS, *_SNAPSHOTS)):
        return None
    check_input(Path(name))
    return read_event_log(name, whole=whole) if kind.endswith(_LOGS) else read_snapshot(name, whole=whole)


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
    if facts["machine"] is not None:
        lines.append(f"  {facts['time_s'] * 1e3:.2f} ms on {facts['machine']} by roofline")
        if facts["launches_left_out_s"]:
            lines.append(f"  {launches_note(facts['launches_left_out_s'], facts['num_ops'])}")
    return "\n".join(lines)
