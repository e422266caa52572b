"""A forward whose loss is dropped without a backward, in a training whose steps are recorded in part."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.runtime.parts import running_session
from tests.runtime.record.partly import MARGIN, NUM_LAYERS, ROWS, WIDTH, Stack, following, num_native_steps
from tests.same_bits.judge import bits_of, seed_everything
from torchdelta import Config, MemoryBudget
from torchdelta.errors import NativeError
from torchdelta.native.gate import load_gate

if TYPE_CHECKING:
    from collections.abc import Iterator

NUM_STEPS, SKIPS_FROM = 40, 10


@pytest.fixture(autouse=True)
def _one_thread_and_the_gate() -> Iterator[None]:
    if isinstance(error := load_gate(), NativeError):
        pytest.skip(str(error))
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


def _train(
    num_steps: int, skips_every: int, skips_from: int = SKIPS_FROM, *, is_inside: bool, saves_first: bool = False
) -> tuple[list[Any], list[int]]:
    """Return the bits of all losses and parameters, and the native steps so far after each step.

    If `saves_first`, the first op of a forward saves a tensor before it runs, and only a part of the skipped one runs.
    """
    seed_everything()
    stack, seen, num_native = Stack(), list[Any](), list[int]()
    optimizer = torch.optim.SGD(stack.parameters(), lr=0.01, momentum=0.9)
    inputs, scale = torch.randn(ROWS, WIDTH), torch.nn.Parameter(torch.ones(WIDTH))
    for index in range(num_steps):
        for is_skipped in [True, False] if index >= skips_from and index % skips_every == 0 else [False]:
            x = inputs * scale if saves_first else torch.randn(ROWS, WIDTH)
            for layer in range(NUM_LAYERS // 2 if saves_first and is_skipped else NUM_LAYERS):
                x = stack.block(layer, x)
            loss = x if saves_first and is_skipped else x.square().mean()
            del x
            if is_skipped:
                del loss
            else:
                loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append(bits_of(loss))
        if is_inside:
            num_native.append(num_native_steps())
    return [*seen, bits_of(stack.state_dict())], num_native


@pytest.mark.parametrize("skips_every", [1, 3])
def test_a_skipped_loss_does_not_end_recording_in_part(skips_every: int) -> None:
    """As in "if not loss.isfinite(): continue". The steps after it follow their plan, on the native tape."""
    plain, _ = _train(NUM_STEPS, skips_every, is_inside=False)
    with MemoryBudget("1TiB", Config(tier="memory")) as unlimited:
        _train(2, skips_every, is_inside=False)
    with following(int(unlimited.summary().peak_bytes * MARGIN)):
        found, num_native = _train(NUM_STEPS, skips_every, is_inside=True)
        session = running_session()
        program = session.programs.latest
        assert program is not None
        assert (program.num_others, program.num_handovers) == (0, 0)
        assert session.follower.num_followed_steps >= NUM_STEPS - 4
    assert [index for index in range(len(plain)) if plain[index] != found[index]] == []
    assert num_native[SKIPS_FROM - 1] > 0, "the test says nothing: no step was on the native tape"
    assert num_native[-1] - num_native[SKIPS_FROM - 1] >= NUM_STEPS - SKIPS_FROM - 2


@pytest.mark.parametrize("skips_from", [0, SKIPS_FROM])
def test_the_step_after_a_skipped_loss_begins_with_an_op_that_saves(skips_from: int) -> None:
    """It saves its input before it runs, and skipped forwards are there while outlines are learned."""
    plain, _ = _train(NUM_STEPS, 3, skips_from, is_inside=False, saves_first=True)
    with MemoryBudget("1TiB", Config(tier="memory")) as unlimited:
        _train(2, 3, skips_from, is_inside=False, saves_first=True)
    with following(int(unlimited.summary().peak_bytes * MARGIN)):
        found, num_native = _train(NUM_STEPS, 3, skips_from, is_inside=True, saves_first=True)
        program = running_session().programs.latest
        assert program is not None
        assert (program.num_others, program.num_handovers) == (0, 0)
    assert [index for index in range(len(plain)) if plain[index] != found[index]] == []
    assert num_native[-1] - num_native[NUM_STEPS // 2] >= NUM_STEPS // 2 - 2


def test_a_graph_without_saved_tensors_outlives_a_dropped_loss() -> None:
    """Its backward is not that of the step, although no op has run since the loss was dropped."""

    def train(num_steps: int) -> list[Any]:
        seed_everything()
        stack, seen = Stack(), list[Any]()
        optimizer = torch.optim.SGD(stack.parameters(), lr=0.01)
        for index in range(num_steps):
            penalty = sum(parameter.sum() for parameter in stack.parameters())
            x = torch.randn(ROWS, WIDTH)
            for layer in range(NUM_LAYERS):
                x = stack.block(layer, x)
            loss = x.square().mean()
            del x
            if index >= SKIPS_FROM and index % 2:
                del loss
                assert isinstance(penalty, torch.Tensor)
                penalty.backward()
            else:
                loss.backward()
            optimizer.step()
            seen.append(bits_of([parameter.grad for parameter in stack.parameters()]))
            optimizer.zero_grad()
        return seen

    plain = train(2 * SKIPS_FROM)
    with MemoryBudget("1TiB", Config(tier="memory")) as unlimited:
        train(2)
    with following(int(unlimited.summary().peak_bytes * MARGIN)):
        found = train(2 * SKIPS_FROM)
        assert running_session().partial.num_steps > 0
    assert [index for index in range(len(plain)) if plain[index] != found[index]] == []
