"""The reserve covers what the allocator may have taken since it was last read, and readings stay rare."""

from __future__ import annotations

import random

import pytest

from torchdelta.runtime.device.reserve import Reserve
from torchdelta.runtime.state.usage import Usage

BUDGET = 1 << 30
LARGE, SMALL = 1 << 20, 2048  # rounding of large and small requests, at most


class Allocator:
    """A counter whose allocations take more than they ask for."""

    is_exact = is_cheap = False

    def __init__(self) -> None:
        self.bytes = 0
        self.num_readings = 0

    def start(self) -> None:
        """Do nothing."""

    def live_bytes(self) -> int:
        """Return the bytes taken."""
        self.num_readings += 1
        return self.bytes


def _usage() -> tuple[Usage, Allocator]:
    usage, allocator = Usage(), Allocator()
    usage.count_with(allocator)  # pyright: ignore[reportArgumentType]
    usage.ask_counter(fresh=True)
    return usage, allocator


def _request(usage: Usage, allocator: Allocator, reserve: Reserve, most: int, extra: int, budget: int = BUDGET) -> None:
    reserve.add(usage, most, budget)
    usage.live_bytes += 4096
    allocator.bytes += 4096 + extra


def test_the_reserve_covers_what_was_rounded_up() -> None:
    """Whatever the requests take within their bounds, at first."""
    usage, allocator = _usage()
    reserve = Reserve()
    rng = random.Random(0)
    for _ in range(60):
        assert usage.total_bytes + usage.uncertain_bytes >= allocator.bytes - SMALL
        _request(usage, allocator, reserve, SMALL, rng.randint(0, SMALL))
    reserve.add(usage, SMALL, BUDGET)
    assert usage.total_bytes + usage.uncertain_bytes >= allocator.bytes


@pytest.mark.parametrize("seed", range(20))
def test_readings_are_rare_and_the_reserve_holds_on(seed: int) -> None:
    """Of large requests, each of which might take 1 MiB more, and which take much less."""
    usage, allocator = _usage()
    reserve = Reserve()
    rng = random.Random(seed)
    for index in range(2000):
        _request(usage, allocator, reserve, LARGE, rng.choice((0, 512, 16384)))
        missing_bytes = allocator.bytes - usage.total_bytes - usage.uncertain_bytes
        if index > 200:
            assert missing_bytes <= 16384  # of the request that was just served
    before = allocator.num_readings
    for _ in range(640):
        _request(usage, allocator, reserve, LARGE, rng.choice((0, 512, 16384)))
    assert allocator.num_readings - before <= 12


def test_a_reserve_that_takes_much_of_the_budget_is_settled_by_a_reading() -> None:
    """A quarter of a percent at most, and one request."""
    usage, allocator = _usage()
    reserve = Reserve()
    budget = 10 << 20
    for _ in range(200):
        _request(usage, allocator, reserve, SMALL, 0, budget)
        assert usage.uncertain_bytes <= budget // 400 + SMALL


def test_readings_by_others_count() -> None:
    """A backward that begins reads the allocator: the reserve starts anew."""
    usage, allocator = _usage()
    reserve = Reserve()
    for _ in range(30):
        _request(usage, allocator, reserve, SMALL, 512)
    assert usage.uncertain_bytes > 0
    usage.ask_counter(fresh=True)
    assert usage.uncertain_bytes == 0
    reserve.add(usage, SMALL, BUDGET)
    assert usage.uncertain_bytes == 0


def test_a_survey_reserves_nothing_and_learns_nothing() -> None:
    """Its storages take no memory."""
    usage, allocator = _usage()
    reserve = Reserve()
    for _ in range(30):
        _request(usage, allocator, reserve, SMALL, SMALL)
    usage.is_counting = False
    before = allocator.num_readings
    for _ in range(200):
        reserve.add(usage, SMALL, BUDGET)
        assert usage.uncertain_bytes == 0
    assert allocator.num_readings == before
