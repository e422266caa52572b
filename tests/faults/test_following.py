"""A fault while a plan is followed is what it is without one: one lost step or none, and later steps are followed.

| fault | test |
|---|---|
| raised anywhere in a followed step | `..._in_a_followed_step` |
| Ctrl-C at any line of the runtime in a followed step | `..._interrupt_...` |
| the disk fails while a planner's program swaps | `..._disk_...` |
| forked workers, an `os.fork()` in a followed step | `..._fork...` |
| a second thread that trains | `..._threads_...` |
| the helper is killed, the scope left, the process killed | `..._helper_...`, `..._while_a_plan_is_made` |

`test_steps.py` and `test_disk.py` run with drawn programs, too; here a planner plans within a budget.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.faults.places import PLACES, striking
from tests.faults.programs import (
    FAULTY_STEP,
    PRESSED_SHARE,
    Loop,
    Report,
    base_bytes,
    complaints,
    needed_bytes,
    no_fault,
    run,
)
from tests.faults.test_disk import FAILURES, replacing
from tests.faults.test_interrupts import complaining, interrupt, plain_step
from tests.faults.test_processes import script
from tests.faults.test_steps import (
    ERRORS,
    KEPT_BY_THE_ENGINE,
    num_followed_steps,
    plain_with,
    run_with_own_numbers,
    strike_with,
    train_in_threads,
    unequal,
)
from tests.following import drawn_plan, follow_anyway, planned_here
from tests.runtime.parts import running_session
from tests.runtime.programs import running
from tests.sampling import sample
from torchdelta import Config, MemoryBudget
from torchdelta.notices import warn_once
from torchdelta.runtime.follow import automatic, planning

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

    from tests.faults.programs import Scope

LEAST_BYTES = 4096
POLICIES = ("torchdelta", "swap-only", "recompute-only")
"""What makes room where the program does not: a planner decides between both actions by itself."""
NUM_STEPS = FAULTY_STEP + 4


def planned(directory: Path, policy: str = "torchdelta", **options: Any) -> Scope:
    """Return a scope in which a planner's program is followed from the third step on, within a share of the need."""
    budget_bytes = base_bytes() + int(PRESSED_SHARE * needed_bytes())
    config = Config(planner="torchdelta", tier="disk", swap_dir=directory, policy=policy, **options)

    @contextlib.contextmanager
    def scope() -> Iterator[MemoryBudget]:
        with planned_here(least_bytes=LEAST_BYTES), MemoryBudget(budget_bytes, config) as budget:
            yield budget

    return scope


@pytest.fixture(scope="module")
def plain() -> Report:
    """Train without a budget and without a fault."""
    return run(no_fault, num_steps=NUM_STEPS)


# -- exceptions


# An odd stride, so that the sample has all kinds and policies.
@pytest.mark.parametrize(("place", "kind", "policy"), sample(itertools.product(PLACES, ERRORS, POLICIES), 7))
def test_a_fault_in_a_followed_step(place: str, kind: str, policy: str, tmp_path: Path) -> None:
    """The step is lost as plain loses it, nothing else is, and the next one but one is followed at the latest."""
    plain = plain_with(place, kind)
    ours = run(striking(place, strike_with(kind)), planned(tmp_path, policy))
    late = f"after step {FAULTY_STEP}, " if place in KEPT_BY_THE_ENGINE else "nothing is late"
    assert [complaint for complaint in complaints(plain, ours) if not complaint.startswith(late)] == []
    assert plain.raised == [ERRORS[kind]]
    assert num_followed_steps(ours) >= 3  # one before the fault, two after it


def broken_places(policy: str) -> list[str]:
    """Interrupt followed steps. Return what went wrong where."""
    step, expected, budget_bytes = plain_step()
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with (
            complaining() as wrong,
            planned_here(least_bytes=LEAST_BYTES),
            running(budget_bytes, planner="torchdelta", policy=policy) as (_, session),
        ):

            def observe() -> tuple[list[torch.Tensor], str | None]:
                step()  # the interrupted one may have been left at its end
                num_followed = session.follower.num_followed_steps
                observed = step()
                is_followed = session.follower.num_followed_steps == num_followed + 1
                return observed, None if is_followed else f"not followed any more: {session.follower.latest_reason}"

            for _ in range(5):
                step()
            assert session.follower.num_followed_steps == 3
            interrupt(session, step, expected, wrong, observe)
    finally:
        signal.signal(signal.SIGINT, handler)
    return wrong


