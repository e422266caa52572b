"""`make test` and `make test-rest` together run every test, each in one of them."""

import pytest

from tests.sampling import keep, sample


def kept(parameters):
    """Return the values that are not marked `rest`."""
    return [each for each in parameters if not hasattr(each, "marks")]


def left(parameters):
    """Return the values that are marked `rest`."""
    return [each.values for each in parameters if hasattr(each, "marks") and each.marks[0].name == "rest"]


def test_a_sample_is_the_same_every_time_and_loses_nothing():
    """Evenly spread, the first included, and what is not kept is marked."""
    assert kept(sample(range(10), 2)) == [0, 5]
    assert kept(sample("abc", 1)) == ["a"]
    assert kept(sample("abc", 3)) == ["a", "b", "c"]
    assert left(sample(range(4), 2)) == [(1,), (3,)]


def test_kept_values_are_named():
    """Values of several arguments stay together; a value that is not there is an error."""
    values = [("a", 1), ("b", 2)]
    assert kept(keep(values, [("b", 2)])) == [("b", 2)]
    assert left(keep(values, [("b", 2)])) == [("a", 1)]
    with pytest.raises(AssertionError):
        keep(values, [("c", 3)])
