"""One pair of processes for all tests of the folder, started anew after a test that broke it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from tests.distributed.pair import Pair

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(scope="session")
def _pairs() -> Iterator[Callable[[], Pair]]:
    pairs: list[Pair] = []

    def usable() -> Pair:
        if not pairs or not pairs[-1].is_usable:
            pairs.append(Pair())
        return pairs[-1]

    yield usable
    for pair in pairs:
        if pair.is_usable:
            pair.close()


@pytest.fixture
def pair(_pairs: Callable[[], Pair]) -> Pair:
    """Return two processes of one group."""
    return _pairs()
