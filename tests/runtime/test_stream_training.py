"""The real runtime on a tier whose copies happen later, at random: the same bits, inside every budget."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from tests.runtime.programs import UNLIMITED, Attention, Residual, mlp, running, same_bits, train
from tests.runtime.tiers.simulated import SimulatedEngine
from torchdelta import BudgetError
from torchdelta.runtime.tiers import ENGINES
from torchdelta.runtime.tiers.pinned import PinnedTier, StreamTransfer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

HOST_BYTES = 3 << 20
MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "perceptron": (lambda: mlp(64, 4, dropout=0.1), (96, 64)),
    "attention": (lambda: nn.Sequential(Attention(), Attention()), (8, 16, 32)),
    "residual": (lambda: nn.Sequential(Residual(), Residual(), Residual()), (4, 8, 16, 16)),
}
_plain: dict[tuple[str, str], tuple[list[torch.Tensor], int]] = {}


class Bench:
    """Opens simulated engines for the CPU's tensors, and watches storages that die under a copy."""

    def __init__(self) -> None:
        self.engine: SimulatedEngine | None = None
        self.seed = 0
        self.kind: type[SimulatedEngine] = SimulatedEngine
        self.graveyard: list[torch.UntypedStorage] | None = None  # keeps what would be written after its death

    def open(self, _: torch.device) -> SimulatedEngine:
        """Make the engine of the next tier."""
        self.engine = self.kind(self.seed, is_eager=True)
        return self.engine


@pytest.fixture(scope="module")
def bench() -> Iterator[Bench]:
    """Let every tier of this module be one of a simulated device."""
    bench = Bench()
    start = PinnedTier.start_copy

    def watched_start(self: PinnedTier, slot: Any, storage: torch.UntypedStorage, *, is_read: bool) -> StreamTransfer:
        transfer = start(self, slot, storage, is_read=is_read)
        engine, event = self.engine, transfer.event
        if not isinstance(engine, SimulatedEngine):
            return transfer

        def died() -> None:
            if event is not None and not event.is_reached:
                engine.complaints.append(f"a storage died while {event.queue} copied it")

        weakref.finalize(storage, died)
        if is_read and bench.graveyard is not None:
            bench.graveyard.append(storage)
        return transfer

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(ENGINES, "cpu", bench.open)
        patch.setattr(PinnedTier, "start_copy", watched_start)
        yield bench
    _plain.clear()


def plain_run(name: str, device: str = "cpu") -> tuple[list[torch.Tensor], int]:
    """Train a model with nothing evicted, once: what it gives, and the bytes that it needs beyond what lived before."""
    if (name, device) not in _plain:
        _plain[name, device] = run(name, UNLIMITED, device)
    return _plain[name, device]


def run(name: str, budget: int | str, device: str = "cpu", **options: Any) -> tuple[list[torch.Tensor], int]:
    """Train a model from fixed seeds inside a budget; a budget in bytes comes on top of what lives already."""
    make, shape = MODELS[name]
    torch.manual_seed(11)
    model, x = make().to(device), torch.randn(shape).to(device)
    with running(UNLIMITED) as (_, session):
        base_bytes = session.ledger.usage.live_bytes
    whole = budget if isinstance(budget, str) else base_bytes + budget
    with running(whole, **options) as (memory_budget, _):
        observed = [tensor.cpu() for tensor in train(model, x)]
    summary = memory_budget.summary()
    if not isinstance(budget, str):
        assert summary.peak_bytes <= whole
    return observed, summary.peak_bytes - base_bytes


@pytest.mark.rest
@given(
    name=st.sampled_from(sorted(MODELS)),
    tier=st.sampled_from(["memory", "memory", "disk"]),
    policy=st.sampled_from(["swap-only", "swap-only", "torchdelta", "delta-2022"]),
    share=st.floats(0.3, 1.0),
    host_bytes=st.sampled_from([HOST_BYTES, 1 << 17, 1 << 15]),
    seed=st.integers(0, 1 << 20),
)
@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
def test_steps_are_the_same_bits_under_pressure(
    bench: Bench,
    tmp_path: Path,
    name: str,
    tier: str,
    policy: str,
    share: float,
    host_bytes: int,
    seed: int,
) -> None:
    """At any budget a run either gives the same bits within it, or says that it cannot."""
    expected, peak_bytes = plain_run(name)
    bench.seed, bench.engine = seed, None
    try:
        observed, _ = run(
            name,
            int(peak_bytes * share),
            tier=tier,
            policy=policy,
            host_budget=host_bytes,
            swap_dir=tmp_path,
        )
    except BudgetError:
        assert share < 1
    else:
        assert same_bits(observed, expected)
    engine = bench.engine
    if engine is not None:
        assert engine.complaints == []
        assert engine.pinned == {}
        assert engine.peak_pinned_bytes <= host_bytes


@pytest.mark.parametrize("name", sorted(MODELS))
def test_forced_swaps_are_the_same_bits(bench: Bench, name: str) -> None:
    """Everything that is saved leaves and comes back, and the host waits for nothing but the close."""
    expected, _ = plain_run(name)
    for seed in range(4):
        bench.seed, bench.engine = seed, None
        observed, _ = run(name, UNLIMITED, decisions="swap", host_budget=HOST_BYTES)
        assert same_bits(observed, expected)
        engine = bench.engine
        assert engine is not None
        assert engine.num_copies > 50
        assert engine.complaints == []
        assert engine.num_host_waits == 2
        assert engine.pinned == {}


def test_failing_copies_cost_no_bits(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies that are refused at random: what was to leave stays or is recomputed, what was to come back is too."""
    expected, peak_bytes = plain_run("perceptron")

    class Failing(SimulatedEngine):
        def copy(self, *args: Any, **kwargs: Any) -> None:
            """Refuse one in ten."""
            if self.random.random() < 0.1:
                raise RuntimeError("CUDA error: refused")
            super().copy(*args, **kwargs)

    monkeypatch.setattr(bench, "kind", Failing)
    for seed in range(6):
        bench.seed = seed
        observed, _ = run("perceptron", int(peak_bytes * 0.8), host_budget=HOST_BYTES)
        assert same_bits(observed, expected)
        assert bench.engine is not None
        assert bench.engine.complaints == []


def test_a_runtime_that_does_not_wait_is_noticed(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: without the compute stream's wait, the bits are others."""
    expected, _ = plain_run("perceptron")

    class Impatient(SimulatedEngine):
        def follow(self, stream: Any, event: Any) -> None:
            """Forget the waits of the compute stream for what comes in."""
            if (stream.value, event.queue) != ("compute", "in"):
                super().follow(stream, event)

    monkeypatch.setattr(bench, "kind", Impatient)
    monkeypatch.setattr(bench, "graveyard", [])
    num_noticed = 0
    for seed in range(6):
        bench.seed = seed
        observed, _ = run("perceptron", UNLIMITED, decisions="swap", host_budget=HOST_BYTES)
        num_noticed += not same_bits(observed, expected)
    assert num_noticed > 0
