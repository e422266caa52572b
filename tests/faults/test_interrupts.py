"""Ctrl-C at any line of the runtime: it is never lost, internal state stays consistent, and so do the bits."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import torchdelta.runtime
from tests.collector import leave_out_many
from tests.faults.switches import disabled
from tests.runtime.programs import running
from tests.sampling import sample
from torchdelta import MemoryBudget

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torchdelta.runtime.session import Session

RUNTIME = str(Path(torchdelta.runtime.__file__).parent)
NUM_PLACES = 40
ROOT = Path(__file__).parents[2]
BROKEN = 9
CASES = [("torchdelta", "memory"), ("recompute-only", "memory"), ("swap-only", "disk")]


@pytest.fixture(autouse=True)
def _handler() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


class Place:
    """A trace function that counts the lines of the runtime, and sends a signal at one of them."""

    def __init__(self, position: int) -> None:
        self.position = position
        self.num_lines = 0

    def __call__(self, frame: Any, event: str, _argument: Any) -> Any:
        """Follow the runtime's frames."""
        if not frame.f_code.co_filename.startswith(RUNTIME):
            return None
        if event in {"call", "line"}:
            self.num_lines += 1
            if self.num_lines == self.position:
                signal.raise_signal(signal.SIGINT)
        return self

    def run(self, function: Callable[[], Any]) -> bool:
        """Run a function. Returns whether KeyboardInterrupt came out of it, or soon after."""
        try:
            sys.settrace(self)
            try:
                function()
            finally:
                sys.settrace(None)
            give_up_s = time.monotonic() + (5.0 if 0 <= self.position <= self.num_lines else 0.0)
            while time.monotonic() < give_up_s:
                time.sleep(0.001)  # one that a destructor put off
        except KeyboardInterrupt:
            return True
        return False


def make_step(width: int = 32, momentum: float = 0.0) -> Callable[[], list[torch.Tensor]]:
    """Return a step that gives the same each time."""
    torch.manual_seed(0)
    blocks = (nn.Sequential(nn.Linear(width, width), nn.LayerNorm(width), nn.GELU(), nn.Dropout(0.1)) for _ in range(4))
    model = nn.Sequential(*blocks)
    # With a dampening of 1, the states of the first step stay as they are.
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0, momentum=momentum, dampening=momentum, foreach=False)
    x = torch.randn(64, width)

    def step() -> list[torch.Tensor]:
        optimizer.zero_grad()
        torch.manual_seed(5)
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        states = [state["momentum_buffer"].clone() for state in optimizer.state.values() if momentum]
        return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None), *states]

    return step


@contextlib.contextmanager
def complaining() -> Iterator[list[str]]:
    """Collect complaints; at the end, what was raised where nobody could catch it is one, too."""
    wrong: list[str] = []
    swallowed: list[Any] = []
    hook, sys.unraisablehook = sys.unraisablehook, swallowed.append
    try:
        yield wrong
    finally:
        sys.unraisablehook = hook
    wrong += [f"swallowed: {report.exc_value!r}" for report in swallowed]


def plain_step() -> tuple[Callable[[], list[torch.Tensor]], list[torch.Tensor], int]:
    """Return a step, what it gives where everything fits, and a budget in bytes that something has to leave for."""
    step = make_step()
    with MemoryBudget("1GiB") as unlimited:
        step()
        expected = step()
    return step, expected, unlimited.summary().peak_bytes * 3 // 4


