"""What a BudgetError says: to a person, and to the tools that shrink a batch when memory runs out."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from torchdelta import BudgetError
from torchdelta.runtime.memory.out_of_memory import is_out_of_memory
from torchdelta.units import parse_size

accelerate_memory = pytest.importorskip("accelerate.utils.memory")
GIB = 2**30


def error(**others: Any) -> BudgetError:
    """Make an error as an impossible step makes it."""
    numbers: dict[str, Any] = {"budget_bytes": 2 * GIB, "least_budget_bytes": 3 * GIB, "op": "aten.mm.default"}
    return BudgetError(**{**numbers, "largest": [("head.weight (parameter)", GIB)], **others})


def test_first_line_says_what_happened_and_what_is_enough() -> None:
    """Budget, need to the byte, and what to do; all else comes below it, indented."""
    first, *others = str(error(module="head", groups={"parameters": 3 * GIB})).splitlines()
    assert first == (
        "the memory budget of 2.00 GiB is out of memory. This run needs 3.00 GiB (3221225472 bytes): "
        "set the budget to that, or use a smaller batch"
    )
    assert others[:3] == [
        "  the most memory is needed at aten.mm.default in module head",
        "  in use there: parameters 3.00 GiB",
        "  largest tensors there: head.weight (parameter) 1.00 GiB",
    ]
    assert all(line.startswith("  ") for line in others)


def test_sizes_that_look_alike_are_told_apart() -> None:
    """A budget that is too small by a few bytes is not said to be as large as the need."""
    assert "of 3.00 GiB (3221225470 bytes) is out of memory" in str(error(budget_bytes=3 * GIB - 2))


@pytest.mark.parametrize("least_bytes", [19_017_415, 19_014_000, 1_733_900_000, 1_072_693_300, 2**30, 1023])
def test_the_size_that_it_names_is_enough(least_bytes: int) -> None:
    """Whoever types the rounded size as a budget is not refused again by the bytes that were rounded off."""
    text = str(error(least_budget_bytes=least_bytes)).partition("This run needs ")[2]
    assert 0 <= parse_size(text.partition(" (")[0]) - least_bytes <= least_bytes / 100


def test_a_lower_bound_is_said_to_be_one() -> None:
    """The step was not followed to its end, so that it may need more."""
    text = str(error(is_lower_bound=True, least_freeing_gradients_bytes=GIB))
    assert "This run needs at least 3.00 GiB (3221225472 bytes): set the budget to that or more" in text
    assert "the rest of the step was not seen, and may need much more" in text
    assert "was not seen" not in str(error())
    assert "if all gradients are set to None before each forward, it needs at least 1.00 GiB (1073741824 bytes)" in text


@pytest.mark.parametrize("device_type", ["cpu", "cuda", "xpu"])
def test_accelerate_recognises_it(device_type: str) -> None:
    """`find_executable_batch_size`, and with it the Trainer's `auto_find_batch_size`, shrink the batch."""
    assert accelerate_memory.should_reduce_batch_size(error(device_type=device_type))


@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
def test_lightning_recognises_it(device_type: str) -> None:
    """Its batch-size finder knows torch's own words only."""
    memory = pytest.importorskip("lightning.pytorch.utilities.memory", exc_type=ImportError)
    assert memory.is_oom_error(error(device_type=device_type))
    assert not memory.is_oom_error(error(device_type="xpu"))


def test_it_is_torchs_out_of_memory_error_with_one_argument() -> None:
    """`except torch.OutOfMemoryError` and `except RuntimeError` catch it; our own retry does not take it for one."""
    made = error()
    assert isinstance(made, torch.OutOfMemoryError)
    assert len(made.args) == 1
    assert not is_out_of_memory(made)
