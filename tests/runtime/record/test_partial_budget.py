"""Steps that are recorded in part hold the budget, and are refused as others are where it cannot be held."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING, Any, ClassVar
from unittest import mock

import msgspec
import pytest
import torch
from torch import nn

from tests.following import planned_here
from tests.runtime.parts import running_session
from torchdelta import BudgetError, Config, MemoryBudget
from torchdelta._torch.modes import num_modes
from torchdelta.errors import NativeError
from torchdelta.native.counting import counting_status
from torchdelta.native.gate import load_gate
from torchdelta.runtime.state.copies import TierCopy

if TYPE_CHECKING:
    from torchdelta.runtime.session import Session
    from torchdelta.runtime.state.steps import StepTracker

WIDTH, NUM_ROWS, NUM_STEPS = 64, 512, 14
NUM_MICRO_BATCHES = 3

CONFIG = Config(planner="torchdelta", tier="memory")


@pytest.fixture(autouse=True)
def _needs_native_parts() -> None:
    if not counting_status().is_on or isinstance(load_gate(), NativeError):
        pytest.skip("needs the native parts")


class Net(nn.Module):
    """Blocks with dropout and an op in place; one of them can be left out."""

    def __init__(self, depth: int = 6) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(depth))
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(depth))
        self.left_out = -1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the loss."""
        for index, (layer, norm) in enumerate(zip(self.layers, self.norms, strict=True)):
            if index != self.left_out:
                x = nn.functional.dropout(nn.functional.gelu(norm(layer(x))), 0.1).relu_() + x
        return x.square().mean()


def make() -> tuple[Net, torch.optim.Optimizer]:
    """Return a net and its optimizer, always the same."""
    torch.manual_seed(0)
    net = Net()
    return net, torch.optim.Adam(net.parameters(), lr=1e-3)


def step(net: Net, optimizer: torch.optim.Optimizer, num_rows: int = NUM_ROWS) -> str:
    """Train a step. Return its loss, exactly."""
    loss = net(torch.randn(num_rows, WIDTH))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item().hex()


def plain_peak_bytes(num_rows: int = NUM_ROWS) -> int:
    """Return the peak of recorded steps, the first one left out."""
    gc.collect()
    with MemoryBudget("1TiB", Config(planner=None)) as budget:
        net, optimizer = make()
        for _ in range(3):
            step(net, optimizer, num_rows)
    return max(one.peak_bytes for one in budget.summary().steps[1:])


def plain_losses(sizes: list[int]) -> list[str]:
    """Train a new net without a budget. Return the losses."""
    net, optimizer = make()
    return [step(net, optimizer, size) for size in sizes]


def until_partial(session: Session, net: Net, optimizer: torch.optim.Optimizer) -> list[str]:
    """Train until steps are recorded in part and pause before the optimizer. Return the losses."""
    losses = [step(net, optimizer) for _ in range(NUM_STEPS)]
    assert session.partial.num_steps >= 6
    assert session.partial.is_on
    return losses


@pytest.mark.parametrize("share", [0.8, 0.7, 0.6])
def test_same_bits_within_the_budget(share: float) -> None:
    """Dropout, ops in place, and the states of Adam."""
    net, optimizer = make()
    expected = [step(net, optimizer) for _ in range(NUM_STEPS)]
    budget_bytes = int(share * plain_peak_bytes())
    with planned_here(least_bytes=4096), MemoryBudget(budget_bytes, CONFIG) as budget:
        ours, its_optimizer = make()
        losses = until_partial(running_session(), ours, its_optimizer)
    assert losses == expected
    assert all(torch.equal(a, b) for a, b in zip(net.parameters(), ours.parameters(), strict=True))
    assert budget.summary().peak_bytes <= budget_bytes
    assert all(not one.grad_fn for one in ours.parameters())


def test_fewer_ops_are_recorded() -> None:
    """Those of the program, and what comes before the first tensor that it watches."""
    with planned_here(least_bytes=4096), MemoryBudget(int(0.7 * plain_peak_bytes()), CONFIG):
        session = running_session()
        net, optimizer = make()
        before = session.counters.num_ops
        step(net, optimizer)
        whole = session.counters.num_ops - before
        until_partial(session, net, optimizer)
        before = session.counters.num_ops
        step(net, optimizer)
        assert session.counters.num_ops - before < whole / 3


class Probe(torch.autograd.Function):
    """Does nothing, and notes how many dispatch modes are on in backward."""

    found: ClassVar[list[int]] = []

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        """Return the input."""
        del ctx
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        """Return the gradient."""
        del ctx
        Probe.found.append(num_modes())
        return gradients[0]


def test_no_dispatch_mode_is_on_in_a_known_backward() -> None:
    """The first backwards run under the recorder; those that the plan has held run without any mode."""
    expected = plain_losses([NUM_ROWS] * (NUM_STEPS + 2))
    Probe.found.clear()
    with planned_here(least_bytes=4096), MemoryBudget(int(0.7 * plain_peak_bytes()), CONFIG):
        session = running_session()
        net, optimizer = make()
        net.layers[2].register_forward_hook(lambda _module, _inputs, output: Probe.apply(output))
        losses = until_partial(session, net, optimizer)
        assert max(Probe.found[:2]) == 1
        Probe.found.clear()
        losses += [step(net, optimizer) for _ in range(2)]
        assert session.follower.ended is not None
        assert not session.follower.ended.was_watched
    assert Probe.found == [0, 0]
    assert losses == expected


