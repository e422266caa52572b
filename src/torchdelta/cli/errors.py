"""What the commands print about an error: one line on stderr, and an exit code.

    torchdelta COMMAND: what is wrong, the numbers with their units, what works instead

Exit codes: 0 success; 1 a failure of the work, such as a full disk or a missing package; 2 wrong use or bad input, such
as an unknown option or name, a path that cannot be used, a damaged file, a step that cannot be traced; 78 an impossible
budget (EX_CONFIG, so that a job script can tell it from a crash). `run` keeps the exit code of the script.

Commands call `fail`, or let an error that torchdelta raises on purpose pass: `OneLineGroup` prints both.
"""

import errno
import os
import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final, NoReturn, TypeVar

import typer
from typer.core import TyperGroup

from torchdelta.cli.stderr import print_on_stderr
from torchdelta.errors import (
    ConfigError,
    InfeasibleError,
    MachineError,
    PlanError,
    PoolError,
    SizeError,
    TorchdeltaError,
    TraceError,
    TraceFileError,
)
from torchdelta.names import unknown_name

__all__ = [
    "EXIT_FAILED",
    "EXIT_INFEASIBLE",
    "EXIT_USAGE",
    "OneLineGroup",
    "check_input",
    "check_output",
    "fail",
    "note",
    "one_of",
    "prefix",
    "print_result",
]

EXIT_FAILED: Final = 1
EXIT_USAGE: Final = 2
EXIT_INFEASIBLE: Final = 78

_BAD_INPUT: Final = (ConfigError, MachineError, PlanError, PoolError, SizeError, TraceError, TraceFileError)
_BAD_PATH: Final = {
    errno.EACCES,
    errno.EISDIR,
    errno.ELOOP,
    errno.ENAMETOOLONG,
    errno.ENOENT,
    errno.ENOTDIR,
    errno.EPERM,
    errno.EROFS,
}
# How typer names what is near: ". Did you mean 'plan'?" and " (Possible options: --whole)".
_NEAREST: Final = re.compile(r"(?:\. Did you mean| \(Possible options:) (.*?)[?)]$")
_EXTRAS: Final = {"numpy": "plan", "numba": "plan", "highspy": "solver"}
_Name = TypeVar("_Name", bound=str)


class _CommandError(Exception):
    """What `fail` was called with."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


class OneLineGroup(TyperGroup):
    """The commands. Of what one raises on purpose, a line is printed; so it is of wrong usage (typer draws a box)."""

    _command = ""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Remember which command runs."""
        found = super().resolve_command(ctx, args)
        self._command = found[0] or ""
        return found

    def main(self, *args: Any, standalone_mode: bool = True, **options: Any) -> Any:
        """Run a command, and exit with its code."""
        if not standalone_mode:
            return super().main(*args, standalone_mode=False, **options)
        try:
            code = super().main(*args, standalone_mode=False, **options)
        except typer.Abort:
            code = EXIT_FAILED
        except Exception as error:
            code = self._show(error)
            if code is None:
                raise
        sys.exit(code or 0)

    def _show(self, error: Exception) -> int | None:
        """Print an error and return its exit code; print nothing of one that is a bug, and return None."""
        tell = getattr(error, "format_message", None)  # typer's own usage errors have no public class of their own
        if tell is None:
            message, code = _told(error)
        else:
            text, code = tell(), EXIT_USAGE  # without any arguments it prints the help
            help_of = f"torchdelta {self._command}".strip()
            said = _NEAREST.sub(r": did you mean \1?", f"{text[:1].lower()}{text[1:].rstrip('.')}")
            message = f"{said} (see `{help_of} --help`)" if text else ""
        if message:
            print_on_stderr(f"{prefix(self._command)}: {' '.join(message.split()).removesuffix('.')}")
        return code


