"""The one object that a user meets: scopes, sizes, errors, threads."""

from __future__ import annotations

import logging
import os
import threading
from typing import TYPE_CHECKING, Any

import accelerate.utils
import pytest
import torch
from torch import nn

from tests.native.without import but_of_absence
from torchdelta import BudgetError, Config, MemoryBudget, SavedBuffer, TorchdeltaError
from torchdelta.errors import ConfigError, ScopeError
from torchdelta.notices import warn_once

if TYPE_CHECKING:
    from collections.abc import Callable

UNLIMITED = "1TiB"


def step(size: int = 64) -> torch.Tensor:
    """Run one forward and backward whose saved tensors can leave, and return the gradient."""
    x = torch.linspace(-1, 1, size * size).view(size, size).requires_grad_()
    (x * 2).sin().exp().sum().backward()
    assert x.grad is not None
    return x.grad


def in_thread(run: Callable[[], Any]) -> BaseException | None:
    """Run something in another thread and return the error that ended it."""
    errors: list[BaseException] = []

    def body() -> None:
        try:
            run()
        except Exception as error:  # noqa: BLE001 - judged by the caller
            errors.append(error)

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    return errors[0] if errors else None


def test_repr_is_the_call() -> None:
    """It says the bytes and the options."""
    assert repr(MemoryBudget("1KiB")) == f"MemoryBudget(1024, {Config()!r})"


# -- starting and stopping


def test_context_manager_and_calls_do_the_same() -> None:
    """Frameworks with callbacks call `start` and `stop`."""
    config = Config(decisions="recompute")
    with MemoryBudget(UNLIMITED, config) as first:
        inside = step()
    second = MemoryBudget(UNLIMITED, config)
    second.start()
    called = step()
    second.stop()
    assert torch.equal(inside, called)
    assert first.summary().num_recomputed_ops == second.summary().num_recomputed_ops > 0


@pytest.mark.parametrize("config", [{"tier": "memory"}, "disk", Config])
def test_a_config_of_another_type_is_refused(config: Any) -> None:
    """Before anything is read from it."""
    with pytest.raises(ConfigError, match=r"config=.* is not a torchdelta.Config: use Config\(tier='memory'\)"):
        MemoryBudget("1GiB", config)


def test_budgets_do_not_nest() -> None:
    """Neither another one nor the same."""
    outer = MemoryBudget(UNLIMITED)
    with outer:
        with pytest.raises(ScopeError, match="nest"):
            MemoryBudget(UNLIMITED).start()
        with pytest.raises(ScopeError, match="already"):
            outer.start()
        with pytest.raises(ScopeError, match="already"), outer:
            pytest.fail("entered twice")
        step()
    outer.start()
    outer.stop()


def test_stop_without_start_is_refused() -> None:
    """Also the second stop."""
    budget = MemoryBudget(UNLIMITED)
    with pytest.raises(ScopeError, match="not running"):
        budget.stop()
    with budget:
        pass
    with pytest.raises(ScopeError, match="not running"):
        budget.stop()


def test_budget_can_be_used_again() -> None:
    """Each use starts its own account."""
    budget = MemoryBudget(UNLIMITED, Config(decisions="swap", tier="memory"))
    seen: list[int] = []
    for _ in range(3):
        with budget:
            step()
        seen.append(budget.summary().swapped_out_bytes)
    assert seen[0] > 0
    assert seen == [seen[0]] * 3


def test_scope_without_training() -> None:
    """Nothing inside, or nothing that trains, is fine."""
    budget = MemoryBudget(UNLIMITED)
    with budget:
        pass
    assert budget.summary().steps == ()
    with budget, torch.no_grad():
        total = torch.ones(8).sum()
    assert total == 8
    summary = budget.summary()
    assert (summary.steps, summary.swapped_out_bytes, summary.num_recomputed_ops) == ((), 0, 0)
    assert "0 steps" in str(summary)


def test_exceptions_inside_pass_and_end_the_scope() -> None:
    """Whatever is raised inside comes out as it was, and the thread is free again."""
    for error in (KeyError("mine"), KeyboardInterrupt(), SystemExit(3)):
        with pytest.raises(type(error)) as caught, MemoryBudget(UNLIMITED):
            raise error
        assert caught.value is error
    with MemoryBudget(UNLIMITED):
        step()


