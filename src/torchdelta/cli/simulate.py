"""`torchdelta simulate`: predicts the time and memory of a step on a machine, plain or under a plan."""

from pathlib import Path
from typing import Annotated

import msgspec
import typer

from torchdelta.cli.errors import check_input, fail
from torchdelta.cli.options import (
    JsonOption,
    LinkOption,
    TraceArgument,
    machine_named,
    measured_facts,
    note_origin,
    progress,
)
from torchdelta.cli.prediction import facts_of, show
from torchdelta.errors import MachineError

__all__ = ["simulate"]


def simulate(
    trace: TraceArgument,
    plan: Annotated[
        Path | None, typer.Argument(metavar="[PLAN]", help="Its plan, from `torchdelta plan`.", show_default=False)
    ] = None,
    *,
    machine: Annotated[
        str | None, typer.Option(help="Name in the catalog; by default the plan's, with its links.", show_default=False)
    ] = None,
    link: LinkOption = None,
    as_json: JsonOption = False,
) -> None:
    """Predict a step's time, peak and transfers.

    A plan that was not made for the trace, or exceeds its budget, is an error.
    """
    if machine is None and plan is None:
        fail("without a plan a machine is needed: --machine a100-80g")
    check_input(trace)
    check_input(plan)
    with progress() as say:
        from torchdelta.machine.model import validate_machine
        from torchdelta.plan.file import read_plan
        from torchdelta.planners import predict

        given = None if plan is None else read_plan(plan)
        name = machine if machine is not None else given.header.machine if given is not None else ""
        chosen = machine_named(name, link)
        if machine is None and link is None and given is not None and given.header.links is not None:
            chosen = msgspec.structs.replace(chosen, **msgspec.structs.asdict(given.header.links))
            try:
                validate_machine(chosen)
            except MachineError as error:
                fail(f"{plan}: its links are invalid: {error}")
        say("simulating")
        found = predict(trace, chosen, given)
        note_origin(found)
    facts = facts_of(found) | {
        "planner": found.plan.header.planner,
        "machine": found.machine.name,
        "decision_class": found.plan.header.decision_class,
        **measured_facts(name),
    }
    show(facts, as_json=as_json)
