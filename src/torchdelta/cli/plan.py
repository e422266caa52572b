"""`torchdelta plan`: decides which buffers leave the device, and when."""

from pathlib import Path
from typing import Annotated, get_args

import typer

from torchdelta.cli.errors import check_input, check_output, note, one_of
from torchdelta.cli.options import (
    ClassOption,
    JsonOption,
    LinkOption,
    PlannerOption,
    TraceArgument,
    budget_on,
    class_named,
    machine_named,
    measured_facts,
    note_origin,
    progress,
    say_if_compiling,
)
from torchdelta.cli.prediction import facts_of, show

__all__ = ["plan"]

_WORTH_A_HINT = 0.01
"""Overheads from this share on are worth the hint that more effort or a larger class may help."""


def plan(
    trace: TraceArgument,
    *,
    memory_budget: Annotated[
        str, typer.Option(help="'8GiB', '500MB', '80%' of the machine's memory, or bytes.", show_default=False)
    ],
    machine: Annotated[str, typer.Option(help="Name in the catalog, such as a100-80g.", show_default=False)],
    link: LinkOption = None,
    planner: PlannerOption = "torchdelta",
    decision_class: ClassOption = None,
    effort: Annotated[str, typer.Option(help="fast or best.")] = "fast",
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write the plan into this file.", show_default=False)
    ] = None,
    with_bound: Annotated[
        bool, typer.Option("--bound", help="Prove how much faster another plan of the class 'saved' could be.")
    ] = False,
    with_pool: Annotated[
        bool, typer.Option("--pool", help="Keep the footprint (peak and fragmentation) within the budget.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Decide for every tensor of a step whether it is kept, swapped or recomputed.

    An impossible budget exits with 78 and names the least budget found.
    """
    check_input(trace)
    check_output(output, others={"the trace": trace})
    with progress() as say:
        from torchdelta.plan.file import write_plan
        from torchdelta.planners import DEFAULT_PLANNER, Effort, get, plan_step
        from torchdelta.planners.default.search_planner import NEAR_LEAST
        from torchdelta.planners.problem_within import least_peak, problem_within

        wanted_effort, wanted_class = one_of("effort", effort, get_args(Effort)), class_named(decision_class)
        get(planner, wanted_class)  # before the trace is read
        hardware = machine_named(machine, link)

        def begin(what: str) -> None:
            phase, _, facts_of_step = what.partition(": ")
            if facts_of_step:  # only now: what is wrong with the arguments is one line
                note(f"{trace}: {what}")
                say_if_compiling()
            say(phase)

        found = plan_step(
            trace,
            hardware,
            budget_on(hardware, memory_budget),
            planner=planner,
            decision_class=wanted_class,
            effort=wanted_effort,
            with_bound=with_bound,
            within_footprint=with_pool,
            say=begin,
        )
        note_origin(found)
        facts = facts_of(found) | {
            "planner": planner,
            "effort": wanted_effort,
            "machine": found.machine.name,
            "planning_s": round(found.planning_s, 3),
            "decision_class": found.plan.header.decision_class,
            **measured_facts(machine),
        }
        if found.pooled is not None:
            facts |= {
                "footprint_bytes": found.pooled.placement.footprint_bytes,
                "lower_bound_bytes": found.pooled.placement.lower_bound_bytes,
                "fragmentation": found.pooled.placement.fragmentation,
                "proved_optimal": found.pooled.placement.proved_optimal,
            }
        if planner == DEFAULT_PLANNER and facts["decision_class"] == "saved":
            least_bytes = least_peak(problem_within(found.trace, found.machine, found.simulation.budget_bytes))
            is_near = found.overhead > _WORTH_A_HINT and found.simulation.budget_bytes < NEAR_LEAST * least_bytes
            facts |= {"least_saved_peak_bytes": least_bytes, "is_near_least": is_near}
        if found.bound is not None:
            time_s = found.bound.time_s if found.bound.feasible else None  # JSON has no infinity
            facts |= {"bound_class": found.bound.decision_class, "bound_time_s": time_s}
        if output is not None:
            write_plan(found.plan, output)
            facts["path"] = str(output)
    show(facts, as_json=as_json)
