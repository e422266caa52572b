"""Shared by the commands: what their options mean, progress, and one-line errors.

An error is one line on stderr, and says what is wrong, the numbers with their units, and what works instead. Its exit
code is one of those in `main.py`.
"""

import errno
import os
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from tqdm import tqdm

from torchdelta.errors import ConfigError, InfeasibleError, SizeError, TorchdeltaError
from torchdelta.machine.model import Machine
from torchdelta.names import unknown_name
from torchdelta.plan.model import DecisionClass

if TYPE_CHECKING:
    from torchdelta.planners import Effort, Prediction  # importing numba is slow

__all__ = [
    "EXIT_FAILED",
    "EXIT_INFEASIBLE",
    "EXIT_USAGE",
    "LinkOption",
    "check_batch_size",
    "check_input",
    "check_output",
    "check_planner",
    "decision_class_named",
    "effort_named",
    "fail",
    "function_named",
    "list_planners",
    "machine_named",
    "measured_facts",
    "note_recorded_times",
    "one_line_errors",
    "own_stdout",
    "prefix",
    "print_result",
    "progress",
    "say_if_compiling",
]

LinkOption = Annotated[
    str | None,
    typer.Option(
        "--link",
        help="The slot of the device, such as pcie4-x8; pcie4-x8-pageable for memory that is not pinned.",
        show_default=False,
    ),
]
"""An option of the commands that price transfers."""

EXIT_FAILED = 1
EXIT_USAGE = 2
# EX_CONFIG of sysexits.h: the budget is a setting, and it cannot be held.
EXIT_INFEASIBLE = 78


def prefix() -> str:
    """Return what a line on stderr begins with: under torchrun it names the rank."""
    rank = os.environ.get("RANK")
    return "torchdelta" if rank is None else f"torchdelta[rank {rank}]"


def fail(message: str, code: int = EXIT_FAILED) -> NoReturn:
    """Print a one-line error on stderr and exit."""
    typer.echo(f"{prefix()}: {' '.join(message.split()).removesuffix('.')}", err=True)
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
def one_line_errors(code: int = EXIT_FAILED) -> Generator[None]:
    """Turn the errors that torchdelta raises on purpose, and missing files, into one line and an exit code.

    Args:
        code: The exit code of an error whose type does not say that the usage or the budget is wrong.
    """
    try:
        yield
    except InfeasibleError as error:
        fail(str(error), EXIT_INFEASIBLE)
    except (SizeError, ConfigError) as error:
        fail(str(error), EXIT_USAGE)
    except TorchdeltaError as error:
        fail(str(error), code)
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


def check_input(path: Path) -> None:
    """Refuse an input file that cannot be read, before any work is done."""
    if not path.exists():
        fail(f"cannot read {str(path)!r}: there is no such file", EXIT_USAGE)
    if path.is_dir():
        fail(f"cannot read {str(path)!r}: it is a directory", EXIT_USAGE)
    if not os.access(path, os.R_OK):
        fail(f"cannot read {str(path)!r}: no permission to read it", EXIT_USAGE)


def check_output(path: Path, *, may_be_device: bool = False) -> None:
    """Refuse an output file that cannot be written, before any work is done.

    Args:
        path: The file, which need not exist.
        may_be_device: Whether the text may go to a device or a pipe, such as /dev/stderr.
    """
    if path.is_dir():
        fail(f"cannot write {str(path)!r}: it is a directory", EXIT_USAGE)
    if path.exists() and not path.is_file():
        if may_be_device:
            return
        fail(f"cannot write {str(path)!r}: it is not a regular file", EXIT_USAGE)
    if not path.parent.is_dir():
        fail(f"cannot write {str(path)!r}: there is no directory {str(path.parent)!r}", EXIT_USAGE)
    if path.exists() and not os.access(path, os.W_OK):
        fail(f"cannot write {str(path)!r}: no permission to write it", EXIT_USAGE)
    if not os.access(path.parent, os.W_OK):
        fail(f"cannot write {str(path)!r}: no permission to write into {str(path.parent)!r}", EXIT_USAGE)


def check_batch_size(batch_size: int | None) -> None:
    """Refuse a batch size that is none."""
    if batch_size is not None and batch_size < 1:
        fail(f"batch size {batch_size} is not allowed: use 1 or more", EXIT_USAGE)


def check_planner(planner: str, decision_class: DecisionClass | None) -> None:
    """Refuse a planner that there is not, or that does not plan in the class, before the step is read."""
    with one_line_errors(EXIT_USAGE):
        from torchdelta.planners import get

        get(planner, decision_class)


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
            fail(unknown_name("effort", word, ("fast", "best")), EXIT_USAGE)


def decision_class_named(word: str | None) -> DecisionClass | None:
    """Return a decision class, None for the planner's own, or exit where there is none of that name."""
    match word:
        case None | "saved" | "extended" | "all":
            return word
        case _:
            fail(unknown_name("class", word, ("saved", "extended", "all")), EXIT_USAGE)


def function_named(function: str, *, optimizer: str, device: str = "cuda") -> Callable[..., Any]:
    """Import the function that builds a step, or exit where there is none, or no such optimizer or device."""
    # Imported late, so that --help and other wrong usage do not wait for torch.
    from torchdelta.trace.symbolic.load import load_function
    from torchdelta.trace.symbolic.step import DEVICES, OPTIMIZERS

    for kind, word, known in (("optimizer", optimizer, OPTIMIZERS), ("device", device, DEVICES)):
        if word not in known:
            fail(unknown_name(kind, word, known), EXIT_USAGE)
    with one_line_errors(EXIT_USAGE), own_stdout():
        return load_function(function)


def say_if_compiling() -> None:
    """Print on stderr that a plan takes longer than the next one, if its code was not compiled on this machine yet."""
    from torchdelta.simulate.compiled import is_kept
    from torchdelta.simulate.kernel import evaluate

    if not is_kept(evaluate):
        typer.echo("torchdelta: compiling the planner, once per version: about ten seconds more", err=True)


def machine_named(name: str, link: str | None = None) -> Machine:
    """Return a machine, or exit where there is none; say on stderr when and how busy it was if it was measured.

    Args:
        name: In the catalog, or "local".
        link: Another link to the host than the machine's own, such as "pcie4-x8"; None for its own.
    """
    from torchdelta.machine.cache import circumstances
    from torchdelta.machine.catalog import find, measured
    from torchdelta.machine.links import with_link

    with one_line_errors(EXIT_USAGE):
        cached = measured(name)
        if cached is not None:
            typer.echo(f"torchdelta: {cached.machine.name} was {circumstances(cached)}", err=True)
        machine = find(name)
        return machine if link is None else with_link(machine, link)


def measured_facts(name: str) -> dict[str, object]:
    """Return when a measured machine was measured, and how busy it was; nothing for any other machine."""
    from torchdelta.machine.catalog import measured

    cached = measured(name)
    return {} if cached is None else {"machine_measured_at": cached.measured_at, "machine_load": cached.load}


def note_recorded_times(prediction: "Prediction") -> None:
    """Print on stderr where op times are the trace's own and not those of the machine."""
    if prediction.uses_recorded_times:
        typer.echo("torchdelta: the trace's ops have no FLOPs: their recorded times are used", err=True)