def test_graph_outlives_its_scope() -> None:
    """A backward after the stop finds what it needs."""
    plain = step()
    for decisions in ("recompute", "swap"):
        x = torch.linspace(-1, 1, 64 * 64).view(64, 64).requires_grad_()
        with MemoryBudget(UNLIMITED, Config(decisions=decisions, tier="memory")):
            total = (x * 2).sin().exp().sum()
        total.backward()
        assert x.grad is not None
        assert torch.equal(x.grad, plain)


def test_a_lost_budget_can_be_stopped() -> None:
    """A notebook cell that ran twice has lost the first one: `current` finds it, and the error says so."""
    assert MemoryBudget.current() is None
    MemoryBudget(UNLIMITED).start()
    with pytest.raises(ScopeError, match=r"MemoryBudget\.current\(\)\.stop\(\)"):
        MemoryBudget(UNLIMITED).start()
    lost = MemoryBudget.current()
    assert lost is not None
    found_elsewhere: list[MemoryBudget | None] = []
    assert in_thread(lambda: found_elsewhere.append(MemoryBudget.current())) is None
    assert found_elsewhere == [None]
    lost.stop()
    assert MemoryBudget.current() is None
    with MemoryBudget(UNLIMITED) as budget:
        assert MemoryBudget.current() is budget
        step()
    assert MemoryBudget.current() is None


# -- summaries


def test_summary_before_any_start_is_refused() -> None:
    """There is nothing to sum up."""
    with pytest.raises(ScopeError, match="never started"):
        MemoryBudget(UNLIMITED).summary()


def test_summary_while_running() -> None:
    """It may be asked at any time."""
    with MemoryBudget(UNLIMITED, Config(decisions="recompute")) as budget:
        before = budget.summary()
        step()
        after = budget.summary()
    assert before.num_recomputed_ops == 0
    assert after.num_recomputed_ops > 0
    assert budget.summary().num_recomputed_ops == after.num_recomputed_ops


def test_totals_and_steps_since_are_parts_of_the_summary() -> None:
    """What a callback reads in every step: totals, and the steps that it has not seen yet."""
    with MemoryBudget(UNLIMITED, Config(decisions="recompute")) as budget:
        assert budget.totals().num_steps == 0
        assert budget.steps_since(0) == ()
        for _ in range(4):
            step()
        totals = budget.totals()
    summary = budget.summary()
    assert totals.num_steps == 3  # the last one ends with the scope
    assert totals.op_time_s > 0
    assert 0 < totals.recompute_s <= summary.recompute_s
    assert budget.steps_since(0) == summary.steps
    assert budget.steps_since(3) == summary.steps[3:]
    assert budget.steps_since(4) == ()


def test_totals_before_any_start_are_refused() -> None:
    """There is nothing to add up."""
    with pytest.raises(ScopeError, match="never started"):
        MemoryBudget(UNLIMITED).totals()


def test_summary_says_which_budget() -> None:
    """The bytes, or None where no budget is consulted."""
    with MemoryBudget("1GiB") as budget:
        pass
    assert budget.summary().budget_bytes == 2**30
    with MemoryBudget("1GiB", Config(decisions="keep")) as budget:
        pass
    assert budget.summary().budget_bytes is None


def test_keeping_everything_moves_nothing() -> None:
    """The negative control of every other decision."""
    with MemoryBudget(UNLIMITED, Config(decisions="keep")) as budget:
        step()
    summary = budget.summary()
    assert (
        summary.swapped_out_bytes,
        summary.swapped_in_bytes,
        summary.recomputed_bytes,
        summary.num_recomputed_ops,
    ) == (0, 0, 0, 0)


# -- decisions


