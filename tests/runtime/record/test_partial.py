"""Steps that are recorded in part end with the bits of plain ones, whatever changes from step to step."""

from __future__ import annotations

import contextlib
import gc
from typing import TYPE_CHECKING, Any, cast
from unittest import mock

import msgspec
import pytest
import torch

from tests.following import drawn_plan, follow_anyway, planned_here
from tests.runtime.parts import running_session
from tests.same_bits.judge import bits_of, seed_everything
from torchdelta import BudgetError, Config, MemoryBudget
from torchdelta._torch.modes import CAN_ENTER_MODES_IN_OPS
from torchdelta.errors import NativeError
from torchdelta.native.gate import load_gate
from torchdelta.runtime.current import current_session
from torchdelta.runtime.follow.program import Proof
from torchdelta.runtime.policies.base import Action

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator

    from torchdelta.machine.model import Machine
    from torchdelta.plan.model import Plan
    from torchdelta.runtime.session import Session
    from torchdelta.trace.model import Trace

    Step = Callable[["Stack", int], torch.Tensor]

pytestmark = pytest.mark.skipif(not CAN_ENTER_MODES_IN_OPS, reason="needs torch 2.13")

_ROWS, _WIDTH, _NUM_LAYERS = 512, 32, 5
_LARGE_BYTES = 2 * 4 * _ROWS * _WIDTH  # no program here lets a buffer of this size leave
_MARGIN = 1.02  # of the budget above the plain peak: with much more, recording would pause as a whole
_CHANGES_AT = 12  # the step at which a step does something else: earlier ones are recorded in part
_NUM_STEPS = 16