def _told(error: Exception) -> tuple[str, int | None]:
    """Return what is said of an error, and its exit code; None where nobody foresaw it."""
    match error:
        case _CommandError():
            return str(error), error.code
        case InfeasibleError():
            return str(error), EXIT_INFEASIBLE
        case TorchdeltaError():
            is_bad_input = isinstance(error, _BAD_INPUT) and not _is_failure(error.__cause__)
            return str(error), EXIT_USAGE if is_bad_input else EXIT_FAILED
        case OSError(filename=name) if name is not None:
            code = EXIT_USAGE if error.errno in _BAD_PATH else EXIT_FAILED
            return f"{os.fspath(name)!r} cannot be used: {error.strerror or error}", code
        case ModuleNotFoundError(name=name) if name in _EXTRAS:
            return f"planning needs {name}: pip install 'torchdelta[{_EXTRAS[name]}]'", EXIT_FAILED
        case _:
            return "", None


def _is_failure(cause: BaseException | None) -> bool:
    """Return whether an error comes from a failure of the system, such as a full disk, and not from a wrong path."""
    return isinstance(cause, OSError) and cause.errno is not None and cause.errno not in _BAD_PATH


def prefix(command: str = "") -> str:
    """Return what a line on stderr begins with: under torchrun it names the rank, in an error the command."""
    rank = os.environ.get("RANK")
    return f"torchdelta{'' if rank is None else f'[rank {rank}]'} {command}".rstrip()


def fail(message: str, code: int = EXIT_USAGE) -> NoReturn:
    """End the command with a message of one line."""
    raise _CommandError(message, code)


def note(message: str) -> None:
    """Print on stderr what is no error, and no result either."""
    print_on_stderr(f"{prefix()}: {message}")


def print_result(text: str) -> None:
    """Print the result on stdout. If the reader closed the pipe (`| head`), typer exits quietly."""
    try:
        typer.echo(text)
    except OSError as error:
        if error.errno == errno.EPIPE:
            raise
        fail(f"cannot write to stdout: {error.strerror or error}", EXIT_FAILED)


def one_of(kind: str, word: str, known: Iterable[_Name]) -> _Name:
    """Return the name that is spelled so, or fail with the nearest one."""
    names = {str(name): name for name in known}
    if word not in names:
        fail(unknown_name(kind, word, names))
    return names[word]


def check_input(path: Path | None) -> None:
    """Refuse an input file that cannot be read, before any work is done; None is no file."""
    if path is None:
        return
    _refuse_if(not _exists(path), path, "read", "there is no such file")
    _refuse_if(path.is_dir(), path, "read", "it is a directory")
    _refuse_if(not os.access(path, os.R_OK), path, "read", "no permission to read it")


def check_output(
    path: Path | None, *, may_be_device: bool = False, others: Mapping[str, Path | None] | None = None
) -> None:
    """Refuse an output file that cannot be written, before any work is done; None is no file.

    Args:
        path: The file, which need not exist.
        may_be_device: Whether the text may go to a device or a pipe, such as /dev/stderr.
        others: The other files of the command, by what they are, such as "the input": it must be none of them.
    """
    if path is None:
        return
    for noun, other in (others or {}).items():
        _refuse_if(other is not None and _is_same(path, other), path, "write", f"it is {noun}, too: use another name")
    exists, parent = _exists(path), path.parent
    _refuse_if(path.is_dir(), path, "write", "it is a directory")
    if exists and not path.is_file():
        _refuse_if(not may_be_device, path, "write", "it is not a regular file")
        return
    _refuse_if(not parent.is_dir(), path, "write", f"there is no directory {str(parent)!r}")
    _refuse_if(exists and not os.access(path, os.W_OK), path, "write", "no permission to write it")
    _refuse_if(not os.access(parent, os.W_OK), path, "write", f"no permission to write into {str(parent)!r}")


def _is_same(path: Path, other: Path) -> bool:
    if _exists(path) and _exists(other):
        return path.samefile(other)
    return path.resolve() == other.resolve()


def _exists(path: Path) -> bool:
    """Return whether there is such a file; one with a name that no file can have is refused."""
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except (OSError, ValueError) as error:
        fail(f"{str(path)!r} cannot be used: {getattr(error, 'strerror', None) or error}")
    return True


def _refuse_if(is_wrong: bool, path: Path, what: str, why: str) -> None:
    if is_wrong:
        fail(f"cannot {what} {str(path)!r}: {why}")
