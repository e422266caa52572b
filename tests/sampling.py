"""Chooses the parameters that `make test` runs; the others are marked `rest` or `whole`.

`make test-rest` runs those that are marked `rest`. Where a list says the same of yet another class, operator or seed,
`num_rest` of it are enough there, and the others are marked `whole`: `make test-whole` runs them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable


def sample(values: Iterable[Any], num_kept: int, num_rest: int | None = None) -> list[Any]:
    """Return all values as parameters; all but `num_kept` of them, evenly spread, are marked.

    Args:
        values: The parameters.
        num_kept: How many of them have no mark.
        num_rest: How many of the others are marked `rest`; None for all. What is left is marked `whole`.
    """
    listed = list(values)
    return keep(listed, _spread(listed, num_kept), num_rest)


def keep(values: Iterable[Any], kept: Collection[Any], num_rest: int | None = None) -> list[Any]:
    """Return all values as parameters; those that are not among `kept` are marked, as `sample` does it."""
    listed = list(values)
    assert all(value in listed for value in kept)  # a sample that is renamed away would run nothing
    others = [value for value in listed if value not in kept]
    rest = others if num_rest is None else _spread(others, num_rest)
    marks = {True: pytest.mark.rest, False: pytest.mark.whole}
    return [
        value if value in kept else pytest.param(*_as_arguments(value), marks=marks[value in rest]) for value in listed
    ]


def _spread(listed: list[Any], number: int) -> list[Any]:
    return [listed[len(listed) * index // number] for index in range(number) if listed]


def _as_arguments(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)
