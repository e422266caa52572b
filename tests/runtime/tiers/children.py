"""What a forked child may do with a tier of its parent."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchdelta.errors import TierError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable


def not_refused(uses: Iterable[Callable[[], object]]) -> int:
    """Try each use. Return a number with a bit set for each one that no error about forked children refused."""
    verdict = 0
    for number, use in enumerate(uses):
        try:
            use()
        except TierError as error:
            if "forked child" in str(error):
                continue
        verdict |= 1 << number
    return verdict
