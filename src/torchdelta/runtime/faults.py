"""Switches that break one safety on purpose, for negative controls: a test that cannot fail proves nothing."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Generator

NAMES: Final = (
    "rng-replay",
    "batch-norm-stats",
    "tier-failure",
    "tier-full",
    "tier-retry",
    "fork",
    "oom-retry",
    "release",
    "interrupts",
    "garbage",
)
_disabled: set[str] = set()


def is_disabled(name: str) -> bool:
    """Say whether a test has switched this safety off."""
    return name in _disabled


@contextlib.contextmanager
def disabled(name: str) -> Generator[None]:
    """Switch one safety off for a while. Results are wrong inside; only tests want that.

    Raises:
        ValueError: No safety has this name.
    """
    if name not in NAMES:
        msg = f"no safety is called {name!r}; there are {', '.join(NAMES)}"
        raise ValueError(msg)
    _disabled.add(name)
    try:
        yield
    finally:
        _disabled.discard(name)
