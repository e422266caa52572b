"""What recording pauses by: the place of a mode on the stack, transforms, and what a processor computes itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.torch_contract.names import Names
from torchdelta._torch.device import has_half_convolutions
from torchdelta._torch.doors import patch_inference_mode
from torchdelta._torch.modes import (
    insert_mode,
    keeping_mode_keys,
    mode_stack,
    pop_mode,
    position_of_mode,
    push_mode,
    remove_mode,
)
from torchdelta._torch.tensors import is_transforming

if TYPE_CHECKING:
    from collections.abc import Callable


def test_a_mode_returns_to_its_place() -> None:
    """Below a mode that was entered later."""
    lower, upper = TorchDispatchMode(), TorchDispatchMode()
    with lower, upper:
        assert position_of_mode(lower) == 0
        remove_mode(lower)
        assert position_of_mode(lower) == -1
        insert_mode(lower, 0)
        assert mode_stack() == [lower, upper]


@pytest.mark.parametrize("mode", [True, False])
def test_inference_mode_restores_the_keys_of_modes(*, mode: bool) -> None:
    """A mode that is put on in inference mode sees nothing after it. If torch no longer does this, so much the better.

    One that is taken off there leaves its key behind, and the next op fails.
    """
    names = Names()
    with torch.inference_mode(mode):
        push_mode(names)
        torch.zeros(2)
    torch.ones(2)
    pop_mode()
    assert names.seen == ["aten.zeros.default"]
    with Names():
        with torch.inference_mode(mode):
            lower = pop_mode()
        with pytest.raises(RuntimeError, match="Hit Python dispatch key"):
            torch.zeros(2)
        push_mode(lower)


@pytest.mark.parametrize("mode", [True, False])
def test_the_keys_of_modes_stay_as_they_are(*, mode: bool) -> None:
    """The replaced exit is that of `with` and of the decorator, and the original is back afterwards."""
    names = Names()
    original = torch.inference_mode.__exit__

    def keeping(exit_: Callable[..., Any]) -> Callable[..., Any]:
        def leave(*args: Any) -> None:
            with keeping_mode_keys():
                exit_(*args)

        return leave

    undo = patch_inference_mode(keeping)
    with torch.inference_mode(mode):
        push_mode(names)
    torch.ones(2)
    torch.inference_mode(mode)(pop_mode)()
    torch.zeros(2)
    assert names.seen == ["aten.ones.default"]
    undo()
    assert torch.inference_mode.__exit__ is original
    assert not torch.is_inference_mode_enabled()


def test_a_transform_is_seen() -> None:
    """Inside of it only."""
    seen: list[bool] = []
    torch.vmap(lambda x: (seen.append(is_transforming()), x)[1])(torch.zeros(2))
    assert seen == [True]
    assert not is_transforming()


def test_half_precision_is_asked_of_the_processor() -> None:
    """The answer is a bool for both dtypes."""
    assert {type(has_half_convolutions(dtype)) for dtype in (torch.bfloat16, torch.float16)} == {bool}
