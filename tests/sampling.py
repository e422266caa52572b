"""Chooses the parameters that `make test` runs; the others carry the marker `rest` and belong to `make test-rest`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable


def sample(values: Iterable[Any], num_kept: int) -> list[Any]:
    """Return all values as parameters; all but `num_kept` of them, evenly spread, are marked `rest`."""
    listed = list(values)
    return keep(listed, [listed[len(listed) * index // num_kept] for index in range(num_kept)])


def keep(values: Iterable[Any], kept: Collection[Any]) -> list[Any]:
    """Return all values as parameters; those that are not among `kept` are marked `rest`."""
    listed = list(values)
    assert all(value in listed for value in kept)  # a sample that is renamed away would run nothing
    return [value if value in kept else pytest.param(*_as_arguments(value), marks=pytest.mark.rest) for value in listed]


def _as_arguments(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)
