"""Followed steps are recorded in part on an accelerator, too, and what they replay on the native tape."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
import torch
from torch import nn

from tests.accelerator.watch import StandinWatch
from tests.following import follow_anyway, following_drawn, planned_here
from tests.runtime.parts import running_session
from tests.same_bits.judge import DEVICE, Scope, bits_of, run, state_of
from torchdelta import Config, MemoryBudget
from torchdelta._torch.device import allocator_statistics, reset_allocator_peak
from torchdelta.native.build import status_before_use
from torchdelta.native.gate import load_gate
from torchdelta.native.saved_hooks import MODULE
from torchdelta.native.tape import load_tape
from torchdelta.runtime.current import current_session
from torchdelta.runtime.device import accelerator

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

pytestmark = [
    pytest.mark.accelerator,
    pytest.mark.skipif(not status_before_use(MODULE, "").is_on, reason="needs the native parts"),
]
NUM_STEPS = 14
CHANGES_AT = 10


@pytest.fixture(autouse=True)
def _watched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Watch the stand-in's allocator, too, and have the gate built."""
    if DEVICE != "cuda":
        monkeypatch.setattr(accelerator, "new_watch", StandinWatch)
    load_tape()
    load_gate()


class Net(nn.Module):
    """Convolutions with batch norms, linear layers, dropout, an op in place, and ops with a number on the CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.convolutions = nn.ModuleList(nn.Conv2d(8, 8, 3, padding=1) for _ in range(3))
        self.norms = nn.ModuleList(nn.BatchNorm2d(8) for _ in range(3))
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))
        self.drop = nn.Dropout(0.2)

    def forward(self, x: torch.Tensor, stream: contextlib.AbstractContextManager[Any]) -> torch.Tensor:
        for convolution, norm in zip(self.convolutions, self.norms, strict=True):
            x = torch.relu_(norm(convolution(x))) + x
        x = x.reshape(-1, 32)
        with stream:
            for layer in self.layers:
                x = x + self.drop(nn.functional.gelu(layer(x) * torch.tensor(0.5, device="cpu")))
        return x.square().mean()


class Training:
    """A step function. From one step on, the linear layers run inside a context."""

    def __init__(
        self,
        inside: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
        changes_at: int = CHANGES_AT,
    ) -> None:
        self.inside = inside
        self.changes_at = changes_at
        self.num_partial = self.num_native = self.num_resumed = self.num_native_later = 0

    def __call__(self, scope: Scope) -> dict[str, Any]:
        """Train."""
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        losses = []
        with scope():
            for index in range(NUM_STEPS):
                context = self.inside() if index >= self.changes_at else contextlib.nullcontext()
                loss = model(torch.randn(4, 8, 8, 8), context)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(bits_of(loss))
                del loss  # with the nodes of its leaves, which remember their stream
                if index == self.changes_at - 1 and current_session() is not None:
                    partial = running_session().partial
                    self.num_partial, self.num_native = partial.num_steps, partial.lane.num_steps if partial.lane else 0
            if current_session() is not None:
                partial = running_session().partial
                self.num_resumed = partial.num_resumed
                self.num_native_later = partial.lane.num_steps - self.num_native if partial.lane else 0
        return state_of(model, losses=losses)


def assert_same_bits(training: Training, seed: int = 0) -> None:
    """Follow a drawn program, and compare everything with the plain run."""
    plain = run(training)
    assert plain.message == ""
    ours = run(training, lambda: following_drawn(seed))
    assert ours.message == ""
    assert ours.observed == plain.observed


@pytest.mark.parametrize("seed", range(8))
def test_a_drawn_program_gives_the_same_bits(device: torch.device, seed: int) -> None:
    """Odd seeds swap as well."""
    del device
    training = Training()
    assert_same_bits(training, seed)
    assert training.num_partial >= 3


def test_most_programs_without_swaps_use_the_native_tape(device: torch.device) -> None:
    """The others replay what was made before the first saved tensor."""
    del device
    num_native: list[int] = []
    for seed in range(0, 8, 2):
        training = Training()
        run(training, lambda seed=seed: following_drawn(seed))
        num_native.append(training.num_native)
    assert sum(number >= 1 for number in num_native) >= 2


class Elsewhere:
    """A context in another stream of the device, in which a graph may seem to be captured."""

    def __init__(self, device: torch.device, *, is_capturing: bool) -> None:
        self._device = device
        self._is_capturing = is_capturing
        self._stream = torch.Stream(device)

    @contextlib.contextmanager
    def __call__(self) -> Generator[None]:
        """Enter it."""
        home = torch.accelerator.current_stream(self._device)
        self._stream.wait_stream(home)
        session = running_session() if current_session() is not None and self._is_capturing else None
        with self._stream:
            if session is None:
                yield
            else:
                with mock.patch.object(session.device, "is_capturing", return_value=True):
                    yield
                lane = session.partial.lane
                assert lane is None or not lane.is_on  # its copies would be part of the graph
        home.wait_stream(self._stream)


@pytest.mark.parametrize("is_capturing", [False, True], ids=["stream", "capture"])
def test_the_same_ops_in_another_stream_end_the_outline(device: torch.device, *, is_capturing: bool) -> None:
    """What another stream uses must not leave. While a graph is captured, nothing is recorded."""
    training = Training(Elsewhere(device, is_capturing=is_capturing))
    assert_same_bits(training)
    assert training.num_native >= 1
    assert training.num_resumed >= 1


@pytest.mark.parametrize("changes_at", range(2, 8))
def test_a_capture_in_any_phase(device: torch.device, changes_at: int) -> None:
    """Also while an outline is learned, or before there is one."""
    training = Training(Elsewhere(device, is_capturing=True), changes_at)
    assert_same_bits(training)


def test_a_backward_while_a_graph_is_captured(device: torch.device) -> None:
    """It runs as it is: no hook is put on its nodes, and the step goes on as before."""

    @contextlib.contextmanager
    def inside() -> Generator[None]:
        weight = torch.ones(8, 8, device=device, requires_grad=True)
        if current_session() is None:
            torch.autograd.grad(weight.square().sum(), weight)
        else:
            session = running_session()
            num_before = session.steps.num_steps
            with mock.patch.object(session.device, "is_capturing", return_value=True):
                torch.autograd.grad(weight.square().sum(), weight)
            assert session.steps.num_steps == num_before
        yield

    training = Training(inside)
    assert_same_bits(training)
    assert training.num_partial >= 3


def test_a_device_without_memory(device: torch.device) -> None:
    """An op that finds none is recorded and run again, as in steps that are recorded as a whole."""
    if DEVICE == "cuda":
        pytest.skip("an allocation cannot be made to fail there")

    @contextlib.contextmanager
    def inside() -> Generator[None]:
        if current_session() is not None:
            torch.get_device_module(device).watch.fail_once(1)
        yield

    training = Training(inside)
    assert_same_bits(training)
    assert training.num_native >= 1
    assert training.num_resumed >= 1


def test_other_settings_than_the_learned_ones(device: torch.device) -> None:
    """Which ops give the same bits again depends on settings, and is found out where an outline is learned."""
    del device

    @contextlib.contextmanager
    def with_settings(scope: Scope) -> Generator[Any]:
        try:
            with scope() as budget:
                yield budget
        finally:
            torch.set_float32_matmul_precision("highest")

    def inside() -> contextlib.AbstractContextManager[None]:
        torch.set_float32_matmul_precision("high")
        return contextlib.nullcontext()

    training = Training(inside)
    plain = run(training, lambda: with_settings(contextlib.nullcontext))
    assert plain.message == ""
    ours = run(training, lambda: with_settings(lambda: following_drawn(0)))
    assert ours.message == ""
    assert ours.observed == plain.observed
    assert training.num_native >= 1
    assert training.num_native_later == 0


def test_a_budget_holds(device: torch.device) -> None:
    """Steps that are recorded in part stay inside a budget by the allocator's own count."""
    peaks_bytes: list[int] = []

    def step(scope: Scope) -> dict[str, Any]:
        model = nn.Sequential(*(part for _ in range(8) for part in (nn.Linear(256, 256), nn.GELU(), nn.Dropout(0.1))))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        peaks_bytes.clear()
        losses = []
        with scope() as budget:
            if budget is not None:
                follow_anyway(running_session())
            for _ in range(NUM_STEPS):
                reset_allocator_peak(device)
                loss = model(torch.randn(1024, 256)).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(bits_of(loss))
                statistics = allocator_statistics(device)
                assert statistics is not None
                peaks_bytes.append(int(statistics["peak"]))
            if budget is not None:
                found.append((running_session().partial.num_steps, budget.summary()))
        return state_of(model, losses=losses)

    found: list[Any] = []
    plain = run(step)
    budget_bytes = int(0.6 * max(peaks_bytes))
    with planned_here(None, least_bytes=1):
        ours = run(step, lambda: MemoryBudget(budget_bytes, Config(planner="torchdelta", tier="memory")))
    assert ours.message == ""
    assert ours.observed == plain.observed
    num_partial, summary = found[0]
    assert num_partial >= 3
    assert summary.follow.num_followed_steps >= 5
    assert max(peaks_bytes[2:]) <= budget_bytes
