"""Writes files whole or not at all.

[Note: whole or not at all]
A file is written under a temporary name beside its place and renamed when all of it is out: under its own name it is
complete, and until then what was there before is still there. A link is followed, as `open` would, and the permissions
of a file that is replaced are kept.
"""

import os
import secrets
from contextlib import suppress
from pathlib import Path
from stat import S_IMODE
from typing import IO

__all__ = ["WholeFile", "write_whole"]


class WholeFile:
    """A file that is written. See [Note: whole or not at all].

    Args:
        path: Where it is to appear. It is a regular file, or there is none.

    Attributes:
        raw: What is written to.

    Raises:
        OSError: The file cannot be written.
        ValueError: The path has no last part, such as "/", or no file can have such a name.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._target = Path(os.path.realpath(path))
        self._temporary = self._target.with_name(f".{self._target.name}.{os.getpid()}.{secrets.token_hex(4)}.tmp")
        self.raw: IO[bytes] = self._temporary.open("xb")
        with suppress(OSError):  # there is none, or the file system keeps no permissions
            self._temporary.chmod(S_IMODE(self._target.stat().st_mode))

    def close(self) -> None:
        """Give the file its name.

        Raises:
            OSError: The file cannot be written. `abort` drops what was written.
        """
        self.raw.close()
        self._temporary.replace(self._target)

    def abort(self) -> None:
        """Drop what was written."""
        # Closing flushes, which on a full disk fails again: the first failure is the one to tell.
        with suppress(OSError):
            self.raw.close()
        with suppress(OSError):
            self._temporary.unlink(missing_ok=True)


def write_whole(path: str | os.PathLike[str], content: bytes) -> None:
    """Write a file whole or not at all.

    What is no regular file, such as a pipe, is written to in place; so is the file that stdout or stderr go to, at its
    end (/dev/stderr is a name of it).

    Raises:
        OSError: The file cannot be written; it names the path.
    """
    try:
        place = Path(path)
        if place.exists() and (not place.is_file() or _is_standard_stream(place)):
            with place.open("ab") as opened:
                opened.write(content)
            return
        file = WholeFile(place)
        try:
            file.raw.write(content)
            file.close()
        except BaseException:
            file.abort()
            raise
    except OSError as error:  # of a write it has no path, and of the temporary file another one
        raise OSError(error.errno, error.strerror or str(error), os.fspath(path)) from error


def _is_standard_stream(place: Path) -> bool:
    """Return whether stdout or stderr of this process go to a file."""
    for descriptor in (1, 2):
        with suppress(OSError):  # it is closed
            if os.path.samestat(place.stat(), os.fstat(descriptor)):
                return True
    return False
