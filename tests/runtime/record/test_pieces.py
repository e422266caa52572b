"""Calls in pieces do what one call does, whatever the lists and the sizes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from torchdelta.runtime.record.pieces import call_in_pieces

TWICE = torch.ones(4)
SQUARE = torch.ones(3, 3)
SIZES = st.lists(st.integers(0, 40), min_size=1, max_size=12)


class Called:
    """Adds a list to another, and notes the bytes of each call."""

    def __init__(self) -> None:
        self.calls_bytes: list[int] = []
        self.lengths: list[int] = []

    def add(self, ours: list[torch.Tensor], theirs: list[torch.Tensor], *, scales: list[float]) -> list[torch.Tensor]:
        """Return new tensors; like SGD, put them into the second list as well."""
        self.calls_bytes.append(sum(tensor.nbytes for tensor in (*ours, *theirs)))
        self.lengths.append(len(ours))
        made = [a + scale * b for a, b, scale in zip(ours, theirs, scales, strict=True)]
        theirs[:] = made
        return made


@given(sizes=SIZES, most_bytes=st.integers(1, 400))
def test_pieces_do_what_one_call_does(sizes: list[int], most_bytes: int) -> None:
    """All results, in order, and what the call puts into its lists; no piece is too large, and none is needless."""
    ours = [torch.full((size,), 1.0) for size in sizes]
    theirs = [torch.full((size,), float(place)) for place, size in enumerate(sizes)]
    scales = [float(place) for place in range(len(sizes))]
    expected = [a + scale * b for a, b, scale in zip(ours, theirs, scales, strict=True)]
    called = Called()
    made = call_in_pieces(called.add, (ours, theirs), {"scales": scales}, most_bytes)
    assert len(made) == len(expected)
    assert all(torch.equal(a, b) for a, b in zip(made, expected, strict=True))
    assert all(a is b for a, b in zip(theirs, made, strict=True))
    assert sum(called.lengths) == len(sizes)
    for size_bytes, length in zip(called.calls_bytes, called.lengths, strict=True):
        assert size_bytes <= most_bytes or length == 1
    for before, after in zip(called.calls_bytes, called.calls_bytes[1:], strict=False):
        assert before + after > most_bytes


def test_nothing_is_returned_where_nothing_is() -> None:
    """As by ops that write their arguments."""
    seen: list[int] = []
    tensors = [torch.ones(4) for _ in range(3)]
    assert call_in_pieces(lambda ours: seen.append(len(ours)), (tensors,), None, 16) is None
    assert seen == [1, 1, 1]


@pytest.mark.parametrize(
    "args",
    [
        ([torch.ones(4)] * 3, torch.ones(3)),  # a number for each place, as of `_foreach_addcdiv_`
        ([torch.ones(4), torch.ones(4).to_sparse()],),
        ([torch.ones(4), torch.ones(4).half()],),  # Adafactor takes a default from the first
        ([torch.ones(4), TWICE, TWICE],),
        ([torch.ones(4), torch.ones(4), torch.ones(4)], [torch.ones(4), TWICE, TWICE]),
        ([TWICE[:3], torch.ones(3), TWICE[1:]],),
        ([torch.ones(3, 2).t(), SQUARE.t()[1:], SQUARE[2:].t()],),
        (torch.ones(4), [torch.ones(4)] * 3),
        ([],),
        (),
    ],
)
def test_what_cannot_be_cut_is_one_call(args: Any) -> None:
    """Numbers in a tensor, sparse tensors, and calls that do not begin with a list."""
    seen: list[Any] = []
    call_in_pieces(lambda *given: seen.append(given), args, None, 1)
    assert len(seen) == 1
    assert all(a is b for a, b in zip(seen[0], args, strict=True))


def test_parts_of_one_buffer_are_cut() -> None:
    """As the weights of an RNN on CUDA: the storage is one, the bytes are not."""
    seen: list[int] = []
    buffer = torch.ones(12)
    call_in_pieces(lambda a: seen.append(len(a)), ([buffer[:4], buffer[8:], buffer[4:8]],), None, 16)
    assert seen == [1, 1, 1]


def test_a_list_that_is_only_read_may_have_a_tensor_twice() -> None:
    """As of ops that subtract one flag from all steps."""
    seen: list[int] = []
    call_in_pieces(lambda a, _b: seen.append(len(a)), ([torch.ones(4), torch.ones(4)], [TWICE] * 2), None, 16)
    call_in_pieces(
        lambda a, _b: seen.append(len(a)), ([torch.ones(4), torch.ones(4)], [TWICE] * 2), None, 16, writes_first=True
    )
    assert seen == [2, 1, 1]


def test_lists_of_another_length_stay_whole() -> None:
    """An empty list of states, and lists of something else."""
    seen: list[tuple[int, int, int]] = []
    tensors = [torch.ones(4) for _ in range(2)]
    call_in_pieces(lambda a, b, c: seen.append((len(a), len(b), len(c))), (tensors, [], [1, 2, 3]), None, 16)
    assert seen == [(1, 0, 3), (1, 0, 3)]
