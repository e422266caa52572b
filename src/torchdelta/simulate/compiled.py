"""The decorator `compiled`: machine code of the simulation and the planners, kept between processes.

numba keeps compiled code beside each source, and compiles again when that source has changed. What a function calls in
another file is inside its code, and a change there goes unnoticed: after an update a planner would go on with the
simulation of before, or crash where the arrays have changed. So the code is kept in a folder whose name is a digest of
all sources that call one another: `compiled/DIGEST` in torchdelta's cache directory, or in `$NUMBA_CACHE_DIR`. It need
not be beside the sources, which often cannot be written. Where no folder can be written each process compiles anew.
"""

import hashlib
import os
import shutil
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, cast

from numba import config, njit

from torchdelta.machine.cache import cache_directory

__all__ = ["SOURCES", "code_folder", "compiled", "compiled_part", "digest", "is_kept"]

_Function = TypeVar("_Function", bound=Callable[..., Any])

_SETTINGS: Any = config  # its attributes are set when numba reads the environment

_HERE = Path(__file__).parent

SOURCES = (_HERE, _HERE.parent / "planners")
"""The folders whose compiled functions call one another."""

_VERSIONS_KEPT = 4
"""The code of so many versions of the sources stays on the disk: several installations may take turns."""


def compiled(function: _Function) -> _Function:
    """Return a function that numba compiles at its first call, or that an earlier process has compiled."""
    return _compiled(function, no_cpython_wrapper=False)


def compiled_part(function: _Function) -> _Function:
    """Do the same for a function that compiled functions alone call.

    What takes its arguments out of Python's objects is left out: fifty arrays take the compiler half a second.
    """
    return _compiled(function, no_cpython_wrapper=True)


def _compiled(function: _Function, *, no_cpython_wrapper: bool) -> _Function:
    options: dict[str, Any] = {"no_cpython_wrapper": no_cpython_wrapper, "no_cfunc_wrapper": True}
    dispatcher = njit(**options)(function)
    folder = None if _SETTINGS.DISABLE_JIT else code_folder()
    if folder is not None:
        # numba reads the setting when it is told to keep code, and has no argument for it.
        before, _SETTINGS.CACHE_DIR = _SETTINGS.CACHE_DIR, str(folder)
        try:
            dispatcher.enable_caching()
        finally:
            _SETTINGS.CACHE_DIR = before
    return cast("_Function", dispatcher)


def is_kept(function: Any) -> bool:
    """Return whether a `compiled` function need not be compiled: it was before, or `NUMBA_DISABLE_JIT` is set."""
    if _SETTINGS.DISABLE_JIT:
        return True
    path: str | None = function.stats.cache_path
    name = f"{function.__module__.rpartition('.')[2]}.{function.__name__}-*.nbi"
    return path is not None and any(Path(path).glob(name))


def digest(folders: Iterable[Path] = SOURCES) -> str:
    """Return the digest of all sources in these folders, and below them."""
    found = hashlib.sha256()
    for folder in folders:
        for path in sorted(folder.rglob("*.py")):
            found.update(f"{path.relative_to(folder)} {path.stat().st_size} ".encode())
            found.update(path.read_bytes())
    return found.hexdigest()[:16]


@cache
def code_folder() -> Path | None:
    """Return the folder of this version's code, and make it; None where it cannot be written."""
    given = _SETTINGS.CACHE_DIR
    parent = (Path(given) if given else cache_directory()) / "compiled"
    folder = parent / digest()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        os.utime(folder)
        if not os.access(folder, os.W_OK):
            return None
        older = sorted((path for path in parent.iterdir() if path != folder), key=lambda path: -path.stat().st_mtime)
    except OSError:
        return None
    for path in older[_VERSIONS_KEPT - 1 :]:
        with suppress(OSError):
            shutil.rmtree(path)
    return folder
