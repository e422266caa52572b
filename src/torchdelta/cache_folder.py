"""The folder of the user's caches: built C++ modules, compiled planners, the measured machine."""

import atexit
import functools
import os
import shutil
import stat
import tempfile
from contextlib import suppress
from pathlib import Path

__all__ = ["temporary_folder", "user_cache_folder"]


def user_cache_folder() -> Path:
    """Return `$XDG_CACHE_HOME` if it is an absolute path, else `~/.cache`; it need not exist.

    Where no home directory is known or this user cannot write to it (a container may run under a user id without an
    account, whose home is then `/`), it is a folder of this user among the temporary files.
    """
    common = os.environ.get("XDG_CACHE_HOME", "")
    if Path(common).is_absolute():  # the specification: a relative path is invalid and to be ignored
        return Path(common)
    try:
        folder = Path.home() / ".cache"
    except RuntimeError:
        return temporary_folder()
    # An image may have a filled cache that its users can only read.
    return folder if _may_write(folder) or _has_entries(folder / "torchdelta") else temporary_folder()


def _has_entries(folder: Path) -> bool:
    try:
        return any(folder.iterdir())
    except OSError:
        return False


def _may_write(folder: Path) -> bool:
    """Return whether this user can create files in a folder, or can create the folder."""
    nearest = next(path for path in (folder, *folder.parents) if os.path.lexists(path))
    return os.access(nearest, os.W_OK | os.X_OK)


@functools.cache
def temporary_folder() -> Path:
    """Return a folder that only this user can write, because code is loaded from it.

    If somebody else has taken its name, it is a new one that is deleted at the end of this process.
    """
    folder = Path(tempfile.gettempdir()) / f"torchdelta-{os.geteuid()}"
    with suppress(OSError):
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
        if stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and stat.S_IMODE(found.st_mode) == 0o700:
            return folder
    new = Path(tempfile.mkdtemp(prefix="torchdelta-"))
    atexit.register(shutil.rmtree, new, ignore_errors=True)
    return new
