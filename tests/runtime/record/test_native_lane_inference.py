"""Steps on the native tape in which something runs in inference mode, whose tensors have no versions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.runtime.record.partly import CHANGES_AT
from tests.runtime.record.taped import Loop, one_thread_and_the_tape, same_bits  # noqa: F401 - a fixture

pytestmark = pytest.mark.usefixtures("one_thread_and_the_tape")


@pytest.mark.parametrize("where", ["in the forward", "between forward and backward"])
@pytest.mark.parametrize("writes", [False, True])
def test_a_metric_in_inference_mode(where: str, *, writes: bool) -> None:
    """Python takes the tape over there: what it makes are ordinary tensors."""

    def metric(x: torch.Tensor) -> None:
        with torch.inference_mode():
            x.detach().abs().max()
            if writes:
                torch.zeros_like(x).add_(x)

    def body(loop: Loop, index: int) -> None:
        is_late = index >= CHANGES_AT

        def between(layer: int, x: torch.Tensor) -> torch.Tensor:
            if is_late and layer == 2 and where == "in the forward":
                metric(x)
            return x

        loss = loop.forward(between)
        if is_late and where != "in the forward":
            metric(loss)
        loss.backward()
        loop.update(loss)

    assert same_bits(body)[CHANGES_AT - 1] > 0


@pytest.mark.parametrize("how", ["inference mode", "a program's mode"])
def test_ops_that_return_a_view_or_a_copy(how: str) -> None:
    """In every step, so that the sequence is learned with them: the copies of some are saved and replayed."""

    class Rounding(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            del types
            out = func(*args, **(kwargs or {}))
            return out.bfloat16().float() if func is torch.ops.aten.gelu.default else out

    def body(loop: Loop, _index: int) -> None:
        def between(layer: int, x: torch.Tensor) -> torch.Tensor:
            if how == "inference mode":
                with torch.inference_mode():
                    x.detach().double().t().contiguous()
                return x
            if layer == 2:
                with Rounding():
                    return torch.nn.functional.gelu(x)
            return x

        loss = loop.forward(between)
        loss.backward()
        loop.update(loss)

    counts = same_bits(body)
    assert how != "inference mode" or counts[-1] > 0