class Stack(torch.nn.Module):
    """Layers of the same width."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(_WIDTH, _WIDTH) for _ in range(_NUM_LAYERS))
        self.norms = torch.nn.ModuleList(torch.nn.LayerNorm(_WIDTH) for _ in range(_NUM_LAYERS))

    def block(self, index: int, x: torch.Tensor) -> torch.Tensor:
        """Run one layer."""
        return x + torch.nn.functional.gelu(self.norms[index](self.layers[index](x)))


@pytest.fixture(autouse=True)
def _one_thread_and_the_gate() -> Iterator[None]:
    if isinstance(error := load_gate(), NativeError):  # built here, not on another thread during the first test
        pytest.skip(str(error))
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


def _drop_all() -> None:
    """Drop what can be recomputed, if a scope is open."""
    if (session := current_session()) is not None:
        room = cast("Session", session).room
        for buffer in list(room.ledger.held.values()):
            if buffer.op is not None and room.is_evictable(buffer):
                room.evict(buffer, Action.RECOMPUTE)


def _recompute_all_small(trace: Trace, _machine: Machine, _budget_bytes: int) -> Plan:
    """Return a program that drops most saved buffers that are not large."""
    plan = drawn_plan(trace, 2)
    sizes_bytes = {buffer.id: buffer.size_bytes for buffer in trace.buffers}
    small = [absence for absence in plan.absences if sizes_bytes[absence.buffer_id] < _LARGE_BYTES]
    return msgspec.structs.replace(
        plan, absences=tuple(msgspec.structs.replace(absence, action="recompute") for absence in small)
    )


@contextlib.contextmanager
def _following(budget: int) -> Generator[MemoryBudget]:
    with (
        planned_here(_recompute_all_small, least_bytes=0),
        MemoryBudget(budget, Config(planner="torchdelta", tier="memory")) as memory_budget,
    ):
        follow_anyway(running_session())
        yield memory_budget


def _train(step: Step, num_steps: int = _NUM_STEPS) -> tuple[list[Any], int]:
    """Train with a step. Return the bits of all losses and of the final state, and how many steps were partial."""
    stack, num_partial = Stack(), 0
    optimizer = torch.optim.SGD(stack.parameters(), lr=0.01, momentum=0.9)
    seen: list[Any] = []
    for index in range(num_steps):
        loss = step(stack, index)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append(bits_of(loss))
        if index == _CHANGES_AT - 1 and (session := current_session()) is not None:
            num_partial = cast("Session", session).partial.num_steps
    seen.append(bits_of(stack.state_dict()))
    seen.append(bits_of(torch.get_rng_state()))
    return seen, num_partial


def _run(make_step: Callable[[], Step], budget: int | None) -> tuple[list[Any], int]:
    seed_everything()
    with _following(budget) if budget is not None else contextlib.nullcontext():
        return _train(make_step())


def _differing_steps(make_step: Callable[[], Step]) -> list[int]:
    """Return the steps whose losses are not plain's; the last two are those of the final state and the generator's."""
    plain, _ = _run(make_step, None)
    with MemoryBudget("1TiB", Config(tier="memory")) as unlimited:
        _train(make_step(), 2)
    seen, num_partial = _run(make_step, int(unlimited.summary().peak_bytes * _MARGIN))
    assert num_partial, "the test says nothing: no step was recorded in part"
    return [index for index in range(len(plain)) if plain[index] != seen[index]]


@pytest.mark.parametrize("unseen_version", [False, True], ids=["op", "data"])
def test_a_step_that_writes_another_tensor_than_the_learned_one(unseen_version: bool) -> None:
    """The sequence of ops is the same, but what replays read is written, and not the tensor beside it."""

    def make_step() -> Step:
        read, beside = torch.randn(_ROWS, _WIDTH), torch.zeros(_ROWS, _WIDTH)

        def step(stack: Stack, index: int) -> torch.Tensor:
            x = torch.randn(_ROWS, _WIDTH)
            for layer in range(_NUM_LAYERS):
                x = stack.block(layer, x + read)
                target = read if index >= _CHANGES_AT and layer == _NUM_LAYERS - 1 else beside
                if unseen_version:
                    target.data.add_(x.data)
                else:
                    target.add_(x.detach())
            return x.square().mean()

        return step

    assert _differing_steps(make_step) == []


def test_a_write_to_what_was_made_before_the_outline() -> None:
    """Its op is known, and would make the old content again where the rest of the step evicts it."""

    def make_step() -> Step:
        def step(stack: Stack, index: int) -> torch.Tensor:
            x = torch.randn(_ROWS, _WIDTH)
            masks = [torch.sin(torch.cat([x, x]))]
            for layer in range(_NUM_LAYERS):
                x = stack.block(layer, x)
                if layer == 2:
                    masks[0].add_(1)
                    x = (torch.cat([x, x]) * masks[0])[:_ROWS]
                    masks.clear()  # what the program itself holds cannot be evicted
            if index >= _CHANGES_AT:
                x = x + x.cos()  # recording resumes before this op
                _drop_all()
            return x.square().mean()

        return step

    assert _differing_steps(make_step) == []


def test_a_saved_tensor_that_is_read_in_forward() -> None:
    """What the runtime does to return it is no op of the program."""

    def make_step() -> Step:
        def step(stack: Stack, _index: int) -> torch.Tensor:
            x = torch.randn(_ROWS, _WIDTH)
            for layer in range(_NUM_LAYERS):
                x = stack.block(layer, x)
                y = x.tanh()
                x = x * y + getattr(y.grad_fn, "_saved_result").mean()  # noqa: B009 - torch's stubs do not have it
            return x.square().mean()

        return step

    assert _differing_steps(make_step) == []


def _update_by_hand(stack: Stack) -> None:
    for parameter in stack.parameters():
        if parameter.grad is not None:
            parameter.data.add_(parameter.grad, alpha=-0.01)
            parameter.grad = None


@pytest.mark.parametrize("num_micro_batches", [1, 2])
def test_a_loop_whose_optimizer_does_not_step_after_every_backward(num_micro_batches: int) -> None:
    """Recording resumes in a forward, where an op is running: the recorder must not see a part of its kernel."""

    def train() -> list[Any]:
        seed_everything()
        stack, seen = Stack(), list[Any]()
        optimizer = torch.optim.SGD(stack.parameters(), lr=0.01)
        for index in range(20):
            x = torch.randn(_ROWS, _WIDTH)
            for layer in range(_NUM_LAYERS):
                x = stack.block(layer, x)
                _drop_all()
            loss = x.square().mean()
            loss.backward()
            seen.append(bits_of([loss, *(parameter.grad for parameter in stack.parameters())]))
            if num_micro_batches == 1:
                _update_by_hand(stack)
            elif index % num_micro_batches:
                optimizer.step()
                optimizer.zero_grad()
        return seen

    plain = train()
    with MemoryBudget("1TiB", Config(tier="memory")) as unlimited:
        train()
    with _following(int(unlimited.summary().peak_bytes * _MARGIN)):
        seen = train()
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
        x = torch.randn(_ROWS, _WIDTH)
        for layer in range(_NUM_LAYERS):
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
    return int(unlimited.summary().peak_bytes * _MARGIN)


def test_the_budget_is_not_passed_before_the_optimizer_steps() -> None:
    """Nothing is recorded there, so no op is given room: an allocation that does not fit is refused."""
    budget = _paused_budget()
    with _following(budget) as memory_budget:
        loop = _Pausing()
        for _ in range(_CHANGES_AT):
            loop.step(lambda: None)
        assert running_session().partial.num_steps
        with pytest.raises(torch.OutOfMemoryError):
            loop.step(lambda: torch.empty(budget, dtype=torch.uint8))
        loop.optimizer.zero_grad()
        loop.step(lambda: None)
    assert memory_budget.summary().peak_bytes <= budget


def test_garbage_is_collected_before_the_optimizer_steps() -> None:
    """It may be all that is in the way of an allocation."""
    budget = _paused_budget()

    def leave_garbage() -> None:
        cycle: list[Any] = [torch.empty(budget // 2, dtype=torch.uint8)]
        cycle.append(cycle)

    gc.collect()
    gc.disable()
    try:
        with _following(budget) as memory_budget:
            loop = _Pausing()
            for _ in range(_CHANGES_AT):
                loop.step(lambda: None)
            assert running_session().partial.num_steps
            loop.step(lambda: [leave_garbage() for _ in range(3)])
    finally:
        gc.enable()
    assert memory_budget.summary().peak_bytes <= budget


class _Plain(torch.Tensor):
    """A subclass without ops of its own."""


def test_a_step_that_begins_to_make_tensors_of_a_subclass() -> None:
    """The alias that torch makes for one is not the next op of the outline, and must not be recorded."""

    def make_step() -> Step:
        def step(stack: Stack, index: int) -> torch.Tensor:
            x = torch.randn(_ROWS, _WIDTH)
            for layer in range(_NUM_LAYERS):
                x = stack.block(layer, x)
                if index >= _CHANGES_AT and layer == 3:
                    x = x.as_subclass(_Plain).as_subclass(torch.Tensor)
            return x.square().mean()

        return step

    assert _differing_steps(make_step) == []


class _LargeBackward(torch.autograd.Function):
    """Takes much more memory in backward than in forward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.shape = x.shape
        return x.sum() * 1e-3

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> torch.Tensor:
        large = torch.ones(20 * _ROWS, _WIDTH)
        return grad_outputs[0].expand(ctx.shape) * large[0, 0]


