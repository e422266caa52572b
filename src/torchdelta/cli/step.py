"""Shared by the planning commands: reading a trace, pricing it, progress, and one-line errors."""

import errno
import os
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import NoReturn

import typer
from tqdm import tqdm

from torchdelta.errors import InfeasibleError, SizeError, TorchdeltaError
from torchdelta.machine.model import Machine
from torchdelta.trace.model import Trace

__all__ = [
    "EXIT_FAILED",
    "EXIT_INFEASIBLE",
    "EXIT_USAGE",
    "answer",
    "check_output",
    "fail",
    "list_planners",
    "machine_named",
    "measured_facts",
    "one_line_errors",
    "own_stdout",
    "priced",
    "progress",
    "read_step",
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


def answer(text: str) -> None:
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
    """Print all planners if one called "list" is asked for, and exit; for an eager option."""
    if planner == "list":
        from torchdelta.planners import names

        with one_line_errors():
            found = names()
        answer("\n".join(found))
        raise typer.Exit
    return planner


def say_if_compiling() -> None:
    """Say on stderr that a plan takes longer than the next one, if its code was not compiled on this machine yet."""
    from torchdelta.simulate.compiled import is_kept
    from torchdelta.simulate.kernel import evaluate

    if not is_kept(evaluate):
        typer.echo("torchdelta: compiling the planner, once per version: 15 to 40 s more", err=True)


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


def read_step(path: Path) -> Trace:
    """Read a trace that has ops."""
    from torchdelta.trace.file import read_trace

    trace = read_trace(path)
    if not trace.ops:
        fail(f"{path}: the trace is empty: it has no ops to plan")
    return trace


def priced(trace: Trace, machine: Machine) -> Trace:
    """Return the trace with the times that its ops take on a machine.

    A trace whose ops have FLOPs or moved bytes is priced by the roofline; any other keeps its recorded times.
    """
    from torchdelta.machine.roofline import price

    if any(op.flops or op.moved_bytes for op in trace.ops):
        return price(trace, machine)
    if not any(op.time_s for op in trace.ops):
        fail("the trace has neither op times nor FLOPs, so its time cannot be predicted")
    typer.echo("torchdelta: the trace's ops have no FLOPs: their recorded times are used", err=True)
    return trace
