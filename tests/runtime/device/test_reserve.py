"""The reserve covers what the allocator may have taken since it was last read, and readings stay rare."""

from __future__ import annotations

import random

import pytest

from torchdelta.runtime.device.reserve import Reserve
from torchdelta.runtime.state.usage import Usage

BUDGET = 1 << 30
SIZE = 4096
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


def _request(usage: Usage, allocator: Allocator, reserve: Reserve, most: int, extra: int, budget: int = BUDGET) -> int:
    """Serve one request. Return by how many bytes the allocator has more than the count and its reserve."""
    reserve.add(usage, most, budget)
    usage.live_bytes += SIZE
    allocator.bytes += SIZE + extra
    return allocator.bytes - usage.most_bytes


def test_the_reserve_covers_what_was_rounded_up() -> None:
    """Whatever the requests take within their bounds, at first."""
    usage, allocator = _usage()
    reserve = Reserve()
    rng = random.Random(0)
    for _ in range(60):
        assert _request(usage, allocator, reserve, SMALL, rng.randint(0, SMALL)) <= 0


@pytest.mark.parametrize("seed", range(20))
def test_readings_are_rare_and_the_reserve_holds_on(seed: int) -> None:
    """Of large requests, each of which might take 1 MiB more, and which take much less; memory is freed, too."""
    usage, allocator = _usage()
    reserve = Reserve()
    rng = random.Random(seed)
    extras: list[int] = []
    for index in range(4000):
        if index == 2000:
            before = allocator.num_readings
        if index % 300 < 150 or not extras:  # a forward, in which memory is taken, and a backward
            extras.append(rng.choice((0, 512, 16384)))
            assert _request(usage, allocator, reserve, LARGE, extras[-1]) <= 0
        else:
            usage.live_bytes -= SIZE
            allocator.bytes -= SIZE + extras.pop(rng.randrange(len(extras)))
            if rng.random() < 0.5:
                extras.append(rng.choice((0, 512, 16384)))
                assert _request(usage, allocator, reserve, LARGE, extras[-1]) <= 0
    assert allocator.num_readings - before <= 75


def test_what_rounding_does_not_explain_is_reserved_from_then_on() -> None:
    """Ops with many outputs take more than one request may."""
    usage, allocator = _usage()
    reserve = Reserve()
    for index in range(2000):
        missing_bytes = _request(usage, allocator, reserve, SMALL, 4 * SMALL)
        if index > 80:
            assert missing_bytes <= 0


def test_a_reserve_that_takes_much_of_the_budget_is_settled_by_a_reading() -> None:
    """A quarter of a percent at most, and one request."""
    usage, allocator = _usage()
    reserve = Reserve()
    budget = 10 << 20
    for _ in range(200):
        _request(usage, allocator, reserve, SMALL, 0, budget)
        assert usage.uncertain_bytes <= budget // 400 + 2 * SMALL


def test_readings_by_others_count() -> None:
    """A backward that begins reads the allocator: only the latest request may be missing."""
    usage, allocator = _usage()
    reserve = Reserve()
    for _ in range(30):
        _request(usage, allocator, reserve, SMALL, 512)
    assert usage.uncertain_bytes == 30 * SMALL
    usage.ask_counter(fresh=True)
    assert usage.uncertain_bytes == SMALL
    reserve.add(usage, SMALL, BUDGET)
    assert usage.uncertain_bytes <= 2 * SMALL


def test_a_request_in_progress_is_not_forgotten_by_a_reading() -> None:
    """Room is made between the request and its allocation, and the allocator is read meanwhile."""
    usage, allocator = _usage()
    reserve = Reserve()
    for _ in range(200):
        reserve.add(usage, SMALL, BUDGET)
        usage.ask_counter(fresh=True)
        usage.live_bytes += SIZE
        allocator.bytes += SIZE + SMALL
        assert allocator.bytes <= usage.most_bytes


def test_a_survey_reserves_its_request_and_learns_nothing() -> None:
    """Its storages take no memory."""
    usage, allocator = _usage()
    reserve = Reserve()
    for _ in range(30):
        _request(usage, allocator, reserve, SMALL, SMALL)
    usage.is_counting = False
    before = allocator.num_readings
    for _ in range(200):
        reserve.add(usage, SMALL, BUDGET)
        assert usage.uncertain_bytes == SMALL
    assert allocator.num_readings == before
