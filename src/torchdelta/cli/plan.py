"""`torchdelta plan`: decides which buffers leave the device, and when."""

import time
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from torchdelta.cli.prediction import facts_of, show
from torchdelta.cli.size import number_or_text
from torchdelta.cli.step import (
    EXIT_USAGE,
    check_output,
    fail,
    list_planners,
    machine_named,
    measured_facts,
    one_line_errors,
    priced,
    progress,
    read_step,
    say_if_compiling,
)
from torchdelta.machine.model import Machine
from torchdelta.trace.model import Trace, peak
from torchdelta.units import format_bytes, parse_size

__all__ = ["plan"]

ALIGNMENT_BYTES = 512  # of torch's CUDA allocator

_WORTH_A_HINT = 0.01  # the overhead from which on other planners are suggested


def plan(
    trace: Annotated[
        Path, typer.Argument(metavar="TRACE", help="A step, from `torchdelta trace`.", show_default=False)
    ],
    *,
    memory_budget: Annotated[
        str, typer.Option(help="'8GiB', '500MB', '80%' of the machine's memory, or bytes.", show_default=False)
    ],
    machine: Annotated[str, typer.Option(help="Name in the catalog, such as a100-80g.", show_default=False)],
    planner: Annotated[
        str, typer.Option(callback=list_planners, is_eager=True, help="Name of the planner; 'list' lists all.")
    ] = "torchdelta",
    effort: Annotated[str, typer.Option(help="fast or best.")] = "best",
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write the plan into this file.", show_default=False)
    ] = None,
    with_bound: Annotated[
        bool, typer.Option("--bound", help="Prove how much faster another plan of the class 'saved' could be.")
    ] = False,
    with_pool: Annotated[
        bool, typer.Option("--pool", help="Keep the footprint (peak and fragmentation) within the budget.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Decide for every tensor of a step whether it is kept, swapped or recomputed.

    An impossible budget exits with 78 and names the least budget found.
    """
    wanted: Literal["fast", "best"] = "fast" if effort == "fast" else "best"
    if effort not in {"fast", "best"}:
        fail(f"unknown effort {effort!r}: use fast or best", EXIT_USAGE)
    if output is not None:
        check_output(output)
    with one_line_errors(), progress() as say:
        from torchdelta.bounds.lp_bound import bound
        from torchdelta.plan.file import write_plan
        from torchdelta.planners import get
        from torchdelta.planners.torchdelta import NEAR_LEAST, least_peak
        from torchdelta.simulate import execute
        from torchdelta.simulate.problem import Problem

        hardware, choose = machine_named(machine), get(planner)
        size = number_or_text(memory_budget)
        budget_bytes = parse_size(size, total_bytes=hardware.memory_bytes, name="memory budget")
        step = priced(read_step(trace), hardware)
        typer.echo(f"torchdelta: {_summary(trace, step, hardware, budget_bytes)}", err=True)
        say_if_compiling()
        say(f"planning ({planner})")
        placed: dict[str, Any] = {}
        start_s = time.monotonic()
        if with_pool:
            from torchdelta.pool.planned import plan_within_footprint

            pooled = plan_within_footprint(
                step,
                budget_bytes,
                lambda size_bytes: choose(step, hardware, size_bytes, wanted),
                alignment_bytes=ALIGNMENT_BYTES,
            )
            made = pooled.plan
            placed = {
                "footprint_bytes": pooled.placement.footprint_bytes,
                "lower_bound_bytes": pooled.placement.lower_bound_bytes,
                "fragmentation": pooled.placement.fragmentation,
                "proved_optimal": pooled.placement.proved_optimal,
            }
        else:
            made = choose(step, hardware, budget_bytes, wanted)
        planning_s = time.monotonic() - start_s
        say("simulating")
        facts = facts_of(execute(step, hardware, made), step, hardware)
        facts |= placed | {
            "planner": planner,
            "effort": wanted,
            "machine": hardware.name,
            "planning_s": round(planning_s, 3),
            "decision_class": made.header.decision_class,
            **measured_facts(machine),
        }
        if planner == "torchdelta":
            least_bytes = least_peak(Problem.of(step, hardware))
            is_near = facts["overhead"] > _WORTH_A_HINT and budget_bytes < NEAR_LEAST * least_bytes
            facts |= {"least_saved_peak_bytes": least_bytes, "is_near_least": is_near}
        if with_bound:
            say("bounding")
            proved = bound(step, hardware, budget_bytes)
            facts |= {"bound_class": proved.decision_class, "bound_time_s": proved.time_s}
        if output is not None:
            write_plan(made, output)
            facts["path"] = str(output)
    show(facts, as_json=as_json)


def _summary(path: Path, step: Trace, machine: Machine, budget_bytes: int) -> str:
    """Return what is said before the planner starts, which can take a minute."""
    plain_s = sum(op.time_s for op in step.ops)
    plain = f"peak {format_bytes(peak(step, with_workspace=True).size_bytes)}, {plain_s * 1e3:.2f} ms"
    return f"{path}: {len(step.ops)} ops, {plain} on {machine.name}; planning within {format_bytes(budget_bytes)}"
