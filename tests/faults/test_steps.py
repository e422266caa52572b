"""A step that fails anywhere is one lost step: memory is back, and training goes on with the plain run's bits.

| fault | handling | test | control |
|---|---|---|---|
| raised in forward, hooks, packs | handles let go when they die | `..._in_a_step` | `release` |
| raised in backward, its hooks, unpacks | the same; the engine takes back a failed node's mode | the same | `release` |
| raised in a replay | locks are given back | `..._in_a_replay` | locks kept |
| raised in the optimizer | the next forward ends its step | `..._failed_optimizer...` | stuck |
| backward never called, graphs kept, out of order | handles count per buffer | `..._graphs_...` | `release` |
| garbage collector off | no cycles hold storages; all of the above run with it off | all | a cycle |
| out of memory inside an op | runtime/memory/retry.py | tests/runtime/memory/test_retry.py | `oom-retry` |
| cycles that hold tensors | runtime/memory/room.py | tests/runtime/memory/test_garbage.py | `garbage` |
| threads that train at the same time | the session is the thread's own | `..._threads_...` | one for all |
| processes, forks, kills, disks | | test_processes.py, test_disk.py | there |
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.faults.places import PLACES, striking
from tests.faults.programs import (
    BATCH,
    FAULTY_STEP,
    NUM_STEPS,
    WIDTH,
    InjectedError,
    Loop,
    Report,
    Scope,
    build,
    complaints,
    forced,
    level,
    no_fault,
    pressed,
    run,
    unequal,
)
from tests.faults.switches import disabled
from tests.following import following_drawn
from tests.same_bits.judge import Bits, bits_of, seed_everything
from tests.sampling import sample
from torchdelta import MemoryBudget
from torchdelta.runtime import current, patches, session
from torchdelta.runtime.memory import replay
from torchdelta.runtime.session import Session
from torchdelta.runtime.state.steps import StepTracker

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

CONDITIONS: dict[str, Callable[[Path], Scope]] = {
    "recompute": lambda directory: forced("recompute", directory),
    "swap": lambda directory: forced("swap", directory),
    "pressed": pressed,
    "followed": lambda directory: lambda: following_drawn(swap_dir=directory, tier="disk"),
}
ERRORS: dict[str, type[BaseException]] = {"error": InjectedError, "interrupt": KeyboardInterrupt}
# Where these raise, the engine itself keeps the rest of the graph on the thread's queue until its next backward.
KEPT_BY_THE_ENGINE = ("leaf-hook", "accumulate-hook")
_plain: dict[tuple[str, str], Report] = {}


def strike_with(kind: str) -> Callable[[], None]:
    """Return code that raises."""

    def strike() -> None:
        raise ERRORS[kind]("injected")

    return strike


def plain_with(place: str, kind: str) -> Report:
    """Train plainly and suffer the same fault, once for all tests."""
    if (place, kind) not in _plain:
        _plain[place, kind] = run(striking(place, strike_with(kind)))
    return _plain[place, kind]


# An odd stride, so that the sample has all places, kinds and conditions.
@pytest.mark.parametrize(("place", "kind", "condition"), sample(itertools.product(PLACES, ERRORS, CONDITIONS), 29))
def test_a_fault_in_a_step(place: str, kind: str, condition: str, tmp_path: Path) -> None:
    """The step is lost as plain loses it, and nothing else is."""
    plain = plain_with(place, kind)
    assert plain.raised == [ERRORS[kind]]
    ours = run(striking(place, strike_with(kind)), CONDITIONS[condition](tmp_path))
    late = f"after step {FAULTY_STEP}, " if place in KEPT_BY_THE_ENGINE else "nothing is late"
    assert [complaint for complaint in complaints(plain, ours) if not complaint.startswith(late)] == []
    if condition == "followed":  # before the fault, and after it; a step after a lost forward may be left to the policy
        assert num_followed_steps(ours) >= NUM_STEPS - FAULTY_STEP - 1


def num_followed_steps(ours: Report) -> int:
    """Return how many steps of a loop carried a program out to the end."""
    assert ours.budget is not None
    return ours.budget._past[-1].follower.num_followed_steps  # noqa: SLF001 - no summary counts it


@pytest.mark.parametrize("place", sample(PLACES, 4))
def test_control_without_the_release_memory_stays(place: str, tmp_path: Path) -> None:
    """The negative control: handles that nobody counts out keep what they held."""
    with disabled("release"):
        ours = run(striking(place, strike_with("error")), CONDITIONS["swap"](tmp_path))
    assert any("num_handles" in complaint for complaint in complaints(plain_with(place, "error"), ours))


@contextlib.contextmanager
def replay_fails(kind: str, seen: list[str]) -> Iterator[None]:
    """Raise in the middle of the second op that is recomputed."""
    original = replay.replay_op

    def failing(entry: Any, args: Any, kwargs: Any) -> Any:
        seen.append(entry.facts.name)
        if len(seen) == 2:
            raise ERRORS[kind]("injected")
        return original(entry, args, kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replay, "replay_op", failing)
        yield


@pytest.mark.parametrize("kind", ERRORS)
@pytest.mark.parametrize("condition", ["recompute", "pressed"])
def test_a_fault_in_a_replay(kind: str, condition: str, tmp_path: Path) -> None:
    """To the user it is a backward that failed: the same bits as a plain run whose backward fails."""
    seen: list[str] = []

    @contextlib.contextmanager
    def fault(_loop: Loop) -> Iterator[None]:
        with replay_fails(kind, seen):
            yield

    scope = pressed(tmp_path, policy="recompute-only") if condition == "pressed" else CONDITIONS[condition](tmp_path)
    ours = run(fault, scope)
    assert len(seen) >= 2
    assert complaints(plain_with("backward", kind), ours) == []


@pytest.mark.parametrize("kind", ERRORS)
def test_a_replay_that_failed_can_be_tried_again(kind: str) -> None:
    """Nothing of the graph is lost by it: backward called once more gives the plain gradients."""

    def gradients(scope: contextlib.AbstractContextManager[Any], *, fails: bool) -> dict[str, Any]:
        seed_everything()
        model, _, _ = build()
        with scope:
            loss = model(torch.randn(BATCH, WIDTH)).square().mean()
            if fails:
                with replay_fails(kind, []), pytest.raises(ERRORS[kind]):
                    loss.backward(retain_graph=True)
                model.zero_grad()
            loss.backward()
        return bits_of({name: parameter.grad for name, parameter in model.named_parameters()})

    plain = gradients(contextlib.nullcontext(), fails=False)
    assert gradients(forced("recompute")(), fails=True) == plain


def test_control_without_the_handling_sources_stay_locked() -> None:
    """The negative control: what a failed replay counted on can never leave again."""
    taken: list[Any] = []
    original = replay.Replayer.plan

    def plan(self: Any, target: Any, locked: dict[int, Any]) -> Any:
        found = original(self, target, locked)
        taken.extend(locked.values())
        locked.clear()  # what `finally` would unlock
        return found

    def num_locked(*, handled: bool) -> int:
        taken.clear()
        seed_everything()
        model, _, _ = build()
        with pytest.MonkeyPatch.context() as patch, forced("recompute")():
            if not handled:
                patch.setattr(replay.Replayer, "plan", plan)
            loss = model(torch.randn(BATCH, WIDTH)).square().mean()
            with replay_fails("error", []), pytest.raises(InjectedError):
                loss.backward(retain_graph=True)
            running = session.current_session()
            assert running is not None
            return sum(buffer.num_locks for buffer in running.ledger.held.values()) + sum(b.num_locks for b in taken)

    assert num_locked(handled=True) == 0
    assert num_locked(handled=False) > 0


def phase_after_a_failed_optimizer() -> str:
    """Fail in an optimizer's step, begin the next forward, and return what the runtime takes that for."""
    model, optimizer, _ = build()
    optimizer.in_step = strike_with("error")
    with MemoryBudget("1TiB"):
        model(torch.randn(BATCH, WIDTH)).square().mean().backward()
        with pytest.raises(InjectedError):
            optimizer.step()
        running = session.current_session()
        assert running is not None
        assert running.steps.phase == "optimizer"
        model(torch.randn(BATCH, WIDTH))
        return running.steps.phase


