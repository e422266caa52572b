"""The validator agrees with a comparison of every pair."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.pool.instances import instance_of, is_free_of_overlap, random_lives
from torchdelta.errors import PoolError
from torchdelta.pool.model import make_instance
from torchdelta.pool.validate import check, find_fault


@given(lives=random_lives(8), data=st.data())
def test_it_finds_every_overlap_and_no_other(lives, data):
    """Random offsets, most of them wrong."""
    instance = instance_of(lives)
    offsets = np.array([data.draw(st.integers(0, 60)) for _ in lives], np.int64)
    assert (find_fault(instance, offsets) is None) == is_free_of_overlap(instance, offsets)


def test_alignment_capacity_and_sign_are_checked():
    """Each is named with its number."""
    instance = instance_of([(0, 2, 8), (0, 2, 8)], alignment_bytes=8)
    assert find_fault(instance, np.array([0, 8])) is None
    assert "no multiple of the alignment of 8 bytes" in (find_fault(instance, np.array([0, 12])) or "")
    assert "addresses begin at 0" in (find_fault(instance, np.array([-8, 8])) or "")
    bounded = make_instance(ids=["a"], starts=[0], ends=[1], sizes_bytes=[8], capacity_bytes=8)
    assert "above the capacity of 8 bytes" in (find_fault(bounded, np.array([1])) or "")
    with pytest.raises(PoolError, match="share addresses at moment 0"):
        check(instance, np.array([0, 0]))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"ids": ["a", "a"]}, "'a' occurs twice"),
        ({"ends": [1, 0], "starts": [0, 1]}, "'b' ends at 0 before it starts at 1"),
        ({"sizes_bytes": [4, -1]}, "'b' has a size of -1 bytes"),
        ({"alignment_bytes": 0}, "alignment of 0 bytes"),
        ({"capacity_bytes": 3}, "'a' needs 4 B, more than the capacity of 3 B"),
        ({"sizes_bytes": [1 << 61, 1 << 61]}, "at most 2\\*\\*62"),
        ({"sizes_bytes": [1 << 70, 1]}, "64 bits"),
        ({"starts": [0]}, "2 ids, 1 starts"),
        ({"alignment_bytes": 10**26}, "alignment of 1e\\+26 bytes is too large"),
        ({"alignment_bytes": 10**400}, "alignment of 1e\\+400 bytes is too large"),
        ({"ids": ["x" * 5000, "b"], "ends": [-1, 1]}, "^'x{20,40}\\.\\.\\.x{20,40}' ends at -1 before it starts at 0$"),
    ],
)
def test_lives_that_make_no_sense_are_refused(changes, words):
    """One line, with the id and the number."""
    good = {"ids": ["a", "b"], "starts": [0, 0], "ends": [1, 1], "sizes_bytes": [4, 4]}
    with pytest.raises(PoolError, match=words):
        make_instance(**(good | changes))
