"""A part of the graph that dies in the middle of a forward, such as that of a metric: the step goes on as planned."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.runtime.parts import running_session
from tests.runtime.record.partly import WIDTH, following, num_native_steps
from tests.runtime.record.taped import Loop, one_thread_and_the_tape  # noqa: F401 - a fixture
from tests.same_bits.judge import bits_of

pytestmark = pytest.mark.usefixtures("one_thread_and_the_tape")

NUM_STEPS = 30


def train(loop: Loop, dropped_after: int) -> list[Any]:
    """Train with a metric that is computed first and dropped after a layer. Return what the metric was."""
    seen: list[Any] = []
    probe = torch.nn.Linear(WIDTH, WIDTH)
    for _ in range(NUM_STEPS):
        metrics = [probe(loop.read).exp()]
        seen.append(bits_of(metrics[0]))

        def between(layer: int, x: torch.Tensor, metrics: list[torch.Tensor] = metrics) -> torch.Tensor:
            if layer == dropped_after:
                metrics.clear()
            return x

        loss = loop.forward(between)
        loss.backward()
        loop.update(loss)
    return seen


@pytest.mark.parametrize("dropped_after", [0, 1, 3])
def test_the_step_is_followed_on_the_tape(dropped_after: int) -> None:
    """Python counts few of the saved tensors there: that none of these is left does not end the step."""
    plain = Loop()
    expected = train(plain, dropped_after)
    with following(1 << 30):
        session = running_session()
        session.pause.forbid()
        loop = Loop()
        assert train(loop, dropped_after) == expected
        assert session.follower.num_followed_steps > 0.8 * NUM_STEPS
        assert num_native_steps() > NUM_STEPS // 2
        assert session.ledger.num_handles == 0
    assert loop.seen == plain.seen


@pytest.mark.parametrize("saves_two_first", [False, True])
def test_a_forward_without_a_backward_is_given_up(*, saves_two_first: bool) -> None:
    """All of its graph dies, in whatever order: the next steps are followed again."""
    plain, loop = Loop(), Loop()

    def steps(running: Loop) -> None:
        if saves_two_first:  # the first node saves a tensor that Python counts, and then others
            running.read.requires_grad_()
        for index in range(NUM_STEPS):
            loss = running.forward()
            if index % 5 == 4:
                del loss
                continue
            loss.backward()
            running.update(loss)

    torch.manual_seed(1)
    steps(plain)
    torch.manual_seed(1)
    with following(1 << 30):
        session = running_session()
        session.pause.forbid()
        steps(loop)
        assert session.ledger.num_handles == 0
        assert session.follower.num_followed_steps > NUM_STEPS // 3
        assert session.follower.num_diverged_steps == 0
    assert loop.seen == plain.seen
