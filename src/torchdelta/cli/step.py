"""What the planning commands share: reading a trace, pricing it, progress, and saying in one line what went wrong."""

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
    "one_line_errors",
    "own_stdout",
    "priced",
    "progress",
    "read_step",
]

EXIT_FAILED = 1
EXIT_USAGE = 2
# EX_CONFIG of sysexits.h, as in `run`: the budget is a setting, and it cannot be held.
EXIT_INFEASIBLE = 78


def fail(message: str, code: int = EXIT_FAILED) -> NoReturn:
    """Say in one line what went wrong, on stderr, and exit."""
    typer.echo(f"torchdelta: {' '.join(message.split())}", err=True)
    raise typer.Exit(code)


def answer(text: str) -> None:
    """Print what was asked for on stdout. A reader that has gone away (`| head`) is typer's to end quietly."""
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
    """Send what a user's code prints to stderr: stdout holds the command's own answer, with --json one object."""
    with redirect_stdout(sys.stderr):
        yield


@contextmanager
def progress() -> Generator[Callable[[str], None]]:
    """Give a function that says what is being done; shown on a terminal once it has taken a second."""
    with tqdm(file=sys.stderr, disable=None, delay=1.0, leave=False, bar_format="{desc} [{elapsed}]") as bar:

        def say(what: str) -> None:
            bar.set_description_str(what, refresh=False)
            bar.update()

        yield say


def check_output(path: Path) -> None:
    """Refuse a file that cannot be written, before the work that would fill it is done."""
    if path.is_dir():
        fail(f"cannot write {str(path)!r}: it is a directory")
    if path.exists() and not path.is_file():
        fail(f"cannot write {str(path)!r}: it is no file that could be replaced")
    if not path.parent.is_dir():
        fail(f"cannot write {str(path)!r}: there is no directory {str(path.parent)!r}")
    if not os.access(path.parent, os.W_OK):
        fail(f"cannot write {str(path)!r}: no permission to write into {str(path.parent)!r}")


def read_step(path: Path) -> Trace:
    """Read a trace that has ops."""
    from torchdelta.trace.file import read_trace

    trace = read_trace(path)
    if not trace.ops:
        fail(f"{path}: the trace is empty: it has no ops to plan")
    return trace


def priced(trace: Trace, machine: Machine) -> Trace:
    """Return the trace with the times that its ops take on a machine.

    A trace whose ops say what they compute or move is priced by the roofline; any other keeps its recorded times.
    """
    from torchdelta.machine.roofline import price

    if any(op.flops or op.moved_bytes for op in trace.ops):
        return price(trace, machine)
    if not any(op.time_s for op in trace.ops):
        fail("the trace has neither op times nor FLOPs, so nothing can be said about time")
    typer.echo("torchdelta: the trace's ops carry no FLOPs: their recorded times are used", err=True)
    return trace
