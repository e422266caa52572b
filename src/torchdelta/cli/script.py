"""Runs a script or a module inside this process as `python SCRIPT` or `python -m MODULE` would.

The script sees no difference: it is `__main__`, sys.argv and sys.path[0] have the values that Python sets, its exit
code is kept, and tracebacks begin at its first frame.
"""

import builtins
import io
import os
import runpy
import sys
import traceback
import zipfile
from dataclasses import dataclass
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Final

from torchdelta.cli.stderr import print_on_stderr

__all__ = ["Outcome", "run_script", "show_error"]

# The exit code that a shell reports for a process ended by Ctrl-C.
EXIT_INTERRUPTED: Final = 130
_OWN_FILES: Final = (__file__, runpy.__file__, "<frozen runpy>", "<frozen importlib._bootstrap>")


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """How a script ended.

    Attributes:
        exit_code: The exit code for the process.
        error: The uncaught exception, its traceback cut to the script's own frames; None for a normal end and for
            sys.exit().
    """

    exit_code: int
    error: BaseException | None = None


def run_script(target: str, arguments: list[str], *, is_module: bool) -> Outcome:
    """Run a script to its end.

    Args:
        target: Path of a script (or of a directory or zip file with a `__main__.py`), or name of a module.
        arguments: The rest of its sys.argv.
        is_module: True for `-m`.
    """
    sys.argv[:] = [target, *arguments]
    has_main = not is_module and _has_main(target)
    if not sys.flags.safe_path:
        sys.path[0] = _import_directory(target, is_module=is_module)
    elif has_main:  # `python -P` imports from a directory or a zip file, too, that it runs
        sys.path.insert(0, target)
    try:
        if is_module or has_main:
            _run_module(target if is_module else "__main__", is_named=is_module)
        else:
            _run_file(target)
    except SystemExit as error:
        return Outcome(exit_code=_exit_code(error))
    except BaseException as error:  # noqa: BLE001 - everything the script can raise is reported, Ctrl-C included
        own = _script_frames(error.__traceback__)
        exit_code = EXIT_INTERRUPTED if isinstance(error, KeyboardInterrupt) else 1
        return Outcome(exit_code=exit_code, error=error.with_traceback(own))
    return Outcome(exit_code=0)


def _has_main(target: str) -> bool:
    """Return whether it is a directory or a zip file.

    A pipe, such as /dev/stdin, is not looked into: what is read of it would be lost.
    """
    path = Path(target)
    return path.is_dir() or (path.is_file() and zipfile.is_zipfile(path))


def _import_directory(target: str, *, is_module: bool) -> str:
    """Return what Python puts first into sys.path; for a script its directory, with links resolved."""
    if is_module:
        return str(Path.cwd())
    return target if _has_main(target) else str(Path(target).resolve().parent)


def _run_module(name: str, *, is_named: bool) -> None:
    """Execute a module as `__main__`, by the function with which `python` itself does so.

    runpy.run_module and runpy.run_path would remove the module at the end, although functions registered with atexit
    may still need it. If there is no such module, SystemExit says so.

    Args:
        name: Of the module; "__main__" for that of the first directory or zip file in sys.path.
        is_named: Whether sys.argv[0] becomes its file, as under `-m`.
    """
    sys.modules["__main__"] = ModuleType("__main__")
    runpy._run_module_as_main(name, alter_argv=is_named)  # noqa: SLF001  # pyright: ignore[reportAttributeAccessIssue]


def _run_file(path: str) -> None:
    """Execute a file as `__main__`.

    runpy.run_path would set a relative `__file__` (Python's is absolute), and would remove the module at the end.
    """
    absolute = os.path.abspath(path)  # noqa: PTH100 - links are kept, as Python keeps them
    module = ModuleType("__main__")
    module.__dict__.update(__file__=absolute, __cached__=None, __builtins__=builtins)
    module.__loader__ = SourceFileLoader("__main__", absolute)
    with io.open_code(absolute) as file:
        code = compile(file.read(), absolute, "exec", dont_inherit=True)
    sys.modules["__main__"] = module
    exec(code, module.__dict__)  # noqa: S102 - running the user's script is what the command is for


def show_error(error: BaseException) -> int | None:
    """Show an uncaught exception as Python would, by the script's own sys.excepthook if it set one.

    Return the exit code if that hook calls sys.exit(), else None.
    """
    try:
        sys.excepthook(type(error), error, error.__traceback__)
    except SystemExit as of_hook:
        return _exit_code(of_hook)
    except Exception as of_hook:  # noqa: BLE001 - as Python does: a broken hook must not hide the error
        for shown in (of_hook, error):
            print_on_stderr("".join(traceback.format_exception(shown)).removesuffix("\n"))
    return None


def _script_frames(frames: TracebackType | None) -> TracebackType | None:
    """Return the traceback from the script's first frame on; None if the script never ran."""
    while frames is not None and frames.tb_frame.f_code.co_filename in _OWN_FILES:
        frames = frames.tb_next
    return frames


def _exit_code(error: SystemExit) -> int:
    if error.code is None:
        return 0
    if isinstance(error.code, int):
        return error.code & 0xFF  # the operating system keeps the low byte
    print_on_stderr(str(error.code))
    return 1