def interrupt(
    session: Session,
    step: Callable[[], list[torch.Tensor]],
    expected: list[torch.Tensor],
    wrong: list[str],
    observe: Callable[[], tuple[list[torch.Tensor], str | None]] | None = None,
) -> None:
    """Interrupt a step at places spread over all lines that it runs, up to the first after which something is wrong.

    Args:
        session: What the step runs in.
        step: It gives the same each time.
        expected: What it gives.
        wrong: Gets what went wrong where.
        observe: Runs the steps after an interrupted one; returns what the last one gave, and a complaint if there is
            one. None for one step.
    """

    def state() -> tuple[int, ...]:
        gc.collect()
        ledger = session.ledger
        if session.room.persistents is not None:  # which of them are here differs from step to step
            session.room.persistents.bring_all()
            session.room.persistents.emptying.spoil_all()
        # A scan for a new trace finds whatever lives in the process, an empty tensor of another test included.
        num_records = sum(record.size_bytes > 0 for record in ledger.records.values())
        return ledger.num_handles, len(ledger.held), num_records, ledger.usage.live_bytes

    counter = Place(-1)
    counter.run(step)
    leave_out_many()  # what the first steps have imported would be visited after each of the others
    whole = state()
    stride = max(1, counter.num_lines // NUM_PLACES)
    for position in range(stride // 2, counter.num_lines, stride):
        place = Place(position)
        was_raised = place.run(step)
        observed, complaint = (step(), None) if observe is None else observe()
        if place.num_lines >= position and not was_raised:
            wrong.append(f"{position}: the interrupt was lost")
        if not all(torch.equal(a, b) for a, b in zip(observed, expected, strict=True)):
            wrong.append(f"{position}: other bits")
        if complaint is not None:
            wrong.append(f"{position}: {complaint}")
        del observed
        if state() != whole:
            wrong.append(f"{position}: {state()} is left where {whole} was")
        if wrong:  # what comes after the first one may be its consequence
            return


def broken_places(policy: str, tier: str) -> list[str]:
    """Interrupt steps within a budget. Return what went wrong where."""
    step, expected, budget_bytes = plain_step()
    with complaining() as wrong, running(budget_bytes, policy=policy, tier=tier) as (_, session):
        for _ in range(3):
            step()
        interrupt(session, step, expected, wrong)
        assert wrong or session.counters.num_evictions > 0
    return wrong


@pytest.mark.parametrize(("policy", "tier"), sample(CASES, 1))
def test_an_interrupt_anywhere_in_the_runtime(policy: str, tier: str) -> None:
    """After a Ctrl-C at any line nothing is left, and the next step has the bits of a plain one."""
    assert broken_places(policy, tier) == []


@pytest.mark.parametrize("tier", sample(["memory", "disk"], 1))
def test_an_interrupt_where_everything_swaps(tier: str) -> None:
    """The same where parameters, gradients and optimizer states leave, and come back ahead of their use."""
    step = make_step(128, momentum=1.0)
    expected = step()
    parameter_bytes = 4 * 4 * 128 * 128
    with MemoryBudget("1GiB") as unlimited:
        step()
    budget_bytes = unlimited.summary().peak_bytes - parameter_bytes
    with complaining() as wrong, running(budget_bytes, decision_class="all", tier=tier) as (_, session):
        for _ in range(3):
            step()
        interrupt(session, step, expected, wrong)
        persistents = session.room.persistents
        assert persistents is not None
        assert wrong or persistents.emptying.num_read_ahead > NUM_PLACES
    assert wrong == []


@pytest.mark.rest
def test_without_sections_an_interrupt_divides_the_books() -> None:
    """The control: the same places, with interrupts handled at once wherever they come.

    It runs in a process of its own: what it leaves behind can be a lock that nobody releases.
    """
    control = "from tests.faults.test_interrupts import without_sections; without_sections()"
    process = subprocess.Popen([sys.executable, "-c", control], cwd=ROOT)
    try:
        assert process.wait(timeout=20) == BROKEN
    except subprocess.TimeoutExpired:
        pass  # a deadlock is what sections prevent, too
    finally:
        process.kill()
        process.wait()


def without_sections() -> None:
    """Interrupt a step without sections, and end the process: with `BROKEN` if that broke anything."""
    with disabled("interrupts"):
        try:
            wrong = broken_places("recompute-only", "memory")
        except Exception as error:  # noqa: BLE001 - whatever inconsistent state leads to
            wrong = [repr(error)]
    os._exit(BROKEN if wrong else 0)


def test_handlers_are_put_back() -> None:
    """A scope wraps the handlers that it finds while it is open, and no longer; a user's new one stays."""

    def mine(_number: int, _frame: Any) -> None:
        """Do nothing."""

    with MemoryBudget("1GiB"):
        assert signal.getsignal(signal.SIGINT) is not signal.default_int_handler
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    with MemoryBudget("1GiB"):
        signal.signal(signal.SIGINT, mine)
    assert signal.getsignal(signal.SIGINT) is mine


def test_handlers_that_come_back_later_are_taken_off_by_the_next_scope() -> None:
    """A program that saves the handlers inside of a scope and puts them back after it."""
    with MemoryBudget("1GiB"):
        saved = signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, saved)
    with MemoryBudget("1GiB"):
        assert signal.getsignal(signal.SIGINT) is not signal.default_int_handler
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_second_interrupt_gets_through() -> None:
    """Whoever presses Ctrl-C twice while something hangs gets out."""
    from torchdelta.runtime import interrupts

    interrupts.start()
    try:
        outer = interrupts.enter()
        try:
            signal.raise_signal(signal.SIGINT)
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)
        finally:
            interrupts.leave(outer)
    finally:
        interrupts.stop()


def test_sections_of_other_threads_defer_nothing() -> None:
    """A thread that is inside the runtime does not keep the main one from being interrupted."""
    from torchdelta.runtime import interrupts

    is_inside, may_leave = threading.Event(), threading.Event()

    def work() -> None:
        outer = interrupts.enter()
        is_inside.set()
        may_leave.wait(10)
        interrupts.leave(outer)

    thread = threading.Thread(target=work)
    interrupts.start()
    thread.start()
    try:
        is_inside.wait(10)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    finally:
        may_leave.set()
        thread.join()
        interrupts.stop()


def test_a_handler_that_returns_leaves_the_section_as_it_is() -> None:
    """A signal that only sets a flag, twice in a section: the next Ctrl-C still waits."""
    from torchdelta.runtime import interrupts

    seen: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, _frame: seen.append(number))

    @interrupts.shielded
    def section() -> None:
        signal.raise_signal(signal.SIGUSR1)
        signal.raise_signal(signal.SIGUSR1)
        signal.raise_signal(signal.SIGINT)
        seen.append(0)

    interrupts.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            section()
    finally:
        interrupts.stop()
        signal.signal(signal.SIGUSR1, before)
    assert seen[-1] == 0


def test_a_scope_that_cannot_start_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Handlers, hooks and modes are as they were, and the next scope starts."""
    from torchdelta.runtime.observe import step_traces

    def refuse(*_: Any, **__: Any) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(step_traces, "scan_storages", refuse)
        with pytest.raises(MemoryError):
            MemoryBudget("1GiB").start()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    with MemoryBudget("1GiB"):
        make_step()()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_interrupt_as_a_scope_begins_to_end_waits_until_it_has_ended() -> None:
    """Else the budget would run on, and no other one could start."""

    def trace(frame: Any, event: str, _argument: Any) -> None:
        if event == "call" and frame.f_code is MemoryBudget.__exit__.__code__:
            sys.settrace(None)
            signal.raise_signal(signal.SIGINT)

    try:
        with pytest.raises(KeyboardInterrupt):  # noqa: PT012 - it comes at the end of the block, or right after it
            with MemoryBudget("1GiB"):
                sys.settrace(trace)
            time.sleep(5.0)
    finally:
        sys.settrace(None)
    assert MemoryBudget.current() is None
    with MemoryBudget("1GiB"):
        pass