@pytest.mark.parametrize("policy", sample(POLICIES, 1))
def test_an_interrupt_anywhere_in_a_followed_step(policy: str) -> None:
    """After a Ctrl-C at any line of the runtime nothing is left, and steps are followed with the bits of plain ones."""
    assert broken_places(policy) == []


# -- disks


@pytest.mark.parametrize("name", sample(FAILURES, 3))
def test_a_disk_that_fails_in_a_followed_step(name: str, plain: Report, tmp_path: Path) -> None:
    """Forward cannot write, or backward cannot read: nothing is raised, and later steps swap by the program again."""
    ours = run(FAILURES[name], planned(tmp_path, "swap-only"), num_steps=NUM_STEPS)
    assert complaints(plain, ours) == []
    assert num_followed_steps(ours) >= NUM_STEPS - 3
    assert ours.budget is not None
    assert ours.budget.summary().swapped_out_bytes > 0


def test_a_disk_that_never_works_again(plain: Report, tmp_path: Path) -> None:
    """From a followed step on every write fails: what was to be swapped stays or is made again, with the same bits."""
    refuse = replacing("pwrite", lambda *_: (_ for _ in ()).throw(OSError(errno.EIO, "broken")))

    @contextlib.contextmanager
    def for_good(loop: Loop) -> Iterator[None]:
        stack.enter_context(refuse(loop))
        yield

    with contextlib.ExitStack() as stack:
        ours = run(for_good, planned(tmp_path), num_steps=NUM_STEPS)
    assert complaints(plain, ours) == []


# -- processes and threads


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("place", ["forward", "backward"])
def test_a_fork_in_a_followed_step(place: str, plain: Report, tmp_path: Path) -> None:
    """The child has no scope and ends; the parent's step is followed to its end."""
    children: list[int] = []

    def fork() -> None:
        child = os.fork()
        if child == 0:
            os._exit(0 if MemoryBudget.current() is None else 1)
        children.append(child)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0

    ours = run(striking(place, fork), planned(tmp_path), num_steps=NUM_STEPS)
    assert children
    # Other libraries end their threads where a process forks.
    assert [complaint for complaint in complaints(plain, ours) if "num_threads" not in complaint] == []
    assert ours.levels[-1].num_threads <= ours.levels[0].num_threads
    assert num_followed_steps(ours) >= NUM_STEPS - 3


def test_threads_that_follow_at_the_same_time(tmp_path: Path) -> None:
    """Two threads follow programs of their own beside a plain one: each gets the bits that it gets alone."""
    alone = run_with_own_numbers(contextlib.nullcontext)
    budgets: list[MemoryBudget] = []

    @contextlib.contextmanager
    def scope() -> Iterator[MemoryBudget]:  # without a limit: what the other threads allocate counts against it, too
        with MemoryBudget("1TiB", Config(planner="torchdelta", tier="disk", swap_dir=tmp_path)) as budget:
            budgets.append(budget)
            follow_anyway(running_session())
            yield budget

    with planned_here(lambda trace, _machine, _budget_bytes: drawn_plan(trace, 0), least_bytes=0):
        reports = train_in_threads([scope, scope, contextlib.nullcontext])
    for report in reports:
        assert isinstance(report, Report), report
        assert unequal(alone, report) == []
    for budget in budgets:
        follow = budget.summary().follow
        assert follow is not None
        assert follow.num_followed_steps > 0


# -- while a plan is made

