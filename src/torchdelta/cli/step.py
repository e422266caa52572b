"""Shared by the planning commands: what their options mean, progress, and one-line errors."""

import errno
import os
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import typer
from tqdm import tqdm

from torchdelta.errors import InfeasibleError, SizeError, TorchdeltaError
from torchdelta.machine.model import Machine
from torchdelta.plan.model import DecisionClass

if TYPE_CHECKING:
    from torchdelta.planners import Effort, Prediction  # importing numba is slow

__all__ = [
    "EXIT_FAILED",
    "EXIT_INFEASIBLE",
    "EXIT_USAGE",
    "check_output",
    "decision_class_named",
    "effort_named",
    "fail",
    "list_planners",
    "machine_named",
    "measured_facts",
    "note_recorded_times",
    "one_line_errors",
    "own_stdout",
    "print_result",
    "progress",
    "say_if_compiling",
]

EXIT_FAILED = 1
EXIT_USAGE = 2
# EX_CONFIG of sysexits.h, as in `run`: the budget is a setting, and it cannot hold.
EXIT_INFEASIBLE = 78


def fail(message: str, code: int = EXIT_FAILED) -> NoReturn:
    """Print a one-line error on stderr and exit."""
    typer.echo(f"torchdelta: {' '.join(message.split())}", err=True)
    raise typer.Exit(code)


def print_result(text: str) -> None:
    """Print the result on stdout. If the reader closed the pipe (`| head`), typer exits quietly."""
    try:
        typer.echo(text)
    except OSError as error:
        if error.errno == errno.EPIPE:
            raise
        fail(f"cannot write to stdout: {error.strerror or error}")


@contextmanager
def one_line_errors() -> Generator[None]:
    """Turn the errors that torchdelta raises on purpose, and missing files, into one line and an exit code."""
    try:
        yield
    except InfeasibleError as error:
        fail(str(error), EXIT_INFEASIBLE)
    except SizeError as error:
        fail(str(error), EXIT_USAGE)
    except TorchdeltaError as error:
        fail(str(error))
    except FileNotFoundError as error:
        fail(f"no file {error.filename!r}", EXIT_USAGE)
    except OSError as error:
        fail(f"{error.filename!r} cannot be used: {error.strerror or error}", EXIT_USAGE)
    except ModuleNotFoundError as error:
        if error.name not in {"numpy", "numba", "highspy"}:
            raise
        fail(f"planning needs {error.name}: pip install 'torchdelta[plan,solver]'")


@contextmanager
def own_stdout() -> Generator[None]:
    """Redirect what the user's code prints to stderr: stdout is for the command's result."""
    with redirect_stdout(sys.stderr):
        yield


@contextmanager
def progress() -> Generator[Callable[[str], None]]:
    """Yield a function that shows the current activity on a terminal, after the first second."""
    with tqdm(file=sys.stderr, disable=None, delay=1.0, leave=False, bar_format="{desc} [{elapsed}]") as bar:

        def say(what: str) -> None:
            bar.set_description_str(what, refresh=False)
            bar.update()

        yield say


def check_output(path: Path) -> None:
    """Refuse an output file that cannot be written, before any work is done."""
    if path.is_dir():
        fail(f"cannot write {str(path)!r}: it is a directory")
    if path.exists() and not path.is_file():
        fail(f"cannot write {str(path)!r}: it is not a regular file")
    if not path.parent.is_dir():
        fail(f"cannot write {str(path)!r}: there is no directory {str(path.parent)!r}")
    if not os.access(path.parent, os.W_OK):
        fail(f"cannot write {str(path)!r}: no permission to write into {str(path.parent)!r}")


def list_planners(planner: str) -> str:
    """Print all planners and their classes if one called "list" is asked for, and exit; for an eager option."""
    if planner == "list":
        with one_line_errors():
            from torchdelta.planners import classes_of, names

            lines = [f"{name:<20} {', '.join(classes_of(name))}" for name in names()]
        print_result("\n".join(lines))
        raise typer.Exit
    return planner


def effort_named(word: str) -> "Effort":
    """Return an effort, or exit where there is none of that name."""
    match word:
        case "fast" | "best":
            return word
        case _:
            fail(f"unknown effort {word!r}: use fast or best", EXIT_USAGE)


def decision_class_named(word: str | None) -> DecisionClass | None:
    """Return a decision class, None for the planner's own, or exit where there is none of that name."""
    match word:
        case None | "saved" | "extended" | "all":
            return word
        case _:
            fail(f"unknown class {word!r}: use saved, extended or all", EXIT_USAGE)


def say_if_compiling() -> None:
    """Print on stderr that a plan takes longer than the next one, if its code was not compiled on this machine yet."""
    from torchdelta.simulate.compiled import is_kept
    from torchdelta.simulate.kernel import evaluate

    if not is_kept(evaluate):
        typer.echo("torchdelta: compiling the planner, once per version: about half a minute more", err=True)


def machine_named(name: str) -> Machine:
    """Return a machine; of one that was measured, say on stderr when that was, and how busy it was."""
    from torchdelta.machine.cache import circumstances
    from torchdelta.machine.catalog import find, measured

    cached = measured(name)
    if cached is not None:
        typer.echo(f"torchdelta: {cached.machine.name} was {circumstances(cached)}", err=True)
    return find(name)


def measured_facts(name: str) -> dict[str, object]:
    """Return when a measured machine was measured, and how busy it was; nothing for any other machine."""
    from torchdelta.machine.catalog import measured

    cached = measured(name)
    return {} if cached is None else {"machine_measured_at": cached.measured_at, "machine_load": cached.load}


def note_recorded_times(prediction: "Prediction") -> None:
    """Print on stderr where op times are the trace's own and not those of the machine."""
    if prediction.uses_recorded_times:
        typer.echo("torchdelta: the trace's ops have no FLOPs: their recorded times are used", err=True)