def test_the_forward_after_a_failed_optimizer_is_a_forward() -> None:
    """A shortage in it is looked into as one of a new step, not as the optimizer's."""
    assert phase_after_a_failed_optimizer() == "forward"


def test_control_without_the_handling_the_optimizer_never_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: the next forward counts as the optimizer's."""
    original = StepTracker.on_save

    def stuck(self: StepTracker) -> None:
        was = self.is_in_optimizer
        original(self)
        self.is_in_optimizer = was

    monkeypatch.setattr(StepTracker, "on_save", stuck)
    assert phase_after_a_failed_optimizer() == "optimizer"


def graphs_in_disorder(scope: contextlib.AbstractContextManager[Any]) -> tuple[dict[str, Any], list[Any]]:
    """Train with graphs that nobody runs, that live for several steps, and that are run or freed out of order."""
    seed_everything()
    model, optimizer, _ = build()
    kept: list[torch.Tensor] = []
    levels = []
    losses = []
    with scope as budget:
        for index in range(8):
            first, second, third = (model(torch.randn(BATCH, WIDTH)).square().mean() for _ in range(3))
            losses += [first.item(), second.item(), third.item()]
            third.backward()  # the last made is the first run
            first.backward()
            kept.append(second)  # its backward is never called, and it lives on for three steps
            if index >= 3:
                kept.pop((index * 2) % 3)
            del first, second, third
            optimizer.zero_grad(set_to_none=index % 2 == 0)
        kept.clear()
        optimizer.zero_grad()
        if budget is not None:
            running = session.current_session()
            assert running is not None
            levels.append(level(running))
    return bits_of({**model.state_dict(), "losses": losses}), levels