HANGS = (sys.executable, "-c", "import time; time.sleep(600)")


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return an empty directory in which the files of planning are made."""
    (tmp_path / "files").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "files"))
    return tmp_path / "files"


def planned_by_a_helper(directory: Path, planner: str = "torchdelta") -> Scope:
    """Return a scope whose steps are planned by another process."""
    budget_bytes = base_bytes() + int(PRESSED_SHARE * needed_bytes())
    return lambda: MemoryBudget(budget_bytes, Config(planner=planner, tier="disk", swap_dir=directory))


def helper_of(loop: Loop) -> Any:
    """Return the process that plans."""
    assert loop.session is not None
    planning = loop.session.programs.planning
    assert planning is not None
    return planning._helper  # noqa: SLF001 - the process is what the tests are about


@pytest.mark.parametrize("planner", ["torchdelta", "auto"])
def test_a_helper_that_is_killed(
    planner: str,
    plain: Report,
    tmp_path: Path,
    files: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """One warning, no further plan, and the training goes on with the same bits."""
    monkeypatch.setattr(planning, "COMMAND", HANGS)
    warn_once.cache_clear()
    killed: list[Any] = []

    @contextlib.contextmanager
    def kill(loop: Loop) -> Iterator[None]:
        if loop.session is not None:
            killed.append(helper_of(loop))
            killed[0].kill()
            killed[0].wait()
        yield

    if planner == "auto":
        monkeypatch.setattr(automatic, "PLAN_COST_S", 1e-9)
        monkeypatch.setattr(automatic, "FEWEST_TIMED", 1)
    ours = run(kill, planned_by_a_helper(tmp_path, planner), num_steps=NUM_STEPS)
    assert killed
    assert complaints(plain, ours) == []
    assert list(files.iterdir()) == []
    told = [record.getMessage() for record in caplog.records if "no further step is planned" in record.getMessage()]
    assert len(told) == 1
    assert "exit code -9" in told[0]


@pytest.mark.parametrize("kind", ["", *ERRORS])
def test_a_scope_left_while_a_plan_is_made(
    kind: str, tmp_path: Path, files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At its end or by an exception: the helper has ended, and its files are gone."""
    monkeypatch.setattr(planning, "COMMAND", HANGS)
    helpers: list[Any] = []

    @contextlib.contextmanager
    def note(loop: Loop) -> Iterator[None]:
        helpers.append(helper_of(loop))
        assert helpers[0].poll() is None
        assert list(files.iterdir()) != []
        yield

    planned_scope = planned_by_a_helper(tmp_path)

    @contextlib.contextmanager
    def scope() -> Iterator[MemoryBudget]:
        with planned_scope() as budget:
            yield budget
            if kind:
                strike_with(kind)()

    with pytest.raises(ERRORS[kind]) if kind else contextlib.nullcontext():
        run(note, scope)
    assert helpers[0].returncode == -signal.SIGKILL
    assert list(files.iterdir()) == []


@pytest.mark.rest
def test_a_process_killed_while_a_plan_is_made(tmp_path: Path) -> None:
    """SIGKILL: the helper notices, removes its files and ends."""
    (tmp_path / "files").mkdir()
    code = """
import contextlib, os, signal, sys, tempfile
from pathlib import Path
from tests.faults.programs import run
from tests.faults.test_following import helper_of, planned_by_a_helper
tempfile.tempdir = sys.argv[1]
@contextlib.contextmanager
def kill(loop):
    print(helper_of(loop).pid, len(os.listdir(sys.argv[1])), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
    yield
run(kill, planned_by_a_helper(Path(sys.argv[1]).parent))
"""
    process = script(code, tmp_path / "files")
    printed, complained = process.communicate(timeout=300)
    assert process.returncode == -signal.SIGKILL, complained
    helper, num_files = map(int, printed.split())
    assert num_files == 1
    give_up_s = time.monotonic() + 120
    while (list((tmp_path / "files").iterdir()) or _is_alive(helper)) and time.monotonic() < give_up_s:
        time.sleep(0.05)
    assert list((tmp_path / "files").iterdir()) == []
    assert not _is_alive(helper)


def _is_alive(process_id: int) -> bool:
    try:
        os.kill(process_id, 0)
    except ProcessLookupError:
        return False
    stat = Path(f"/proc/{process_id}/stat")
    return not (stat.exists() and stat.read_text().rpartition(")")[2].split()[0] == "Z")  # one that nobody waits for
