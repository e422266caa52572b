"""A budget with an arena: the same bits, the same budgets, whatever comes between the steps; plainly without one."""

from __future__ import annotations

import array
import io
import os
import resource
import signal
import sys
import time
from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn

from tests.native.without import WITHOUT_NATIVE, run_without
from tests.runtime.programs import UNLIMITED, running
from torchdelta import Config, MemoryBudget
from torchdelta.arena import placing
from torchdelta.arena.placing import Placing, arena_for
from torchdelta.errors import NativeError
from torchdelta.native.arena import arena_status, new_arena
from torchdelta.notices import warn_once

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torchdelta.runtime.session import Session

STEPS = 8


@pytest.fixture(autouse=True)
def _has_arena() -> None:
    made = new_arena()
    if isinstance(made, NativeError):
        pytest.skip(f"no arena here: {made}")


@pytest.fixture
def _helper_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Place in this process, which has its solvers compiled already: a helper process takes its time to start."""
    from torchdelta.pool.helper import serve

    def ask(_self: Placing, sizes: list[int], starts: list[int], ends: list[int], num_moments: int) -> array.array[int]:
        request = f"{len(sizes)} {num_moments} 64\n".encode() + array.array("q", [*sizes, *starts, *ends]).tobytes()
        answers = io.BytesIO()
        serve(io.BytesIO(request), answers)
        assert answers.getvalue().startswith(b"ok")
        return array.array("q", answers.getvalue().partition(b"\n")[2])

    monkeypatch.setattr(Placing, "ask", ask)
    monkeypatch.setattr(Placing, "start_helper", lambda _self: None)


class Program:
    """A model with dropout and an optimizer, trained on batches of the sizes that are asked for."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        blocks = [
            nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Dropout(0.2), nn.Linear(256, 64), nn.LayerNorm(64))
            for _ in range(4)
        ]
        self.model = nn.Sequential(*blocks)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.losses: list[float] = []
        self.outputs: list[torch.Tensor] = []

    def step(self, batch_size: int = 128) -> None:
        """Train one step."""
        self.outputs = [self.model(torch.randn(batch_size, 64))]
        loss = self.outputs[0].square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses.append(loss.item())

    def bits(self) -> list[object]:
        """Return all that a run leaves behind."""
        return [self.losses, *(p.tolist() for p in self.model.parameters()), torch.get_rng_state().tolist()]


def both(
    run: Callable[[Program, Session | None], None], **options: object
) -> tuple[list[object], list[object], Session]:
    """Run without the library and inside a budget with an arena. Returns the bits of both, and the session."""
    plain = Program()
    run(plain, None)
    plain_bits = plain.bits()
    placed = Program()
    with running(**({"budget": UNLIMITED} | options), arena=True) as (_, session):  # type: ignore[arg-type]
        assert session.placing.arena is not None
        run(placed, session)
        bits = placed.bits()
    return plain_bits, bits, session


def figures(session: Session) -> dict[str, int]:
    """Return what the session's arena has done."""
    assert session.placing.arena is not None
    return session.placing.arena.figures()


@pytest.mark.usefixtures("_helper_here")
@pytest.mark.parametrize(
    "options", [{}, {"decisions": "keep"}, {"decisions": "recompute"}, {"count_allocations": False}]
)
def test_same_bits_and_every_step_planned(options: dict[str, object]) -> None:
    """From the fourth step on all allocations are placed: the first has the optimizer's states, two are to learn."""

    def run(program: Program, _session: Session | None) -> None:
        for _ in range(STEPS):
            program.step()

    plain, placed, session = both(run, **options)
    assert placed == plain
    assert figures(session)["num_planned_steps"] >= STEPS - 3
    assert figures(session)["num_clashes"] == 0
    assert figures(session)["num_placed"] > 20 * (STEPS - 3)


@pytest.mark.usefixtures("_helper_here")
def test_varying_batches_have_their_plans() -> None:
    """Three sizes in turn: three plans, the same bits."""

    def run(program: Program, _session: Session | None) -> None:
        for number in range(18):
            program.step((96, 128, 80)[number % 3])

    plain, placed, session = both(run)
    assert placed == plain
    assert figures(session)["num_planned_steps"] >= 8


@pytest.mark.usefixtures("_helper_here")
@pytest.mark.parametrize("policy", ["recompute-only", "swap-only", "torchdelta"])
def test_budgets_hold_as_without_it(policy: str) -> None:
    """What is placed counts against the budget like everything else, and what leaves is really freed."""

    def run(program: Program, _session: Session | None) -> None:
        for _ in range(STEPS):
            program.step(512)

    with running() as (budget, _):
        run(Program(), None)
    peak_bytes = budget.summary().peak_bytes
    plain, placed, session = both(run, budget=int(0.7 * peak_bytes), policy=policy)
    assert placed == plain
    summary = session.summary()
    assert summary.swapped_out_bytes + summary.recomputed_bytes > 0
    assert summary.peak_bytes <= 0.7 * peak_bytes
    assert figures(session)["num_placed"] > 0