def test_callable_is_told_what_is_saved() -> None:
    """Op, module path, shape, dtype, bytes and position of each saved buffer, in the order of saving."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(8, 32)
            self.act = nn.GELU()
            self.down = nn.Linear(32, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.down(self.act(self.up(x))).tanh()

    model = nn.Sequential(Block(), Block()).double()
    told: list[SavedBuffer] = []

    def decide(buffer: SavedBuffer) -> str:
        told.append(buffer)
        return "keep"

    with MemoryBudget(UNLIMITED, Config(decisions=decide)):
        for _ in range(2):
            (model(torch.randn(4, 8, dtype=torch.float64)) * 1).pow(2).sum().backward()
    first, second = told[: len(told) // 2], told[len(told) // 2 :]
    assert [buffer.index for buffer in first] == list(range(len(first)))
    assert [(b.index, b.op, b.module, b.shape) for b in second] == [(b.index, b.op, b.module, b.shape) for b in first]
    by_module = {(buffer.module, buffer.op) for buffer in first}
    assert ("0.act", "aten.addmm.default") in by_module
    assert ("1.down", "aten.gelu.default") in by_module
    assert ("1", "aten.tanh.default") in by_module
    assert ("", "aten.mul.Tensor") in by_module
    assert {buffer.dtype for buffer in first} == {"float64"}
    gelu = next(buffer for buffer in first if buffer.module == "0.down")
    assert (gelu.shape, gelu.size_bytes) == ((4, 32), 4 * 32 * 8)


def test_callable_decides_each_buffer() -> None:
    """Its answers are carried out, one by one."""
    for swapped in ("mul", "exp"):
        told: list[int] = []

        def decide(buffer: SavedBuffer, swapped: str = swapped, told: list[int] = told) -> str:
            if swapped in buffer.op:
                told.append(buffer.size_bytes)
                return "swap"
            return "keep"

        with MemoryBudget(UNLIMITED, Config(decisions=decide, tier="memory")) as budget:
            step()
        summary = budget.summary()
        assert summary.swapped_out_bytes == sum(told) > 0
        assert summary.num_recomputed_ops == 0


@pytest.mark.parametrize("answer", ["drop", None, 3, "KEEP", ""])
def test_wrong_answers_are_named(answer: Any) -> None:
    """The message says what came back, for which op, and what is allowed."""
    with (
        pytest.raises(ConfigError, match="must return 'recompute', 'swap' or 'keep'") as caught,
        MemoryBudget(UNLIMITED, Config(decisions=lambda _: answer)),
    ):
        step()
    assert repr(answer) in str(caught.value)
    with MemoryBudget(UNLIMITED):
        step()


def test_error_of_the_callable_comes_out() -> None:
    """A user's own mistake is shown as it is."""

    def fail(_: SavedBuffer) -> str:
        message = "mine"
        raise KeyError(message)

    with pytest.raises(KeyError, match="mine"), MemoryBudget(UNLIMITED, Config(decisions=fail)):
        step()


# -- threads


def test_budget_acts_on_its_thread_alone() -> None:
    """Another thread trains plainly meanwhile."""
    plain = step()
    results: list[torch.Tensor] = []
    with MemoryBudget(UNLIMITED, Config(decisions="recompute")) as budget:
        error = in_thread(lambda: results.append(step()))
        assert budget.summary().num_recomputed_ops == 0
    assert error is None
    assert torch.equal(results[0], plain)


def test_training_on_another_thread_is_told(caplog: pytest.LogCaptureFixture) -> None:
    """One warning that names the remedy, and a summary without steps; a thread with its own budget is left in peace."""
    warn_once.cache_clear()

    def train_inside() -> None:
        with MemoryBudget(UNLIMITED):
            step()

    with MemoryBudget(UNLIMITED) as budget:
        in_thread(train_inside)
        assert but_of_absence(caplog.messages) == []
        in_thread(step)
        in_thread(step)
    (warning,) = [message for message in caplog.messages if "a thread that did not start a MemoryBudget" in message]
    assert "or start one on this thread" in warning
    assert "no training step was seen on this thread" in str(budget.summary())
    caplog.clear()
    step()
    assert caplog.messages == []


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_training_in_a_forked_process_is_told() -> None:
    """It runs without the budget, and says so once in its log."""
    reader, writer = os.pipe()
    with MemoryBudget(UNLIMITED):
        child = os.fork()
        if child == 0:
            warn_once.cache_clear()
            handler = logging.Handler()
            handler.emit = lambda record: os.write(writer, record.getMessage().encode() + b"\n") and None  # pyright: ignore[reportAttributeAccessIssue]
            logging.getLogger("torchdelta").addHandler(handler)
            step()
            step()
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as told:
        lines = told.read().splitlines()
    os.waitpid(child, 0)
    assert len(lines) == 1
    assert "a forked process trains" in lines[0]


