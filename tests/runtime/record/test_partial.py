"""Steps that are recorded in part end with the bits of plain ones, whatever changes from step to step."""

from __future__ import annotations

import gc
import itertools
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
import torch

from tests.runtime.parts import running_session
from tests.runtime.record.partly import (
    CHANGES_AT,
    MARGIN,
    NUM_LAYERS,
    ROWS,
    WIDTH,
    Stack,
    differing_steps,
    drop_all,
    following,
    train,
)
from tests.same_bits.judge import bits_of, seed_everything
from torchdelta import BudgetError, Config, MemoryBudget
from torchdelta.errors import NativeError
from torchdelta.native.gate import load_gate
from torchdelta.runtime.current import current_session
from torchdelta.runtime.follow.program import Proof
from torchdelta.runtime.record.backward import Backward

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.runtime.record.partly import Step


@pytest.fixture(autouse=True)
def _one_thread_and_the_gate() -> Iterator[None]:
    if isinstance(error := load_gate(), NativeError):  # built here, not on another thread during the first test
        pytest.skip(str(error))
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.mark.parametrize("unseen_version", [False, True], ids=["op", "data"])
def test_a_step_that_writes_another_tensor_than_the_learned_one(unseen_version: bool) -> None:
    """The sequence of ops is the same, but what replays read is written, and not the tensor beside it."""

    def make_step() -> Step:
        read, beside = torch.randn(ROWS, WIDTH), torch.zeros(ROWS, WIDTH)

        def step(stack: Stack, index: int) -> torch.Tensor:
            x = torch.randn(ROWS, WIDTH)
            for layer in range(NUM_LAYERS):
                x = stack.block(layer, x + read)
                target = read if index >= CHANGES_AT and layer == NUM_LAYERS - 1 else beside
                if unseen_version:
                    target.data.add_(x.data)
                else:
                    target.add_(x.detach())
            return x.square().mean()

        return step

    assert differing_steps(make_step) == []


def test_a_write_to_what_was_made_before_the_outline() -> None:
    """Its op is known, and would make the old content again where the rest of the step evicts it."""

    def make_step() -> Step:
        def step(stack: Stack, index: int) -> torch.Tensor:
            x = torch.randn(ROWS, WIDTH)
            masks = [torch.sin(torch.cat([x, x]))]
            for layer in range(NUM_LAYERS):
                x = stack.block(layer, x)
                if layer == 2:
                    masks[0].add_(1)
                    x = (torch.cat([x, x]) * masks[0])[:ROWS]
                    masks.clear()  # what the program itself holds cannot be evicted
            if index >= CHANGES_AT:
                x = x + x.cos()  # recording resumes before this op
                drop_all()
            return x.square().mean()

        return step

    assert differing_steps(make_step) == []


def test_a_saved_tensor_that_is_read_in_forward() -> None:
    """What the runtime does to return it is no op of the program."""

    def make_step() -> Step:
        def step(stack: Stack, _index: int) -> torch.Tensor:
            x = torch.randn(ROWS, WIDTH)
            for layer in range(NUM_LAYERS):
                x = stack.block(layer, x)
                y = x.tanh()
                x = x * y + getattr(y.grad_fn, "_saved_result").mean()  # noqa: B009 - torch's stubs do not have it
            return x.square().mean()

        return step

    assert differing_steps(make_step) == []


