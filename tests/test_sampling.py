"""`make test`, `make test-rest` and `make test-whole` together run every test, each in one of them."""

import pytest

from tests.sampling import keep, sample


def kept(parameters):
    """Return the values that are not marked `rest`."""
    return [each for each in parameters if not hasattr(each, "marks")]


def left(parameters, mark="rest"):
    """Return the values that are marked `rest`, or with another mark."""
    return [each.values for each in parameters if hasattr(each, "marks") and each.marks[0].name == mark]


def test_a_sample_is_the_same_every_time_and_loses_nothing():
    """Evenly spread, the first included, and what is not kept is marked."""
    assert kept(sample(range(10), 2)) == [0, 5]
    assert kept(sample("abc", 1)) == ["a"]
    assert sample([], 2) == []
    assert kept(sample("abc", 3)) == ["a", "b", "c"]
    assert left(sample(range(4), 2)) == [(1,), (3,)]


def test_kept_values_are_named():
    """Values of several arguments stay together; a value that is not there is an error."""
    values = [("a", 1), ("b", 2)]
    assert kept(keep(values, [("b", 2)])) == [("b", 2)]
    assert left(keep(values, [("b", 2)])) == [("a", 1)]
    with pytest.raises(AssertionError):
        keep(values, [("c", 3)])


def test_a_list_may_be_sampled_twice():
    """Some are kept, some of the others are marked `rest`, and what is then left is marked `whole`."""
    parameters = sample(range(10), 2, 4)
    assert kept(parameters) == [0, 5]
    assert left(parameters) == [(1,), (3,), (6,), (8,)]
    assert left(parameters, "whole") == [(2,), (4,), (7,), (9,)]
    parameters = keep("abc", ["c"], 1)
    assert (kept(parameters), left(parameters), left(parameters, "whole")) == (["c"], [("a",)], [("b",)])
    assert left(keep("abc", "abc", 2), "whole") == []
