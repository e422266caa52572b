"""The order of uses: what is used next, and how far away it is."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from torchdelta.runtime.memory.use_order import UseOrder


def after(*steps: list[int], now: list[int] | None = None) -> UseOrder:
    """Return the order after whole steps, and a part of the next."""
    order = UseOrder()
    for step in steps:
        for key in step:
            order.use(key)
        order.end_step()
    for key in now or []:
        order.use(key)
    return order


def test_the_next_uses_are_those_of_the_last_step() -> None:
    """After its end, they are those of the next step."""
    order = after([1, 2, 3, 2, 4], now=[1, 2])
    assert list(order.upcoming(3)) == [3, 2, 4]
    assert list(order.upcoming(99)) == [3, 2, 4, 1, 2]  # one step, at most
    assert [order.next_use(key)[0] for key in (3, 2, 4, 1)] == [0, 1, 2, 3]
    assert [key for key in (1, 2, 3, 4) if order.is_used_again(key)] == [2, 3, 4]


def test_in_the_first_step_nothing_is_known() -> None:
    """Then the tensor that was used last counts as the nearest."""
    order = after(now=[1, 2, 3])
    assert list(order.upcoming(3)) == []
    assert order.next_use(3) < order.next_use(2) < order.next_use(1)
    assert not order.is_used_again(1)


def test_the_position_follows_a_step_that_differs() -> None:
    """A tensor that the last step did not use, and one that is left out, move the position as well as may be."""
    order = after([1, 2, 3, 4, 5], now=[1, 9, 3])
    assert list(order.upcoming(2)) == [4, 5]


@given(st.lists(st.integers(0, 6), min_size=1), st.lists(st.integers(0, 8), max_size=20))
def test_distances_agree_with_the_sequence(step: list[int], now: list[int]) -> None:
    """Whatever the uses, the first upcoming use of a key lies at its distance."""
    order = after(step, now=now)
    upcoming = list(order.upcoming(len(step) + 1))
    assert len(upcoming) == order.length
    for key in set(step):
        assert upcoming.index(key) == order.next_use(key)[0]
