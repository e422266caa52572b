"""Writes on stderr what is said beside the work, and never fails: the work is done, and its exit code is kept.

stderr may be closed, its disk full or its reader gone; and a script may have put an object of its own in its place,
which can do less than a file.
"""

import sys
from typing import Any

__all__ = ["is_terminal", "print_on_stderr"]


def print_on_stderr(text: str) -> None:
    """Print a text on stderr. If the script's own object cannot take it, it goes to the stderr of the process."""
    if not _has_taken(sys.stderr, text):
        _has_taken(sys.__stderr__, text)


def is_terminal(stream: Any) -> bool:
    """Return whether a stream is a terminal; what cannot say so is none."""
    try:
        return bool(stream.isatty())
    except Exception:  # noqa: BLE001 - any object may be in its place
        return False


def _has_taken(stream: Any, text: str) -> bool:
    try:
        stream.write(f"{text}\n")
        if hasattr(stream, "flush"):
            stream.flush()
    except Exception:  # noqa: BLE001 - any object may be in its place, or none
        return False
    return True