class Broken(Exception):  # noqa: N818 - no error of anybody's
    """What a user's code may raise."""


@pytest.fixture
def _has_handler() -> Iterator[None]:
    """Let a SIGINT raise: a job in the background is born with it ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("_helper_here", "_has_handler")
@pytest.mark.parametrize("place", ["forward", "backward"])
@pytest.mark.parametrize("error", [Broken, KeyboardInterrupt])
def test_a_step_that_is_lost_loses_nothing_else(place: str, error: type[BaseException]) -> None:
    """An exception, or a Ctrl-C, in the middle of a placed step: those after it are right, and are placed again."""

    def fail(*_: object) -> None:
        if error is KeyboardInterrupt:
            signal.raise_signal(signal.SIGINT)
        else:
            raise Broken

    def run(program: Program, _session: Session | None) -> None:
        for number in range(12):
            if number == 5:
                middle = program.model[2]
                hook = middle.register_forward_hook(fail) if place == "forward" else None
                backward_hook = middle.register_full_backward_hook(fail) if place == "backward" else None
                with pytest.raises(error):
                    program.step()
                for each in (hook, backward_hook):
                    if each is not None:
                        each.remove()
                program.optimizer.zero_grad()
            program.step()

    plain, placed, session = both(run)
    assert placed == plain
    assert figures(session)["num_planned_steps"] >= 6


@pytest.mark.usefixtures("_helper_here")
def test_evaluation_between_the_steps_is_no_trouble() -> None:
    """The step after it begins differently and is allocated as ever; the next ones are placed."""

    def run(program: Program, _session: Session | None) -> None:
        for number in range(12):
            if number % 4 == 3:
                with torch.no_grad():
                    program.losses.append(program.model(torch.randn(200, 64)).sum().item())
            program.step()

    plain, placed, session = both(run)
    assert placed == plain
    assert figures(session)["num_planned_steps"] >= 4


@pytest.mark.usefixtures("_helper_here")
def test_a_scope_can_be_opened_again_and_what_it_made_stays() -> None:
    """Outputs of one scope are read in the next and after it; with them goes the last mapped byte."""
    before_bytes = arena_status().figures.mapped_bytes
    program = Program()
    budget = MemoryBudget(UNLIMITED, Config(arena=True))
    kept: list[tuple[torch.Tensor, list[float]]] = []
    for _ in range(2):
        with budget:
            for _ in range(5):
                program.step()
            gradient = torch.autograd.grad(program.model(torch.randn(300, 64)).sum(), program.model[0][0].weight)[0]
        kept.append((gradient, gradient.flatten().tolist()))
    assert all(tensor.flatten().tolist() == content for tensor, content in kept)
    assert all(bool(p.isfinite().all()) for p in program.model.parameters())
    del kept, gradient, program, budget
    assert arena_status().figures.mapped_bytes == before_bytes


@pytest.mark.usefixtures("_helper_here")
def test_workers_of_a_data_loader_allocate_as_ever() -> None:
    """They are forked in the middle of it all; their batches come whole."""
    data = torch.utils.data.TensorDataset(torch.arange(64 * 4096.0).view(64, 4096))
    expected = data.tensors[0].sum().item()
    with running(arena=True):
        program = Program()
        total = 0.0
        for (batch,) in torch.utils.data.DataLoader(data, batch_size=16, num_workers=2):
            total += batch.sum().item()
            program.step()
    assert total == expected


def test_the_helper_process_places_and_is_ended(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The real one: its plan is as good as the bound or near it, it ends when idle, and none is left at the stop."""
    monkeypatch.setattr(placing, "IDLE_STEPS", 2)
    program = Program()
    with caplog.at_level("DEBUG", "torchdelta"), running(arena=True) as (_, session):
        assert session.placing.arena is not None
        program.step()
        helper = session.placing.helper
        assert helper is not None
        for _ in range(7):
            program.step()
        assert session.placing.helper is None
        assert helper.returncode is not None
    assert any("steps had planned addresses" in record.message for record in caplog.records)
    said = [record.args for record in caplog.records if "placed in" in record.msg]
    assert said
    assert all(args[3] < 2 for args in said)  # type: ignore[index, operator, misc]
    assert figures(session)["num_planned_steps"] >= 4


NO_PLAN = {
    "raise SystemExit(3)": "its helper process has ended",
    "import sys; print('a word'); sys.exit('no more memory\\n')": "its helper process answered: a word",
    "import sys; print('first', file=sys.stderr); sys.exit('no more memory\\n')": (
        "its helper process has ended: no more memory"
    ),
    "input(); print('error no room'); input()": "its helper process answered: error no room",
    "import os; os.read(0, 9); os.write(1, b'\\xff\\xfe\\n'); os.read(0, 1 << 20)": "codec can't decode",
    "import os; os.read(0, 9); os.write(1, b'ok 64 64\\n')": "its helper process has ended",
    (
        "import sys; count = int(sys.stdin.buffer.readline().split()[0]);"
        "sys.stdout.buffer.write(b'ok one two\\n' + bytes(8 * count))"
    ): "invalid literal for int()",
}


