"""The iteration is found in what repeats."""

from hypothesis import given
from hypothesis import strategies as st

from torchdelta.trace.imports.iteration import MIN_REPEATS, Iteration, find_iteration, signatures


def test_signatures_do_not_depend_on_addresses():
    """An allocation is its size, anything else how long ago its block was touched."""
    events = [("alloc", 5, 64), ("write", 5, 0), ("alloc", 9, 32), ("read", 5, 0), ("free", 9, 0), ("read", "w", 0)]
    assert signatures(events) == [("alloc", 64), ("write", 1), ("alloc", 32), ("read", 2), ("free", 2), ("read", -1)]
    moved = [(kind, {5: 105, 9: 7}.get(id_, id_), size) for kind, id_, size in events]
    assert signatures(moved) == signatures(events)


@given(
    st.lists(st.integers(0, 5), min_size=3, max_size=30),
    st.integers(MIN_REPEATS, 6),
    st.lists(st.integers(10, 99), max_size=20, unique=True),
)
def test_a_repetition_is_found_wherever_it_begins(step, num_steps, before):
    """After whatever came first, the stretch is found whole; its length is the step's, or the step's own period."""
    step = [*step, 7]  # once in a step, so that the step is no repetition itself
    found = find_iteration([*before, *step * num_steps])
    assert found == Iteration(start=len(before), length=len(step), num_events=num_steps * len(step))


def test_layers_are_no_iteration():
    """Equal layers within a step repeat more often, but end with it."""
    step = ["in", *["norm", "up", "down"] * 12, "out", *["down'", "up'", "norm'"] * 12, "update"]
    found = find_iteration(step * 4)
    assert found is not None
    assert found.length == len(step)


def test_too_few_or_none():
    """Two repetitions are not confirmed, and a sequence that never repeats has none."""
    assert find_iteration([1, 2, 3, 4] * 2) is None
    assert find_iteration(list(range(100))) is None
    assert find_iteration([]) is None


def test_the_longest_undisturbed_stretch_is_taken():
    """An evaluation in between breaks the stretch: the longer side is taken."""
    step = list("abcdefg")
    found = find_iteration([*step * 3, "x", *step * 8, "y", *step * 4])
    assert found == Iteration(start=3 * 7 + 1, length=7, num_events=8 * 7)
