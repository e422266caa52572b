"""The judge itself: it must see what it is there to see, else every other test of this folder proves nothing."""

from __future__ import annotations

import random
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch

from tests.same_bits.judge import Outcome, Scope, bits_of, differences, plain_outcome, run, tracked_bytes


def observe(value: Any) -> Outcome:
    """Make an outcome with one observation."""
    return Outcome(observed={"loss": bits_of(value)})


def test_equal_tensors_are_equal_whatever_their_layout() -> None:
    """Strides are no content: a transposed copy has the same bits."""
    matrix = torch.arange(6.0).reshape(2, 3)
    assert differences(observe(matrix), observe(matrix.t().contiguous().t())) == []


@pytest.mark.parametrize(
    ("plain", "ours"),
    [
        (torch.tensor([1.0]), torch.tensor([1.0]).nextafter(torch.tensor([2.0]))),
        (torch.tensor([0.0]), torch.tensor([-0.0])),
        (torch.tensor([1.0]), torch.tensor([1.0], dtype=torch.float64)),
        (torch.tensor([1.0]), torch.tensor([[1.0]])),
        (torch.tensor([1.0]), None),
        (torch.tensor([1 + 2j]), torch.tensor([1 + 2j]).conj()),
        (torch.eye(2).to_sparse(), torch.eye(2).mul(2).to_sparse()),
        (torch.tensor([True]), torch.tensor([False])),
    ],
    ids=["last-bit", "sign-of-zero", "dtype", "shape", "missing", "conjugate", "sparse", "bool"],
)
def test_every_difference_is_seen(plain: torch.Tensor, ours: torch.Tensor | None) -> None:
    """The smallest differences that a wrong replay could make are differences."""
    assert differences(observe(plain), observe(plain.clone())) == []
    assert len(differences(observe(plain), observe(ours))) == 1


def test_nan_equals_the_same_nan() -> None:
    """Models that diverge to NaN can still be compared."""
    assert differences(observe(torch.tensor([float("nan")])), observe(torch.tensor([float("nan")]))) == []


@pytest.mark.parametrize("draw", [lambda: torch.rand(1), random.random, lambda: np.random.rand(1)])  # noqa: NPY002
def test_a_consumed_random_number_is_seen(draw: Any) -> None:
    """A run that draws once more than plain differs in a generator's state."""

    def step(scope: Scope) -> dict[str, Any]:
        with scope() as drawn:
            if drawn:
                draw()
        return {}

    assert len(differences(run(step), run(step, lambda: nullcontext(enter_result=True)))) == 1


def test_other_errors_are_seen() -> None:
    """Another exception type, or none, is a difference; a subclass of plain's type is the same error to a user."""
    nothing, value = Outcome(), Outcome(raised=ValueError, message="ValueError: x")
    assert len(differences(value, nothing)) == len(differences(nothing, value)) == 1
    assert len(differences(value, Outcome(raised=KeyError, message="KeyError: x"))) == 1
    assert differences(value, Outcome(raised=UnicodeError, message="UnicodeError: x")) == []


def test_leaked_bytes_are_seen() -> None:
    """A tensor that stays alive counts once, however many views of it there are."""
    before_bytes = tracked_bytes()
    held = [torch.zeros(1000)]
    held.append(held[0][:10])
    assert tracked_bytes() - before_bytes == 4000
    assert differences(Outcome(tracked_bytes=0), Outcome(tracked_bytes=4000)) == ["4000 tracked bytes leaked"]
    held.clear()
    assert tracked_bytes() == before_bytes


def test_a_step_that_is_not_reproducible_is_refused() -> None:
    """A step that does not equal itself cannot be judged."""
    count = iter(range(10))
    with pytest.raises(AssertionError, match="does not equal itself"):
        plain_outcome(lambda _scope: {"loss": torch.tensor(next(count))})
