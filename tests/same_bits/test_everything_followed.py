"""Plans for parameters, gradients and optimizer states: the bits of plain, and moves ahead of use in the budget."""

from __future__ import annotations

import contextlib
import io
from typing import TYPE_CHECKING, Any
from unittest import mock

import msgspec
import pytest
import torch

from tests.following import UNLIMITED, drawn_plan, follow_anyway, following_drawn, planned_here, planned_soon
from tests.runtime.parts import is_emptied, running_session
from tests.same_bits.drawn_networks import plain_observations
from tests.same_bits.drawn_networks import train as train_drawn
from tests.same_bits.judge import bits_of
from tests.same_bits.test_everything_swaps import adamw, batch_of, bert, convnext, gpt2, parameter_bytes, plain_scope
from tests.sampling import keep, sample
from torchdelta import Config, MemoryBudget
from torchdelta.runtime.current import current_session
from torchdelta.runtime.follow import departures
from torchdelta.runtime.memory.planned_moves import Move
from torchdelta.runtime.record.backward import Backward

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torchdelta.machine.model import Machine
    from torchdelta.runtime.follow.step_log import StepLog
    from torchdelta.summary import Summary
    from torchdelta.trace.model import Trace

pytestmark = pytest.mark.usefixtures("needs_counter")

NUM_STEPS = 9
LEAST_BYTES = 4096
NUM_DRAWN = 200


def train(
    make: Callable[[], torch.nn.Module],
    scope_of: Callable[[int], contextlib.AbstractContextManager[Any]],
    *,
    num_backwards: int = 1,
    sizes: tuple[int, ...] = (2,),
    in_step: Callable[[int, torch.nn.Module, torch.optim.Optimizer], Any] | None = None,
    after_step: Callable[[torch.nn.Module], Any] | None = None,
    set_to_none: bool = True,
) -> tuple[dict[str, Any], contextlib.AbstractContextManager[Any]]:
    """Train in a scope that is chosen by the bytes of the parameters. Return all that can be observed.

    Args:
        make: Builds the model.
        scope_of: Returns the scope.
        num_backwards: Of each step.
        sizes: How many samples the batches of the steps have, in turn.
        in_step: Called before the optimizer steps.
        after_step: Called after that, before `zero_grad`.
        set_to_none: Of `zero_grad`.
    """
    torch.manual_seed(0)
    model = make()
    optimizer = adamw(model.parameters())
    scope = scope_of(parameter_bytes(model))
    observed: list[Any] = []
    with scope:
        for step in range(NUM_STEPS):
            for _ in range(num_backwards):
                batch = {name: tensor[: sizes[step % len(sizes)]] for name, tensor in batch_of(model).items()}
                loss = model(**batch).loss
                loss.backward()
                observed.append(loss.item())
            if in_step is not None:
                observed.append(in_step(step, model, optimizer))
            optimizer.step()
            if after_step is not None:
                observed.append(after_step(model))
            optimizer.zero_grad(set_to_none=set_to_none)
    states = list(optimizer.state_dict()["state"].values())
    return {"observed": observed, "model": bits_of(model.state_dict()), "optimizer": bits_of(states)}, scope


def planned(size_bytes: int, share: float = 2.0) -> MemoryBudget:
    """Return a scope of a multiple of the parameters' bytes, of which AdamW lets four times persist, with plans."""
    return MemoryBudget(
        int(share * size_bytes), Config(decision_class="all", planner="torchdelta", tier="memory", policy="swap-only")
    )


def summary_of(scope: Any) -> Summary:
    """Assert that followed steps and the last two have kept to a budget; return its summary."""
    assert isinstance(scope, MemoryBudget)
    summary = scope.summary()
    assert summary.follow is not None
    steps = [step for step in summary.steps if step.plan] + list(summary.steps[-2:])
    assert all(step.peak_bytes <= scope.budget_bytes for step in steps)
    return summary


@pytest.mark.parametrize("make", keep([gpt2, bert, convnext], [gpt2, convnext]))
def test_steps_below_what_persists_follow_their_plan(make: Any) -> None:
    """A plan of the step moves states, gradients and parameters; what it moves is there before its use."""
    plain, _ = train(make, plain_scope, in_step=_nothing)
    moved: list[int] = []

    def note(step: int, _model: Any, _optimizer: Any) -> None:
        if step == NUM_STEPS - 1:
            schedule = next(iter(running_session().programs.cache)).schedule
            assert schedule.persistent is not None
            moved.append(len(schedule.persistent.moves))

    with planned_here(least_bytes=LEAST_BYTES):
        observed, scope = train(make, planned, in_step=note)
    assert observed == plain
    summary = summary_of(scope)
    assert summary.follow.num_followed_steps >= NUM_STEPS - 4
    assert moved[0] > 20


def _nothing(*_arguments: Any) -> None:
    return


def _clip(_step: int, model: torch.nn.Module, _optimizer: Any) -> float:
    return torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item()


def _sums(model: torch.nn.Module) -> list[float]:
    return [each.grad.sum().item() for each in model.parameters() if each.grad is not None]