def test_a_backward_from_another_result_of_the_same_ops() -> None:
    """It was never seen to fit."""

    def make_step() -> Step:
        def step(stack: Stack, index: int) -> torch.Tensor:
            x = torch.randn(_ROWS, _WIDTH)
            for layer in range(_NUM_LAYERS):
                x = stack.block(layer, x)
            usual, other = x.square().mean(), _LargeBackward.apply(x)
            return other if index >= _CHANGES_AT else usual

        return step

    with MemoryBudget("1TiB", Config(tier="memory")) as unlimited:
        _train(make_step(), 2)
    budget = int(unlimited.summary().peak_bytes * _MARGIN)
    with _following(budget) as memory_budget, pytest.raises(BudgetError):
        _train(make_step())
    assert memory_budget.summary().num_steps == _CHANGES_AT
    assert memory_budget.summary().peak_bytes <= budget


def test_a_backward_that_fitted_after_a_partial_forward_is_not_known_to_fit_after_a_whole_one() -> None:
    """Other buffers are resident there: what one takes says nothing of the other."""
    with _following(_paused_budget()):
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
        assert follower.may_run_unwatched(1, 0)
        follower.restart()
        complete()
        assert not follower.may_run_unwatched(1, 0)
        follower.restart()


def test_a_known_backward_that_cannot_fit_leaves_no_fake_gradient() -> None:
    """A survey begins in the middle of it: what that accumulates into the leaves is undone."""
    budget = _paused_budget()
    hogs: list[torch.Tensor] = []
    with _following(budget):
        loop = _Pausing()
        for _ in range(_CHANGES_AT):
            loop.step(lambda: None)
        assert running_session().partial.num_steps
        loss = torch.randn(_ROWS, _WIDTH)
        for layer in range(_NUM_LAYERS):
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