def test_two_threads_each_with_its_own_budget() -> None:
    """Budgets of several threads run beside each other, with the same bits."""
    plain = step()
    barrier = threading.Barrier(2)
    results: dict[str, tuple[torch.Tensor, Any]] = {}
    errors: list[BaseException] = []

    def train(decisions: str) -> None:
        try:
            with MemoryBudget(UNLIMITED, Config(decisions=decisions, tier="memory")) as budget:
                for _ in range(5):
                    barrier.wait(timeout=60)
                    grad = step()
            results[decisions] = (grad, budget.summary())
        except Exception as error:  # noqa: BLE001 - judged by the caller
            errors.append(error)

    threads = [threading.Thread(target=train, args=(decisions,)) for decisions in ("recompute", "swap")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert all(torch.equal(grad, plain) for grad, _ in results.values())
    assert results["recompute"][1].num_recomputed_ops > 0
    assert results["recompute"][1].swapped_out_bytes == 0
    assert results["swap"][1].swapped_out_bytes > 0
    assert results["swap"][1].num_recomputed_ops == 0


def test_module_paths_are_told_per_thread() -> None:
    """Modules that run on another thread do not appear in this one's paths."""
    told: list[str] = []
    inside, done = threading.Event(), threading.Event()

    class Waits(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            inside.set()
            assert done.wait(timeout=60)
            return x

    def decide(buffer: SavedBuffer) -> str:
        told.append(buffer.module)
        return "keep"

    with MemoryBudget(UNLIMITED, Config(decisions=decide)):
        thread = threading.Thread(target=lambda: nn.Sequential(Waits())(torch.zeros(1)))
        thread.start()
        assert inside.wait(timeout=60)
        x = torch.randn(8, 8, requires_grad=True)
        (x * 2).sin().sum().backward()
        done.set()
        thread.join()
    assert told
    assert set(told) == {""}


def test_stop_of_another_thread_is_refused() -> None:
    """The scope stays open, and its own thread can still close it."""
    budget = MemoryBudget(UNLIMITED)
    budget.start()
    try:
        error = in_thread(budget.stop)
        assert isinstance(error, ScopeError)
        assert "same one" in str(error)
    finally:
        budget.stop()
    with budget:
        step()


# -- impossible budgets


def test_budget_error_is_an_out_of_memory_error() -> None:
    """Its base, its one argument, its phrase, its numbers."""
    with pytest.raises(BudgetError) as caught, MemoryBudget(20_000):
        step(256)
    error = caught.value
    assert isinstance(error, torch.OutOfMemoryError)
    assert isinstance(error, RuntimeError)
    assert isinstance(error, TorchdeltaError)
    assert len(error.args) == 1
    assert " out of memory." in error.args[0]
    assert error.budget_bytes == 20_000
    assert error.least_budget_bytes > 20_000
    assert error.op
    assert error.op in str(error)


def test_thread_is_free_after_a_budget_error() -> None:
    """Everything is taken off again, and the next step runs."""
    plain = step()
    for _ in range(2):
        with pytest.raises(BudgetError), MemoryBudget(20_000):
            step(256)
    with MemoryBudget(UNLIMITED):
        assert torch.equal(step(), plain)
    assert torch.equal(step(), plain)


def test_batch_size_finder_reacts_to_it() -> None:
    """`accelerate.utils.find_executable_batch_size` shrinks the batch until the step fits."""
    model = nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32))
    tried: list[int] = []

    @accelerate.utils.find_executable_batch_size(starting_batch_size=4096)
    def train(batch_size: int) -> int:
        tried.append(batch_size)
        budget = MemoryBudget(2**20, Config(tier="memory"))
        budget.start()
        try:
            model(torch.ones(batch_size, 32)).sum().backward()
        finally:
            budget.stop()
        return batch_size

    fits = train()
    assert tried[0] == 4096
    assert 16 <= fits < 4096
    assert tried[-1] == fits