def test_a_loss_that_is_read_in_every_tenth_step() -> None:
    """That op is not in the outline: recording resumes there. Most other steps are still recorded in part."""
    num_steps, seen = 120, list[int]()

    def step(stack: Stack, index: int) -> torch.Tensor:
        x = torch.randn(ROWS, WIDTH)
        for layer in range(NUM_LAYERS):
            x = stack.block(layer, x)
        loss = x.square().mean()
        if index % 10 == 9:
            assert loss.item() > 0
            if current_session() is not None:
                seen.append(running_session().partial.num_steps)
        return loss

    seed_everything()
    plain, _ = train(step, num_steps)
    with MemoryBudget("1TiB", Config(tier="memory")) as unlimited:
        train(step, 2)
    seen.clear()
    seed_everything()
    with following(int(unlimited.summary().peak_bytes * MARGIN)):
        losses, _ = train(step, num_steps)
    assert losses == plain
    counts = [after - before for before, after in itertools.pairwise(seen[2:])]
    assert counts == [8] * (num_steps // 10 - 3)  # one more step is recorded as a whole before an outline is used again


def _update_by_hand(stack: Stack) -> None:
    for parameter in stack.parameters():
        if parameter.grad is not None:
            parameter.data.add_(parameter.grad, alpha=-0.01)
            parameter.grad = None


@pytest.mark.parametrize("num_micro_batches", [1, 2])
def test_a_loop_whose_optimizer_no_longer_steps_after_every_backward(num_micro_batches: int) -> None:
    """Recording resumes in a forward, where an op is running: the recorder must not see a part of its kernel."""

    def train_by_hand() -> list[Any]:
        seed_everything()
        stack, seen = Stack(), list[Any]()
        optimizer = torch.optim.SGD(stack.parameters(), lr=0.01)
        for index in range(20):
            x = torch.randn(ROWS, WIDTH)
            for layer in range(NUM_LAYERS):
                x = stack.block(layer, x)
                drop_all()
            loss = x.square().mean()
            loss.backward()
            seen.append(bits_of([loss, *(parameter.grad for parameter in stack.parameters())]))
            if index >= 10 and num_micro_batches == 1:
                _update_by_hand(stack)
            elif index < 10 or index % num_micro_batches:
                optimizer.step()
                optimizer.zero_grad()
        return seen

    plain = train_by_hand()
    with MemoryBudget("1TiB", Config(tier="memory")) as unlimited:
        train_by_hand()
    with following(int(unlimited.summary().peak_bytes * MARGIN)):
        seen = train_by_hand()
        partial = running_session().partial
        assert partial.num_steps
        assert partial.num_resumed, "the test says nothing: nothing was paused where no optimizer stepped"
    assert [index for index in range(len(plain)) if plain[index] != seen[index]] == []


class _Pausing:
    """A loop that is recorded in part, and allocates between its latest backward and its optimizer's step."""

    def __init__(self) -> None:
        seed_everything()
        self.stack = Stack()
        self.optimizer = torch.optim.SGD(self.stack.parameters(), lr=0.01)

    def step(self, between: Callable[[], object]) -> None:
        x = torch.randn(ROWS, WIDTH)
        for layer in range(NUM_LAYERS):
            x = self.stack.block(layer, x)
        x.square().mean().backward()
        del x
        between()
        self.optimizer.step()
        self.optimizer.zero_grad()


def _paused_budget() -> int:
    loop = _Pausing()
    with MemoryBudget("1TiB", Config(tier="memory")) as unlimited:
        for _ in range(2):
            loop.step(lambda: None)
    return int(unlimited.summary().peak_bytes * MARGIN)


def test_the_budget_is_not_passed_before_the_optimizer_steps() -> None:
    """Nothing is recorded there, so no op is given room: an allocation that does not fit is refused."""
    budget = _paused_budget()
    with following(budget) as memory_budget:
        loop = _Pausing()
        for _ in range(CHANGES_AT):
            loop.step(lambda: None)
        assert running_session().partial.num_steps
        with pytest.raises(torch.OutOfMemoryError):
            loop.step(lambda: torch.empty(budget, dtype=torch.uint8))
        loop.optimizer.zero_grad()
        loop.step(lambda: None)
    assert memory_budget.summary().peak_bytes <= budget


def test_garbage_is_collected_before_the_optimizer_steps() -> None:
    """It may be all that is in the way of an allocation. Inside of the allocation it would be too late."""
    budget = _paused_budget()

    def leave_garbage() -> None:
        cycle: list[Any] = [torch.empty(budget // 4, dtype=torch.uint8)]
        cycle.append(cycle)

    gc.collect()
    gc.disable()
    try:
        with following(budget) as memory_budget:
            loop = _Pausing()
            for _ in range(CHANGES_AT):
                loop.step(lambda: None)
            assert running_session().partial.num_steps
            loop.step(lambda: [leave_garbage() for _ in range(12)])
    finally:
        gc.enable()
    assert memory_budget.summary().peak_bytes <= budget


class _Plain(torch.Tensor):
    """A subclass without ops of its own."""


def test_a_step_that_begins_to_make_tensors_of_a_subclass() -> None:
    """The alias that torch makes for one is not the next op of the outline, and must not be recorded."""

    def make_step() -> Step:
        def step(stack: Stack, index: int) -> torch.Tensor:
            x = torch.randn(ROWS, WIDTH)
            for layer in range(NUM_LAYERS):
                x = stack.block(layer, x)
                if index >= CHANGES_AT and layer == 3:
                    x = x.as_subclass(_Plain).as_subclass(torch.Tensor)
            return x.square().mean()

        return step

    assert differing_steps(make_step) == []


class _LargeBackward(torch.autograd.Function):
    """Takes much more memory in backward than in forward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.shape = x.shape
        return x.sum() * 1e-3

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> torch.Tensor:
        large = torch.ones(20 * ROWS, WIDTH)
        return grad_outputs[0].expand(ctx.shape) * large[0, 0]


def test_a_backward_from_another_result_of_the_same_ops() -> None:
    """It was never seen to fit."""

    def make_step() -> Step:
        def step(stack: Stack, index: int) -> torch.Tensor:
            x = torch.randn(ROWS, WIDTH)
            for layer in range(NUM_LAYERS):
                x = stack.block(layer, x)
            usual, other = x.square().mean(), _LargeBackward.apply(x)
            return other if index >= CHANGES_AT else usual

        return step

    with MemoryBudget("1TiB", Config(tier="memory")) as unlimited:
        train(make_step(), 2)
    budget = int(unlimited.summary().peak_bytes * MARGIN)
    with following(budget) as memory_budget, pytest.raises(BudgetError):
        train(make_step())
    assert memory_budget.summary().num_steps == CHANGES_AT
    assert memory_budget.summary().peak_bytes <= budget


def test_a_backward_that_fitted_after_a_partial_forward_is_not_known_to_fit_after_a_whole_one() -> None:
    """Other buffers are resident there: what one takes says nothing of the other."""
    with following(_paused_budget()):
        loop = _Pausing()
        for _ in range(4):
            loop.step(lambda: None)
        session = running_session()
        follower, program = session.follower, session.programs.latest
        assert program is not None

        def complete() -> None:
            follower._running = program  # noqa: SLF001
            follower.position.complete(program.key)

        complete()
        follower.complete_outlined()
        follower.measured(1, Proof(start_bytes=0, leaving_bytes=0, peak_bytes=1))
        assert follower.may_run_unwatched(1, 0, 0)
        follower.restart()
        complete()
        assert not follower.may_run_unwatched(1, 0, 0)
        follower.restart()


def test_a_known_backward_that_cannot_fit_leaves_no_fake_gradient() -> None:
    """A survey begins in the middle of it: what that accumulates into the leaves is undone."""
    budget = _paused_budget()
    hogs: list[torch.Tensor] = []
    with following(budget):
        loop = _Pausing()
        for _ in range(CHANGES_AT):
            loop.step(lambda: None)
        assert running_session().partial.num_steps
        loss = torch.randn(ROWS, WIDTH)
        for layer in range(NUM_LAYERS):
            loss = loop.stack.block(layer, loss)
        loss = loss.square().mean()
        loss.register_hook(lambda _gradient: hogs.append(torch.empty(budget, dtype=torch.uint8)))
        backward = running_session().backward
        with (
            mock.patch.object(backward, "run_known", wraps=backward.run_known) as run_known,
            pytest.raises(BudgetError),
        ):
            loss.backward()
        assert run_known.called
        hogs.clear()
        gradients = [parameter.grad for parameter in loop.stack.parameters() if parameter.grad is not None]
        assert all(type(gradient) is torch.Tensor and not gradient.is_meta for gradient in gradients)
        del loss
        loop.optimizer.zero_grad()
        loop.step(lambda: None)


@pytest.mark.parametrize("shares_head", [False, True])
def test_models_of_the_same_shapes_that_train_in_turn(monkeypatch: pytest.MonkeyPatch, shares_head: bool) -> None:
    """A backward is known by its own leaves, and not by those of the other model, also behind a head of both."""
    seed_everything()
    stacks = [Stack(), Stack()]
    if shares_head:
        stacks[1].layers[-1], stacks[1].norms[-1] = stacks[0].layers[-1], stacks[0].norms[-1]
    optimizers = [torch.optim.SGD(stack.parameters(), lr=0.01, momentum=0.9) for stack in stacks]
    known_leaves: list[set[int]] = []
    own_leaves: list[set[int]] = []
    run_known = Backward.run_known

    def train_in_turn(num_steps: int) -> None:
        for index in range(num_steps):
            stack, optimizer, before = stacks[index % 2], optimizers[index % 2], len(known_leaves)
            x = torch.randn(ROWS, WIDTH)
            for layer in range(NUM_LAYERS):
                x = stack.block(layer, x)
            x.square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if len(known_leaves) > before:
                own_leaves.append({id(parameter) for parameter in stack.parameters()})

    def spy(self: Backward, original: Any, known: Any, outputs: Any, *args: Any, **kwargs: Any) -> Any:
        known_leaves.append({id(leaf) for leaf in known.leaves()})
        return run_known(self, original, known, outputs, *args, **kwargs)

    monkeypatch.setattr(Backward, "run_known", spy)
    with MemoryBudget("1TiB", Config(tier="memory")) as unlimited:
        train_in_turn(4)
    with following(int(unlimited.summary().peak_bytes * MARGIN)):
        train_in_turn(40)
    assert known_leaves
    assert known_leaves == own_leaves