@pytest.mark.parametrize("condition", CONDITIONS)
def test_graphs_may_live_and_die_in_any_order(condition: str, tmp_path: Path) -> None:
    """The same bits, and when the last is gone nothing is kept for any."""
    expected, _ = graphs_in_disorder(contextlib.nullcontext())
    scope = pressed(tmp_path, share=2.4) if condition == "pressed" else CONDITIONS[condition](tmp_path)
    observed, levels = graphs_in_disorder(scope())
    assert observed == expected
    assert levels[0].num_handles == levels[0].num_held == levels[0].tier_bytes == 0


def test_control_without_the_release_graphs_are_never_gone(tmp_path: Path) -> None:
    """The negative control: what a dead graph saved stays on the tier."""
    with disabled("release"):
        _, levels = graphs_in_disorder(CONDITIONS["swap"](tmp_path)())
    assert levels[0].num_handles > 0
    assert levels[0].tier_bytes > 0


def test_control_cycles_are_noticed_with_the_collector_off(tmp_path: Path) -> None:
    """The negative control: a handle that refers to itself through a cycle outlives its graph while nobody collects."""
    cycles: list[Any] = []
    original = session.SavedTensors.pack

    def pack(self: Any, tensor: torch.Tensor) -> Any:
        packed = original(self, tensor)
        cycle: dict[str, Any] = {"packed": packed}
        cycle["self"] = cycle
        return SimpleNamespace(cycle=cycle)

    def unpack(self: Any, packed: Any) -> torch.Tensor:
        return session.SavedTensors.plain_unpack(self, packed.cycle["packed"])  # type: ignore[attr-defined]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(session.SavedTensors, "plain_unpack", session.SavedTensors.unpack, raising=False)
        patch.setattr(session.SavedTensors, "pack", pack)
        patch.setattr(session.SavedTensors, "unpack", unpack)
        ours = run(no_fault, CONDITIONS["swap"](tmp_path))
    cycles.clear()
    assert any("num_handles" in complaint for complaint in complaints(run(no_fault), ours))


def train_in_threads(scopes: list[Scope]) -> list[Report | BaseException]:
    """Train in one thread for each scope, at the same time."""
    reports: list[Report | BaseException] = [InjectedError("did not run")] * len(scopes)
    start = threading.Barrier(len(scopes))

    def work(index: int) -> None:
        generator_lock.acquire()
        try:
            start_together(start)
            reports[index] = run_with_own_numbers(scopes[index])
        except BaseException as error:  # noqa: BLE001 - judged by the test
            reports[index] = error
        finally:
            generator_lock.release()

    generator_lock = threading.Semaphore(len(scopes))
    threads = [threading.Thread(target=work, args=(index,)) for index in range(len(scopes))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return reports


def start_together(barrier: threading.Barrier) -> None:
    """Wait for the others."""
    barrier.wait(timeout=60)


def run_with_own_numbers(scope: Scope) -> Report:
    """Train without the global generator, which threads share: no dropout, batches from a generator of its own."""
    numbers = torch.Generator().manual_seed(5)
    model = torch.nn.Sequential(
        *(
            torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.GELU(), torch.nn.LayerNorm(WIDTH))
            for _ in range(4)
        )
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=numbers) * 0.1)
    losses: list[float] = []
    with scope():
        for _ in range(12):
            loss = model(torch.randn(BATCH, WIDTH, generator=numbers)).square().mean()
            loss.backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    assert parameter.grad is not None
                    parameter.sub_(parameter.grad, alpha=0.05)
            model.zero_grad()
            losses.append(loss.item())
    return Report(observed=bits_of({**model.state_dict(), "losses": losses}), raised=[])


def test_threads_train_at_the_same_time(tmp_path: Path) -> None:
    """Two budgets and a plain thread: each gets the bits that it gets alone."""
    alone = run_with_own_numbers(contextlib.nullcontext)
    scopes = [CONDITIONS["recompute"](tmp_path), CONDITIONS["swap"](tmp_path), contextlib.nullcontext]
    for report in train_in_threads(scopes):
        assert isinstance(report, Report), report
        assert unequal(alone, report) == []
        assert all(isinstance(bits, Bits) or bits for bits in report.observed.values())


def test_control_one_session_for_all_threads_is_no_session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: where the session is not the thread's own, a second thread cannot open one."""
    started: list[Session] = []
    start = Session.start

    def noted_start(self: Session) -> None:
        start(self)
        started.append(self)

    monkeypatch.setattr(current, "of_thread", SimpleNamespace())
    monkeypatch.setattr(Session, "start", noted_start)
    reports = train_in_threads([CONDITIONS["recompute"](tmp_path), CONDITIONS["swap"](tmp_path)])
    for lost in started:  # a session that another thread has replaced cannot stop by itself
        if not lost.ledger.is_closing:
            current.set_current_session(lost)
            lost.stop()
    assert any(isinstance(report, BaseException) for report in reports)
    assert patches.num_sessions() == 0
    assert "resize_" not in vars(torch.UntypedStorage)