def _read_first(_step: int, model: torch.nn.Module, _optimizer: Any) -> list[float]:
    return _sums(model)


def _write_all_in_the_last_hook(step: int, model: torch.nn.Module, _optimizer: Any) -> None:
    """In followed steps, write all gradients once the last one is there: some are copied out by then."""

    def scale(_gradient: torch.Tensor) -> None:
        gradients = [each.grad for each in model.parameters() if each.grad is not None]
        if current_session() is not None:
            _num_copied.append(sum(map(_is_copied, gradients)))
        for gradient in gradients:
            gradient.mul_(0.5)

    if step == NUM_STEPS - 3:
        next(model.parameters()).register_post_accumulate_grad_hook(scale)


def _is_copied(gradient: torch.Tensor) -> bool:
    record, persistents = running_session().ledger.find(gradient), running_session().room.persistents
    return record is not None and persistents is not None and persistents.emptying.has_spare(record)


_num_copied: list[int] = []  # gradients that had copies when the hook wrote them


@pytest.mark.parametrize("in_step", [_nothing, _clip, _read_first, _write_all_in_the_last_hook])
def test_gradients_leave_once_the_optimizer_has_read_them(in_step: Callable[..., Any]) -> None:
    """Copied in backward, they leave without a transfer. Whoever reads or writes one finds what plain has."""
    plain, _ = train(gpt2, plain_scope, in_step=in_step)
    _num_copied.clear()
    num_departing: list[int] = []
    num_left: list[int] = []

    def note(step: int, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Any:
        observed = in_step(step, model, optimizer)
        schedules = [program.schedule.persistent for program in running_session().programs.cache]
        moves = [move for schedule in schedules if schedule is not None for move in schedule.moves]
        num_departing.append(sum(key < 0 for _, move, key in moves if move is Move.LEAVE))
        if step == NUM_STEPS - 1:
            gradients = [each.grad for each in model.parameters() if each.grad is not None]
            optimizer.register_step_post_hook(lambda *_: num_left.append(sum(map(is_emptied, gradients))))
        return observed

    with _departing_soon():
        observed, scope = train(gpt2, planned, in_step=note)
    assert observed == plain
    assert summary_of(scope).follow.num_followed_steps >= NUM_STEPS - 5
    if in_step in {_nothing, _read_first}:
        assert num_departing[-1] > 0
        assert num_left[0] > 0
    if in_step is _write_all_in_the_last_hook:
        assert max(_num_copied) > 0


def test_gradients_that_have_left_are_read_after_the_step() -> None:
    """As a logger of norms does in some steps. They come back."""
    num_read: list[int] = []

    def read(model: torch.nn.Module) -> list[float]:
        num_read.append(0)
        if len(num_read) % NUM_STEPS != NUM_STEPS - 1:
            return []
        if current_session() is not None:
            gradients = [each.grad for each in model.parameters() if each.grad is not None]
            num_read[-1] = sum(map(is_emptied, gradients))
        return _sums(model)

    plain, _ = train(gpt2, plain_scope, after_step=read)
    with _departing_soon():
        observed, _ = train(gpt2, planned, after_step=read)
    assert observed == plain
    assert num_read[-2] > 0


@contextlib.contextmanager
def _departing_soon() -> Iterator[None]:
    """Let the small gradients of small models depart, however slow the tier is."""

    def copied_at_once(trace: Trace, log: StepLog, machine: Machine) -> Any:
        return copied_in_time(trace, log, msgspec.structs.replace(machine, host_out_bytes_per_s=1e18))

    copied_in_time = departures._copied_in_time  # noqa: SLF001 - the size of the model, and the speed of the tier
    at_once = mock.patch.object(departures, "_copied_in_time", copied_at_once)
    with planned_here(least_bytes=LEAST_BYTES), at_once, mock.patch.object(departures, "_LEAST_BYTES", LEAST_BYTES):
        yield


@pytest.mark.parametrize("set_to_none", [True, False])
def test_accumulated_gradients(*, set_to_none: bool) -> None:
    """Also where the next step uses their memory again."""
    plain, _ = train(gpt2, plain_scope, num_backwards=2, set_to_none=set_to_none)
    with _departing_soon():
        observed, scope = train(gpt2, lambda size: planned(size, 2.5), num_backwards=2, set_to_none=set_to_none)
    assert observed == plain
    assert summary_of(scope).follow.num_followed_steps > 0


def test_a_plan_is_the_default_once_it_pays() -> None:
    """The planner "auto" plans steps of this class as well."""
    plain, _ = train(gpt2, plain_scope)

    def scope_of(size_bytes: int) -> MemoryBudget:
        return MemoryBudget(2 * size_bytes, Config(decision_class="all", tier="memory"))

    with planned_soon(least_bytes=LEAST_BYTES):
        observed, scope = train(gpt2, scope_of)
    assert observed == plain
    assert summary_of(scope).follow.num_followed_steps > 0


def test_a_checkpoint_in_a_planned_step_equals_that_of_plain() -> None:
    """To the byte, although most of what it holds is away when it is saved."""

    def save(step: int, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> bytes:
        file = io.BytesIO()
        if step == NUM_STEPS - 2:
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
        return file.getvalue()

    plain, _ = train(gpt2, plain_scope, in_step=save)
    with planned_here(least_bytes=LEAST_BYTES):
        observed, scope = train(gpt2, planned, in_step=save)
    assert observed == plain
    assert summary_of(scope).follow.num_followed_steps >= NUM_STEPS - 4


@pytest.mark.parametrize(
    ("num_backwards", "sizes", "share"), [(2, (2,), 2.0), (3, (2,), 3.5), (1, (2, 1), 2.0), (1, (2, 2, 2, 2, 1), 2.0)]
)
def test_steps_that_differ(num_backwards: int, sizes: tuple[int, ...], share: float) -> None:
    """Accumulated gradients, and batches of other sizes: other programs, the same bits."""
    plain, _ = train(gpt2, plain_scope, num_backwards=num_backwards, sizes=sizes)
    with planned_here(least_bytes=LEAST_BYTES):
        observed, scope = train(gpt2, lambda size: planned(size, share), num_backwards=num_backwards, sizes=sizes)
    assert observed == plain
    assert summary_of(scope).follow.num_followed_steps > 0


def test_an_exception_in_a_planned_step() -> None:
    """What was due in the step that failed is forgotten, and the next steps are followed again."""

    def interrupt(step: int, model: torch.nn.Module, _optimizer: Any) -> None:
        if step == NUM_STEPS - 4:
            hook = model.lm_head.register_full_backward_pre_hook(_fail)
            with contextlib.suppress(ZeroDivisionError):
                model(**batch_of(model)).loss.backward()
            hook.remove()

    plain, _ = train(gpt2, plain_scope, in_step=interrupt)
    with planned_here(least_bytes=LEAST_BYTES):
        observed, scope = train(gpt2, planned, in_step=interrupt)
    assert observed == plain
    assert summary_of(scope).follow.num_followed_steps >= 3


def test_an_optimizer_whose_states_are_replaced() -> None:
    """As by `load_state_dict`: the step is planned once more, and the new states move, too."""

    def replace(step: int, _model: Any, optimizer: torch.optim.Optimizer) -> None:
        if step == 5:
            for states in optimizer.state.values():
                states.update({name: state.clone() for name, state in states.items()})

    num_unknown: list[int] = []

    def note(step: int, model: Any, optimizer: torch.optim.Optimizer) -> None:
        replace(step, model, optimizer)
        session = running_session()
        assert session.room.persistents is not None
        schedules = [program.schedule.persistent for program in session.programs.cache]
        known = session.room.persistents.candidates.by_key.keys()
        num_unknown.append(sum(len(schedule.lasting - known) for schedule in schedules if schedule is not None))

    plain, _ = train(gpt2, plain_scope, in_step=replace)
    with planned_here(least_bytes=LEAST_BYTES):
        observed, scope = train(gpt2, planned, in_step=note)
    assert observed == {**plain, "observed": observed["observed"]}
    follow = summary_of(scope).follow
    assert follow is not None
    assert follow.num_followed_steps >= 3
    assert num_unknown[-1] == 0


def test_frozen_weights() -> None:
    """A frozen weight is a saved tensor and a parameter, and may leave in both ways."""

    def frozen() -> torch.nn.Module:
        model = gpt2()
        for block in model.transformer.h[:3]:  # pyright: ignore[reportAttributeAccessIssue, reportIndexIssue]
            block.requires_grad_(requires_grad=False)
        return model

    plain, _ = train(frozen, plain_scope)
    for seed in (1, 2):
        observed, _ = train(frozen, lambda _size, seed=seed: following_drawn(seed, decision_class="all"))
        assert observed == plain


def test_no_backward_of_a_followed_step_is_unwatched() -> None:
    """Parameters and gradients may leave in any of them, and come back only if it is watched."""

    def run(decision_class: str) -> int:
        saved = planned_here(lambda trace, _machine, _budget_bytes: drawn_plan(trace, 0), least_bytes=0)
        config = Config(decision_class=decision_class, planner="torchdelta", tier="memory")  # pyright: ignore[reportArgumentType]
        unwatched = mock.patch.object(Backward, "_run_unwatched", autospec=True, side_effect=Backward._run_unwatched)  # noqa: SLF001
        with saved, unwatched as calls, MemoryBudget(UNLIMITED, config):
            follow_anyway(running_session())
            running_session().pause.forbid()
            observed, _ = train(gpt2, plain_scope)
        assert observed == plain
        return calls.call_count

    plain, _ = train(gpt2, plain_scope)
    assert run("all") == 0
    assert run("saved") > 0


def _fail(*_arguments: Any) -> None:
    raise ZeroDivisionError


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("seed", sample(range(NUM_DRAWN), 3, 20))
def test_drawn_loops_while_a_drawn_plan_moves_everything(seed: int) -> None:
    """Whatever a plan does with parameters, gradients and states, at moments that no planner would choose."""
    plain = plain_observations(seed)
    if plain is None:
        pytest.skip("plain fails or does not equal itself")
    assert train_drawn(seed, lambda: following_drawn(seed, decision_class="all")) == plain
