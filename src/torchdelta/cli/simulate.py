"""`torchdelta simulate`: predicts the time and memory of a step on a machine, plain or under a plan."""

from pathlib import Path
from typing import Annotated

import typer

from torchdelta.cli.prediction import facts_of, show
from torchdelta.cli.step import (
    EXIT_USAGE,
    LinkOption,
    check_input,
    fail,
    machine_named,
    measured_facts,
    note_recorded_times,
    one_line_errors,
    progress,
)

__all__ = ["simulate"]


def simulate(
    trace: Annotated[
        Path, typer.Argument(metavar="TRACE", help="A step, from `torchdelta trace`.", show_default=False)
    ],
    plan: Annotated[
        Path | None, typer.Argument(metavar="[PLAN]", help="Its plan, from `torchdelta plan`.", show_default=False)
    ] = None,
    *,
    machine: Annotated[
        str | None, typer.Option(help="Name in the catalog; by default the plan's.", show_default=False)
    ] = None,
    link: LinkOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Predict a step's time, peak and transfers.

    A plan that was not made for the trace, or exceeds its budget, is an error.
    """
    if machine is None and plan is None:
        fail("without a plan a machine is needed: --machine a100-80g", EXIT_USAGE)
    for path in (trace, plan):
        if path is not None:
            check_input(path)
    with one_line_errors(), progress() as say:
        from torchdelta.plan.file import read_plan
        from torchdelta.planners import predict

        given = None if plan is None else read_plan(plan)
        name = machine if machine is not None else given.header.machine if given is not None else ""
        say("simulating")
        found = predict(trace, machine_named(name, link), given)
        note_recorded_times(found)
    facts = facts_of(found) | {
        "planner": found.plan.header.planner,
        "machine": found.machine.name,
        "decision_class": found.plan.header.decision_class,
        **measured_facts(name),
    }
    show(facts, as_json=as_json)