def test_steps_that_are_faster_because_less_is_recorded_are_not_traced_again() -> None:
    """The time of a step falls in stages until nothing is recorded before the optimizer; that is no drift."""
    with planned_here(least_bytes=4096), MemoryBudget(int(0.7 * plain_peak_bytes()), CONFIG):
        session = running_session()
        net, optimizer = make()
        judge, num_ops = session.programs.on_step_end, [0]

        def judge_by_ops(steps: StepTracker) -> None:
            total = session.counters.num_ops
            steps.last_time_s = 1.0 + (total - num_ops[0]) // 100  # a step takes as long as it has recorded ops
            judge(steps)
            num_ops[0] = total

        with mock.patch.object(session.programs, "on_step_end", judge_by_ops):
            until_partial(session, net, optimizer)
            for _ in range(2 * NUM_STEPS):
                step(net, optimizer)
            program = session.programs.latest
            assert program is not None
            first_s = program.first_s
            assert first_s > 0
            for num_rows in [NUM_ROWS // 2] + [NUM_ROWS] * NUM_STEPS:  # as at the end of an epoch
                step(net, optimizer, num_rows)
        assert program.first_s == first_s
        assert program.num_corrections == 0
        assert session.programs.latest is program


def test_the_times_of_micro_batches_are_compared_with_their_prediction() -> None:
    """No optimizer steps after most of them, so recording never pauses; their times count all the same."""
    with planned_here(least_bytes=4096), MemoryBudget(int(0.7 * plain_peak_bytes()), CONFIG):
        session = running_session()
        net, optimizer = make()
        judge = session.programs.on_step_end

        def judge_slow(steps: StepTracker) -> None:
            steps.last_time_s = 60.0  # always the same, so that only the prediction is wrong
            judge(steps)
            for program in session.programs.cache:
                program.answer = msgspec.structs.replace(program.answer, time_s=1.0)

        with mock.patch.object(session.programs, "on_step_end", judge_slow):
            for _ in range(2 * NUM_STEPS):
                for _ in range(NUM_MICRO_BATCHES):
                    net(torch.randn(NUM_ROWS, WIDTH)).backward()
                optimizer.step()
                optimizer.zero_grad()
        assert session.partial.num_steps > 0
        assert any(program.num_corrections for program in session.programs.cache)


def test_a_known_backward_waits_for_copies_that_are_late() -> None:
    """It fits once they have ended, so the step is followed to its end."""
    expected = plain_losses([NUM_ROWS] * (NUM_STEPS + 3))
    config = Config(planner="capuchin", tier="memory")  # it swaps here
    with planned_here(least_bytes=4096), MemoryBudget(int(0.7 * plain_peak_bytes()), config) as budget:
        session = running_session()
        net, optimizer = make()
        losses = until_partial(session, net, optimizer)
        num_diverged = session.follower.num_diverged_steps
        with mock.patch.object(TierCopy, "is_there", return_value=False):
            for _ in range(3):
                losses.append(step(net, optimizer))
                assert session.follower.ended is not None
                assert not session.follower.ended.was_watched
        assert session.programs.latest is not None
        assert session.programs.latest.swapped_bytes > 0
        assert session.follower.num_diverged_steps == num_diverged
    assert losses == expected
    assert budget.summary().peak_bytes <= budget.budget_bytes


def test_a_step_that_cannot_fit_is_refused_and_the_next_ones_go_on() -> None:
    """With a BudgetError that names what it needs; the bits of later steps are plain's."""
    expected = plain_losses([NUM_ROWS] * (NUM_STEPS + 3))
    with planned_here(least_bytes=4096), MemoryBudget(int(0.7 * plain_peak_bytes()), CONFIG) as budget:
        session = running_session()
        net, optimizer = make()
        losses = until_partial(session, net, optimizer)
        state = torch.get_rng_state()
        with pytest.raises(BudgetError) as caught:
            step(net, optimizer, 16 * NUM_ROWS)
        assert caught.value.least_budget_bytes > budget.budget_bytes
        del caught
        torch.set_rng_state(state)
        optimizer.zero_grad()
        losses += [step(net, optimizer) for _ in range(3)]
    assert losses == expected
    assert budget.summary().num_refused_steps == 1


@pytest.mark.parametrize("num_rows", [NUM_ROWS // 2, NUM_ROWS * 9 // 8])
def test_another_batch_is_carried_out_by_the_policy(num_rows: int) -> None:
    """Recording resumes at its start, and nothing passes the budget."""
    budget_bytes = int(0.75 * plain_peak_bytes())
    sizes = [NUM_ROWS] * NUM_STEPS + [num_rows, NUM_ROWS, NUM_ROWS]
    expected = plain_losses(sizes)
    with planned_here(least_bytes=4096), MemoryBudget(budget_bytes, CONFIG) as budget:
        session = running_session()
        net, optimizer = make()
        losses = [step(net, optimizer, size) for size in sizes]
        assert session.partial.num_steps >= 6
    assert losses == expected
    assert budget.summary().peak_bytes <= budget_bytes


def test_a_layer_that_is_left_out_ends_the_outline() -> None:
    """In the middle of the step: what was saved until then can leave all the same."""
    budget_bytes = int(0.7 * plain_peak_bytes())
    expected_net, expected_optimizer = make()
    with planned_here(least_bytes=4096), MemoryBudget(budget_bytes, CONFIG) as budget:
        session = running_session()
        net, optimizer = make()
        for index in range(NUM_STEPS + 4):
            net.left_out = expected_net.left_out = 4 if index == NUM_STEPS else -1
            torch.manual_seed(index)
            found = step(net, optimizer)
            torch.manual_seed(index)
            assert found == step(expected_net, expected_optimizer), index
        assert session.partial.num_resumed >= 1
        assert session.follower.num_diverged_steps >= 1
    assert budget.summary().peak_bytes <= budget_bytes