@pytest.mark.parametrize("code", NO_PLAN)
def test_without_the_helper_training_goes_on(
    code: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that ends, refuses or talks nonsense is told of once; memory is allocated as ever."""
    monkeypatch.setattr(placing, "COMMAND", (sys.executable, "-c", code))
    warn_once.cache_clear()

    def run(program: Program, _session: Session | None) -> None:
        for _ in range(5):
            program.step()

    plain, placed, session = both(run)
    assert placed == plain
    assert figures(session)["num_plans"] == 0
    assert session.placing.helper is None
    warnings = [record.message for record in caplog.records if "stops planning steps" in record.message]
    assert len(warnings) == 1
    assert NO_PLAN[code] in warnings[0]


class OneRecording:
    """An arena with one recording after each step, as long as it is asked to be."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.num_waiting = 0
        self.plans: list[bytes] = []

    def start(self) -> None:
        """Do nothing."""

    def stop(self) -> None:
        """Do nothing."""

    def cut(self) -> int:
        """Have another one wait."""
        self.num_waiting += 1
        return 2

    def recording(self) -> tuple[bytes, bytes] | None:
        """Return allocations that live till the next one."""
        if self.num_waiting == 0:
            return None
        self.num_waiting -= 1
        sizes, ends = array.array("q", [64] * self.length), array.array("q", range(1, self.length + 1))
        return sizes.tobytes(), ends.tobytes()

    def plan(self, offsets_bytes: bytes, /) -> None:
        """Keep it."""
        self.plans.append(offsets_bytes)

    def figures(self) -> dict[str, int]:
        """Return what is logged at the end."""
        return {"num_steps": 0, "num_planned_steps": 0}


def test_a_helper_that_hangs_is_ended_and_nothing_is_kept_for_it(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It reads nothing of a request that is more than a pipe holds: the time limit ends that, too."""
    monkeypatch.setattr(placing, "COMMAND", (sys.executable, "-c", "import time; time.sleep(60)"))
    monkeypatch.setattr(placing, "ANSWER_TIME_S", 1.0)
    warn_once.cache_clear()
    arena = OneRecording(50_000)
    placer = Placing(arena)
    placer.start()
    start_s = time.monotonic()
    for _ in range(4):
        placer.on_step_end()
    assert time.monotonic() - start_s < 30
    assert placer.helper is None
    assert (arena.num_waiting, arena.plans) == (0, [])
    warnings = [record.message for record in caplog.records if "stops planning steps" in record.message]
    assert warnings == ["the arena stops planning steps: its helper process gave no answer within 1 s"]


def test_many_open_files_and_a_long_step_are_no_trouble(monkeypatch: pytest.MonkeyPatch) -> None:
    """Descriptors above 1,023, and a request and an answer that take many turns."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 2048:
        pytest.skip("not so many files may be opened")
    code = (
        "import sys, array; count = int(sys.stdin.buffer.readline().split()[0]);"
        "sizes = array.array('q', sys.stdin.buffer.read(24 * count))[:count];"
        "sys.stdout.buffer.write(b'ok 64 64\\n' + sizes.tobytes()); sys.stdout.flush(); sys.stdin.buffer.read()"
    )
    monkeypatch.setattr(placing, "COMMAND", (sys.executable, "-c", code))
    arena = OneRecording(50_000)
    placer = Placing(arena)
    held: list[int] = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2048), hard))
    try:
        while not held or held[-1] < 1100:
            held.append(os.dup(0))
        placer.start()
        placer.on_step_end()
    finally:
        placer.stop()
        for descriptor in held:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert arena.plans == [array.array("q", [64] * 50_000).tobytes()]


def test_on_another_device_it_says_so_and_does_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """There is no pretence of planned addresses where there are none."""
    warn_once.cache_clear()
    for _ in range(2):
        assert arena_for(Config(arena=True), torch.device("xpu", 0)) is None
    assert arena_for(Config(), torch.device("xpu", 0)) is None
    assert [record.message for record in caplog.records] == [
        "no arena: it does not support xpu; memory is allocated without it"
    ]


@pytest.mark.rest
@pytest.mark.parametrize(("environment", "expected"), WITHOUT_NATIVE)
def test_without_a_compiler_it_warns_once_and_trains(
    environment: dict[str, str], expected: str, tmp_path: os.PathLike[str]
) -> None:
    """One line of warning, and plain allocation."""
    program = """
import logging, torch
logging.basicConfig()
from torchdelta import Config, MemoryBudget
from torchdelta.native.arena import arena_status
for _ in range(2):
    with MemoryBudget("1GiB", Config(arena=True)) as budget:
        torch.nn.Linear(64, 64)(torch.randn(200, 64)).sum().backward()
status = arena_status()
print(status.is_on, status.reason, len(budget.summary().steps))
"""
    done = run_without(environment, program, tmp_path)
    assert done.stdout.startswith("False")
    assert expected in done.stdout
    assert done.stdout.rstrip().endswith("1")
    warnings = [line for line in done.stderr.splitlines() if "no arena" in line]
    assert len(warnings) == 1
    assert expected in warnings[0]
