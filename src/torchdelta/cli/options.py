"""The options that several commands have: their help, and what their words mean."""

import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer
from tqdm import tqdm

from torchdelta.cli.errors import fail, note, one_of, print_result
from torchdelta.cli.stderr import is_terminal
from torchdelta.machine.model import Machine, reserve_bytes
from torchdelta.plan.model import DecisionClass
from torchdelta.units import format_bytes, parse_size

if TYPE_CHECKING:
    from torchdelta.planners import Prediction  # importing numba is slow

__all__ = [
    "ClassOption",
    "JsonOption",
    "LinkOption",
    "OptimizerOption",
    "PlannerOption",
    "TraceArgument",
    "a_count",
    "budget_on",
    "class_named",
    "function_named",
    "machine_named",
    "measured_facts",
    "note_origin",
    "number_or_text",
    "own_stdout",
    "progress",
    "say_if_compiling",
]

_MOST_THINGS = 1_000_000
_MOST_DIGITS = 30  # Python refuses to read numbers of thousands


def _list_planners(planner: str) -> str:
    """Print all planners and their classes if one called "list" is asked for, and exit."""
    if planner == "list":
        from torchdelta.planners import classes_of, names

        print_result("\n".join(f"{name:<20} {', '.join(classes_of(name))}" for name in names()))
        raise typer.Exit
    return planner


def a_count(param: typer.CallbackParam, value: int | None) -> int | None:
    """Refuse what is no number of things, such as a batch size of 0; for an option's callback."""
    if value is not None and not 1 <= value <= _MOST_THINGS:
        fail(f"--{str(param.name).replace('_', '-')} {value} is not allowed: use 1 to {_MOST_THINGS}")
    return value


JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
TraceArgument = Annotated[
    Path, typer.Argument(metavar="TRACE", help="A step, from `torchdelta trace`.", show_default=False)
]
LinkOption = Annotated[
    str | None,
    typer.Option(
        "--link",
        help="The slot of the device, such as pcie4-x8; pcie4-x8-pageable for memory that is not pinned.",
        show_default=False,
    ),
]
PlannerOption = Annotated[
    str,
    typer.Option("--planner", callback=_list_planners, is_eager=True, help="Name of the planner; 'list' lists all."),
]
ClassOption = Annotated[
    str | None,
    typer.Option(
        "--class",
        help="What may leave: saved (the default), extended, persistent (what `run --class all` carries out) or all.",
        show_default=False,
    ),
]
OptimizerOption = Annotated[
    str, typer.Option("--optimizer", help="If the function returns no step: none, sgd, sgd-momentum or adamw.")
]


@contextmanager
def own_stdout() -> Generator[None]:
    """Redirect what the user's code prints to stderr: stdout is for the command's result."""
    with redirect_stdout(sys.stderr):
        yield


@contextmanager
def progress() -> Generator[Callable[[str], None]]:
    """Yield a function that shows the current activity on a terminal, after the first second."""
    with tqdm(
        file=sys.stderr, disable=not is_terminal(sys.stderr), delay=1.0, leave=False, bar_format="{desc} [{elapsed}]"
    ) as bar:

        def say(what: str) -> None:
            bar.set_description_str(what, refresh=False)
            bar.update()

        yield say


def number_or_text(size: str) -> int | str:
    """Convert an argument for `units.parse_size`: digits alone become an int of bytes."""
    return int(size) if size.isascii() and size.isdecimal() and len(size) < _MOST_DIGITS else size


def budget_on(machine: Machine, memory_budget: str) -> int:
    """Return a budget in bytes, or fail if it is more than a machine has."""
    total_bytes = machine.memory_bytes
    size_bytes = parse_size(memory_budget, total_bytes=total_bytes, name="memory budget")
    if size_bytes > total_bytes:
        room_bytes = total_bytes - reserve_bytes(machine)
        fail(
            f"a memory budget of {format_bytes(size_bytes)} is more than the "
            f"{format_bytes(total_bytes, rounds_down=True)} of {machine.name}: tensors can take "
            f"{format_bytes(room_bytes, rounds_down=True)} ({room_bytes} bytes) of it, context and allocator the rest"
        )
    return size_bytes


def class_named(word: str | None) -> DecisionClass | None:
    """Return a decision class; None is the planner's own."""
    return None if word is None else one_of("class", word, get_args(DecisionClass))


def function_named(function: str) -> Callable[..., Any]:
    """Import the function that builds a step."""
    # Imported late, so that --help and other wrong usage do not wait for torch.
    from torchdelta.trace.symbolic.load import load_function

    with own_stdout():
        return load_function(function)


def say_if_compiling() -> None:
    """Print on stderr that a plan takes longer than the next one, if its code was not compiled on this machine yet."""
    from torchdelta.simulate.compiled import is_kept
    from torchdelta.simulate.kernel import evaluate

    if not is_kept(evaluate):
        note("compiling the planner, once per version: about ten seconds more")


def machine_named(name: str, link: str | None = None) -> Machine:
    """Return a machine; say on stderr when it was measured, and how busy it was, if it was.

    Args:
        name: In the catalog, or "local".
        link: Another link to the host than the machine's own, such as "pcie4-x8"; None for its own.
    """
    from torchdelta.machine.cache import circumstances
    from torchdelta.machine.catalog import find, measured
    from torchdelta.machine.links import with_link

    cached = measured(name)
    if cached is not None:
        note(f"{cached.machine.name} was {circumstances(cached)}")
    machine = find(name)
    return machine if link is None else with_link(machine, link)


def measured_facts(name: str) -> dict[str, object]:
    """Return when a measured machine was measured, and how busy it was; nothing for any other machine."""
    from torchdelta.machine.catalog import measured

    cached = measured(name)
    return {} if cached is None else {"machine_measured_at": cached.measured_at, "machine_load": cached.load}


def note_origin(prediction: "Prediction") -> None:
    """Print on stderr where op times are the trace's own, and where the trace is of another kind of device."""
    from torchdelta.machine.model import device_of

    if prediction.uses_recorded_times:
        note("the trace's ops have no FLOPs: their recorded times are used")
    traced_on, device = prediction.trace.header.device, device_of(prediction.machine)
    if traced_on != device:
        name = prediction.machine.name
        note(f"the trace is of a step on {traced_on}, but {name} runs on {device}: ops and memory may differ there")
