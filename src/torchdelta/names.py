"""Names that are chosen from a list, and what is said of one that is not in it."""

from collections.abc import Iterable
from difflib import get_close_matches

__all__ = ["nearest", "unknown_name"]

_MOST_SHOWN = 60  # characters of a name that is none


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Return the known name that a misspelled one most likely means; None if none is like it. Case does not matter."""
    by_lower = {one.lower(): one for one in known}
    found = get_close_matches(name.lower(), by_lower, n=1)
    return by_lower[found[0]] if found else None


def unknown_name(kind: str, name: object, known: Iterable[str], *, near: str | None = None) -> str:
    """Return the message about a name that is not known: the nearest one, and all of them.

    Args:
        kind: What it would be the name of, such as "planner".
        name: The unknown name, or what is given in place of one.
        known: All names.
        near: The nearest one, if the caller knows better than the spelling does.

    Example:
        >>> unknown_name("effort", "bst", ("fast", "best"))
        "unknown effort 'bst': did you mean best? Known are fast and best"
        >>> unknown_name("effort", "42", ("fast", "best"))
        "unknown effort '42': use fast or best"
    """
    words = tuple(known)
    if isinstance(name, str):
        shown = repr(name if len(name) <= _MOST_SHOWN else f"{name[:_MOST_SHOWN]}...")
        near = near or nearest(name, words)
    else:
        shown = repr(name)
    if near is None:
        return f"unknown {kind} {shown}: use {_listed(words, 'or')}"
    return f"unknown {kind} {shown}: did you mean {near}? Known are {_listed(words, 'and')}"


def _listed(words: tuple[str, ...], last: str) -> str:
    return f" {last} ".join([*([", ".join(words[:-1])] if words[1:] else []), words[-1]])
