"""Steps on the native tape in which something runs in inference mode, whose tensors have no versions."""

from __future__ import annotations

import pytest
import torch

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
