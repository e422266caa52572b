"""What recording pauses by: the place of a mode on the stack, transforms, and what a processor computes itself."""

from __future__ import annotations

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from torchdelta._torch.device import has_half_convolutions
from torchdelta._torch.modes import insert_mode, mode_stack, position_of_mode, remove_mode
from torchdelta._torch.tensors import is_transforming


def test_a_mode_returns_to_its_place() -> None:
    """Below a mode that was entered later."""
    lower, upper = TorchDispatchMode(), TorchDispatchMode()
    with lower, upper:
        assert position_of_mode(lower) == 0
        remove_mode(lower)
        assert position_of_mode(lower) == -1
        insert_mode(lower, 0)
        assert mode_stack() == [lower, upper]


def test_a_transform_is_seen() -> None:
    """Inside of it only."""
    seen: list[bool] = []
    torch.vmap(lambda x: (seen.append(is_transforming()), x)[1])(torch.zeros(2))
    assert seen == [True]
    assert not is_transforming()


def test_half_precision_is_asked_of_the_processor() -> None:
    """The answer is a bool for both dtypes."""
    assert {type(has_half_convolutions(dtype)) for dtype in (torch.bfloat16, torch.float16)} == {bool}
