"""The slot allocator: extents never overlap, holes merge, room is reused, and a fitting request never fails."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from torchdelta.runtime.tiers.slots import Extent, SlotAllocator

BLOCK = 16


class AllocatorMachine(RuleBasedStateMachine):
    """Any order of growing, taking and giving back."""

    taken = Bundle("taken")

    def __init__(self) -> None:
        super().__init__()
        self.allocator = SlotAllocator(BLOCK)
        self.live: list[tuple[Extent, ...]] = []
        self.walls: set[int] = set()

    @rule(num_blocks=st.integers(1, 40), walled=st.booleans())
    def grow(self, num_blocks: int, *, walled: bool) -> None:
        """Add room."""
        if walled and self.allocator.size_bytes:
            self.walls.add(self.allocator.size_bytes)
        self.allocator.grow(num_blocks * BLOCK, walled=walled)

    @rule(target=taken, size_bytes=st.integers(0, 300), pieces=st.sampled_from([None, 1, 4 * BLOCK]))
    def take(self, size_bytes: int, pieces: int | None) -> tuple[Extent, ...] | None:
        """Take room; with pieces of any size this fails only where the room is short."""
        free_bytes = self.allocator.free_bytes
        extents = self.allocator.take(size_bytes, least_piece_bytes=pieces)
        need_bytes = -(-size_bytes // BLOCK) * BLOCK
        if pieces == 1:
            assert (extents is not None) == (need_bytes <= free_bytes)
        if extents is None:
            assert self.allocator.free_bytes == free_bytes
            return None
        assert sum(extent.size_bytes for extent in extents) == need_bytes
        assert pieces is not None or len(extents) <= 1
        self.live.append(extents)
        return extents

    @rule(extents=consumes(taken))
    def give_back(self, extents: tuple[Extent, ...] | None) -> None:
        """Free a slot."""
        if extents is not None:
            self.allocator.give_back(extents)
            self.live.remove(extents)

    @invariant()
    def extents_are_apart(self) -> None:
        """No two live extents share a byte, and none leaves the pool or crosses a wall."""
        spans = sorted(extent for extents in self.live for extent in extents)
        end = 0
        for offset, size_bytes in spans:
            assert offset >= end
            assert offset % BLOCK == 0
            end = offset + size_bytes
            assert not any(offset < wall < end for wall in self.walls)
        assert end <= self.allocator.size_bytes

    @invariant()
    def counts_are_exact(self) -> None:
        """Used bytes are those of the live extents, and the peak is at least that."""
        used_bytes = sum(extent.size_bytes for extents in self.live for extent in extents)
        assert self.allocator.used_bytes == used_bytes
        assert self.allocator.peak_used_bytes >= used_bytes

    def teardown(self) -> None:
        """Everything given back leaves one hole for each walled region."""
        for extents in self.live:
            self.allocator.give_back(extents)
        assert self.allocator.used_bytes == 0
        expected = len(self.walls) + 1 if self.allocator.size_bytes else 0
        assert self.allocator.num_holes == expected


TestAllocatorMachine = AllocatorMachine.TestCase
TestAllocatorMachine.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


def test_best_fit_takes_the_smallest_hole_that_suffices() -> None:
    """A hole of the very size is taken, not a part of a larger one."""
    allocator = SlotAllocator(BLOCK)
    allocator.grow(100 * BLOCK)
    large, wall, small = (allocator.take(n * BLOCK) for n in (10, 1, 4))
    allocator.take(85 * BLOCK)
    assert large is not None
    assert wall is not None
    assert small is not None
    allocator.give_back(large)
    allocator.give_back(small)
    assert allocator.take(4 * BLOCK) == small


def test_scattering_uses_the_fewest_pieces() -> None:
    """The largest holes go first."""
    allocator = SlotAllocator(BLOCK)
    allocator.grow(16 * BLOCK)
    slots = [allocator.take(n * BLOCK) for n in (1, 1, 4, 1, 2, 1, 6)]
    for index in (0, 2, 4, 6):
        slot = slots[index]
        assert slot is not None
        allocator.give_back(slot)
    assert allocator.take(9 * BLOCK) is None
    assert allocator.take(9 * BLOCK, least_piece_bytes=1) == (
        Extent(10 * BLOCK, 6 * BLOCK),
        Extent(2 * BLOCK, 3 * BLOCK),
    )


@given(sizes=st.lists(st.integers(1, 2000), min_size=1, max_size=30), data=st.data())
@settings(max_examples=60, deadline=None)
def test_the_same_step_again_needs_no_more_room(sizes: list[int], data: st.DataObject) -> None:
    """A second step with the same requests and the same order of frees fits into the pool of the first."""
    order = data.draw(st.permutations(range(len(sizes))))
    allocator = SlotAllocator(BLOCK)
    for step in range(3):
        slots: list[tuple[Extent, ...]] = []
        for size_bytes in sizes:
            slot = allocator.take(size_bytes)
            if slot is None:
                assert step == 0
                allocator.grow(allocator.round_up(size_bytes))
                slot = allocator.take(size_bytes)
            assert slot is not None
            slots.append(slot)
        for index in order:
            allocator.give_back(slots[index])
        assert allocator.num_holes == 1


@pytest.mark.parametrize(("size_bytes", "rounded_bytes"), [(0, 0), (1, 16), (16, 16), (17, 32)])
def test_sizes_are_rounded_up_to_the_block(size_bytes: int, rounded_bytes: int) -> None:
    """Slots take whole blocks; an empty one takes nothing."""
    allocator = SlotAllocator(BLOCK)
    allocator.grow(64)
    assert allocator.take(size_bytes) is not None
    assert allocator.used_bytes == rounded_bytes
