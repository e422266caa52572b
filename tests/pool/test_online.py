"""The pools of today: what they are known to do on requests small enough to follow by hand."""

import numpy as np
from hypothesis import given

from tests.pool.instances import instance_of, random_lives
from torchdelta.pool.bounds import max_load_bytes
from torchdelta.pool.online import place_like_cnmem, reserve_like_torch
from torchdelta.pool.validate import find_fault

MIB = 1 << 20


def footprint_of(lives):
    """Serve lives in order of time."""
    instance = instance_of(lives)
    return place_like_cnmem(instance.starts, instance.ends, instance.sizes_bytes)


def reserved_of(lives):
    """Reserve for lives in order of time."""
    instance = instance_of(lives)
    return reserve_like_torch(instance.starts, instance.ends, instance.sizes_bytes)


def test_a_free_block_is_taken_before_the_arena_grows():
    """The smallest that is large enough; what remains of it stays free."""
    footprint, offsets = footprint_of([(0, 9, 4), (0, 2, 6), (0, 9, 4), (0, 2, 5), (0, 9, 1), (3, 9, 5), (4, 9, 6)])
    assert footprint == 20
    assert offsets.tolist() == [0, 4, 10, 14, 19, 14, 4]


def test_free_neighbours_are_joined():
    """Two freed blocks side by side serve one request of their sum."""
    footprint, offsets = footprint_of([(0, 1, 4), (0, 2, 4), (0, 9, 1), (3, 9, 8)])
    assert footprint == 9
    assert offsets.tolist() == [0, 4, 8, 0]


@given(lives=random_lives(14, least_bytes=1))
def test_what_is_served_never_overlaps(lives):
    """Whatever is requested when."""
    instance = instance_of([life for life in lives if life[1] > life[0]])
    footprint, offsets = place_like_cnmem(instance.starts, instance.ends, instance.sizes_bytes)
    assert find_fault(instance, offsets) is None
    assert footprint >= max_load_bytes(instance)
    assert footprint == int((offsets + instance.sizes_bytes).max(initial=0))


def test_what_has_no_place_when_time_runs_out_is_put_on_top():
    """Of 3000 requests some find a place in time; none overlaps another."""
    lives = [(moment, moment + 2, 1 + moment % 7) for moment in range(3000)]
    instance = instance_of(lives)
    footprint, offsets = place_like_cnmem(instance.starts, instance.ends, instance.sizes_bytes, end_s=0.0)
    assert find_fault(instance, offsets) is None
    assert footprint == int((offsets + instance.sizes_bytes).max())
    assert footprint_of(lives)[0] < footprint < sum(size for _, _, size in lives)


def test_torch_rounds_and_takes_segments():
    """Small requests share 2 MiB, larger ones 20 MiB, the largest have segments of their own."""
    assert reserved_of([(0, 1, 1)]) == 2 * MIB
    assert reserved_of([(0, 1, 512)] * 4096) == 2 * MIB
    assert reserved_of([(0, 1, 513)] * 4096) == 4 * MIB
    assert reserved_of([(0, 1, 2 * MIB)] * 10) == 20 * MIB
    assert reserved_of([(0, 1, 2 * MIB)] * 11) == 40 * MIB
    assert reserved_of([(0, 1, 11 * MIB)]) == 12 * MIB


def test_torch_splits_large_blocks_only_where_it_is_worth_it():
    """A block of 12 MiB serves 11.5 MiB whole, and 10.5 MiB with 1.5 MiB left for another."""
    assert reserved_of([(0, 1, 12 * MIB), (1, 9, 23 * MIB // 2), (1, 9, MIB + 512)]) == 32 * MIB
    assert reserved_of([(0, 1, 12 * MIB), (1, 9, 21 * MIB // 2), (1, 9, MIB + 512)]) == 12 * MIB


@given(lives=random_lives(14, least_bytes=1))
def test_torch_reserves_at_least_what_lives(lives):
    """In 512 bytes a request."""
    instance = instance_of(lives)
    rounded = instance_of([(start, end, -(-size // 512) * 512) for start, end, size in lives])
    reserved = reserve_like_torch(instance.starts, instance.ends, instance.sizes_bytes)
    assert reserved >= max_load_bytes(rounded)
    assert reserved % (2 * MIB) == 0
    assert isinstance(np.int64(reserved).item(), int)


def test_nothing_is_reserved_for_no_bytes():
    """A tensor without elements has no memory in torch."""
    assert reserved_of([(0, 1, 0)]) == 0
