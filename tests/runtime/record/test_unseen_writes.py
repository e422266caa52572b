"""What code that is not recorded writes, as a compiled region does."""

from __future__ import annotations

import torch

from tests.runtime.programs import UNLIMITED, running


def test_a_replay_does_not_need_what_a_compiled_region_overwrote() -> None:
    """A replay reads a result that is alive; the region overwrites what that was made from; the result dies later."""

    def step(*, is_inside: bool) -> torch.Tensor:
        torch.manual_seed(0)
        weight = torch.randn(64, 64, requires_grad=True)
        state = torch.ones(64, 64)
        with running(UNLIMITED, decisions="recompute") if is_inside else torch.enable_grad() as scope:
            middle = state * 3
            y = weight * middle.sin()
            if is_inside:
                _, session = scope
                session.compiled.call(lambda _function, x: x.add_(1), (state,), (len, state), {})
            else:
                state.add_(1)
            del middle
            y.sum().backward()
        assert weight.grad is not None
        return weight.grad

    assert torch.equal(step(is_inside=False), step(is_inside=True))
