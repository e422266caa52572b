"""One session, one device: what lies on the host or on a second device is known, replayed, and counts nothing."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import nn

from tests.same_bits.judge import DECISIONS, DEVICE, Scope, assert_same_bits, state_of
from torchdelta import BudgetError, Config, MemoryBudget
from torchdelta.aten.facts import facts_of
from torchdelta.runtime.current import current_session
from torchdelta.runtime.device.memory import session_device
from torchdelta.runtime.memory import replay
from torchdelta.runtime.state import tape
from torchdelta.runtime.state.tape import generator_of

pytestmark = pytest.mark.accelerator
aten = torch.ops.aten


def live_bytes() -> int:
    """Return what the running session counts."""
    session = current_session()
    assert session is not None
    return session.ledger.usage.live_bytes


def live_bytes_at_start() -> int:
    """Return what a session counts before anything is made in it."""
    with MemoryBudget("1GiB"):
        return live_bytes()


def test_the_session_is_for_the_current_device(device: torch.device, second_device: torch.device) -> None:
    """The device that is current at the start is held, by its index, and another that becomes current later is not."""
    assert session_device() == device
    with MemoryBudget("1GiB"):
        before_bytes = live_bytes()
        here = torch.ones(1000, device=device) * 2
        assert live_bytes() == before_bytes + 2 * 4000 or live_bytes() == before_bytes + 4000
        counted_bytes = live_bytes()
        elsewhere = [torch.ones(1000, device=second_device) * 2, torch.ones(1000, device="cpu") * 2]
        assert live_bytes() == counted_bytes
    torch.accelerator.set_device_index(1)
    try:
        assert session_device() == second_device
    finally:
        torch.accelerator.set_device_index(0)
    del here, elsewhere


def test_ops_on_the_host_need_nothing_of_the_budget(device: torch.device) -> None:
    """A batch that the host puts together may be larger than the budget. Then the same op on the device needs room."""
    rows = [torch.ones(1 << 20, device="cpu") for _ in range(8)]
    w = torch.ones(64, 64, requires_grad=True)
    with MemoryBudget(live_bytes_at_start() + (8 << 20), Config(tier="memory")):
        batch = torch.stack(rows)
        (w * 2).sum().backward()
        session = current_session()
        assert session is not None
        assert session.counters.num_evictions == 0
        needs, stack = session.recorder.needs, torch.ops.aten.stack.default
        on_device = [torch.ones(1 << 18) for _ in range(4)]
        assert needs.need(facts_of(stack), stack, (rows,), None).total_bytes == 0
        assert needs.need(facts_of(stack), stack, (on_device,), None).total_bytes == 4 << 20
        on_host = [row.cpu() for row in on_device]
        assert needs.need(facts_of(stack), stack, (on_host,), None).total_bytes == 0
        assert needs.need(facts_of(stack), stack, (on_device,), None).total_bytes == 4 << 20
        assert needs.need(facts_of(aten.ones.default), aten.ones.default, ([8],), {"device": device}).total_bytes > 0
    assert batch.device.type == "cpu"


@pytest.mark.usefixtures("device")
def test_a_least_budget_counts_nothing_of_the_host() -> None:
    """What the host makes after the op that did not fit is no part of the need."""
    rows = [torch.ones(1 << 22, device="cpu") for _ in range(8)]
    w = torch.ones(1 << 18, requires_grad=True)

    def least_bytes(*, uses_host: bool) -> int:
        def step() -> None:
            with MemoryBudget("2MiB", Config(tier="memory")):
                x = w * 2
                if uses_host:
                    torch.stack(rows).mul(2).sum()
                (x * x).sum().backward()

        with pytest.raises(BudgetError) as raised:
            step()
        return raised.value.least_budget_bytes

    assert least_bytes(uses_host=True) == least_bytes(uses_host=False)


def test_tensors_made_on_the_host_are_replayed_there(device: torch.device) -> None:
    """Masks and noise that the host makes, in place and by batch norm too, are sources of what the device saves."""

    def step(scope: Scope) -> dict[str, Any]:
        model, host_norm = nn.Linear(64, 64), nn.BatchNorm1d(64).cpu()
        with scope():
            for _ in range(2):
                mask = torch.zeros(32, 64, device="cpu")
                mask.bernoulli_(0.5)
                noise = host_norm(torch.randn(32, 64, device="cpu").mul(2).add_(1))
                hidden = model(torch.randn(32, 64)) * mask.to(device) + noise.to(device, non_blocking=True)
                # 0-dim on the host, as the seeds of attention are.
                scale = torch.tensor(0.5, device="cpu").exp()
                (hidden.sigmoid() * scale).pow(2).sum().backward()
        return state_of(model, host_norm)

    assert_same_bits(step)


def test_a_staging_buffer_that_is_filled_again(device: torch.device) -> None:
    """A batch that came through one host buffer is not copied from there a second time."""

    def step(scope: Scope) -> dict[str, Any]:
        model, staging = nn.Linear(64, 64), torch.zeros(32, 64, device="cpu")
        losses = []
        with scope():
            for value in range(3):
                # Through numpy, where no version counter tells.
                staging.numpy()[:] = value + 1
                batch = staging.to(device, non_blocking=True)
                loss = (model(batch.sin()) * batch.cos()).pow(2).mean()
                staging.numpy()[:] = -1
                loss.backward()
                losses.append(loss.detach())
        return state_of(model, losses=losses)

    assert_same_bits(step)


def test_random_numbers_of_both_kinds_in_one_step(device: torch.device) -> None:
    """Each op draws from its own device's generator, or from the one that it was given, in the replay as well."""

    def step(scope: Scope) -> dict[str, Any]:
        model = nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.5), nn.GELU(), nn.Dropout(0.5))
        own = torch.Generator(device=device)
        own.manual_seed(11)
        with scope():
            for _ in range(2):
                x = torch.randn(32, 64) + torch.randn(32, 64, device="cpu").to(device)
                x = (
                    x
                    + torch.rand(32, 64, generator=own)
                    + torch.rand_like(torch.ones(32, 64, device="cpu"), device=device)
                )
                (model(x) * torch.empty_like(x).normal_(generator=own).sigmoid()).pow(2).sum().backward()
        return state_of(model, own=own.get_state())

    assert_same_bits(step)


def test_the_generator_of_an_op(device: torch.device, second_device: torch.device) -> None:
    """A generator that is given counts first, then the device asked for, then that of the arguments."""
    defaults = torch.get_device_module(DEVICE).default_generators
    host = torch.ones(2, device="cpu")
    here, there = torch.ones(2, device=device), torch.ones(2, device=second_device)
    own = torch.Generator(device="cpu")

    def ask(op: Any, *args: Any, **kwargs: Any) -> Any:
        return generator_of(facts_of(op), args, kwargs)

    assert ask(aten.bernoulli.default, here) is defaults[0]
    assert ask(aten.bernoulli.default, there) is defaults[1]
    assert ask(aten.bernoulli.default, host) is torch.default_generator
    assert ask(aten.bernoulli.default, host, generator=own) is own
    assert ask(aten.rand_like.default, host, device=second_device) is defaults[1]
    assert ask(aten.rand_like.default, there, device=torch.device("cpu")) is torch.default_generator
    assert ask(aten.randn.default, [2], device=device) is defaults[0]
    # The device that is current is not the one that was asked for.
    torch.accelerator.set_device_index(1)
    try:
        assert ask(aten.randn.default, [2], device=device) is defaults[0]
        assert ask(aten.randn.default, [2], device=torch.device(DEVICE)) is defaults[1]
    finally:
        torch.accelerator.set_device_index(0)


def test_a_model_on_two_devices(device: torch.device, second_device: torch.device) -> None:
    """Half of the net lives on a second device: its saved tensors stay, and the bits are right."""

    def step(scope: Scope) -> dict[str, Any]:
        first, second = nn.Linear(64, 256), nn.Linear(256, 64).to(second_device)
        with scope():
            for _ in range(3):
                hidden = first(torch.randn(16, 64)).relu().to(second_device)
                (second(hidden).tanh().to(device) + 1).pow(2).mean().backward()
        return state_of(first, second)

    assert_same_bits(step)


@pytest.mark.parametrize("is_elsewhere", [True, False])
def test_training_on_another_device_is_told(
    device: torch.device, second_device: torch.device, caplog: pytest.LogCaptureFixture, *, is_elsewhere: bool
) -> None:
    """A budget for one device holds nothing on another one, and the program may have forgotten to make that current."""
    where = second_device if is_elsewhere else device
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh()).to(where)
    with caplog.at_level("WARNING", "torchdelta"), MemoryBudget("1GiB", Config(tier="memory")):
        for _ in range(2):
            model(torch.ones(4, 8, device=where)).sum().backward()
    told = f"the step ran on another device than {device}" in caplog.text
    assert told == is_elsewhere


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("decisions", DECISIONS)
def test_every_decision_is_carried_out_on_the_device(decisions: str) -> None:
    """What is forced happens: bytes are dropped or swapped, and come back."""
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
    with MemoryBudget("1TiB", Config(decisions=DECISIONS[decisions], tier="memory")) as budget:
        model(torch.randn(64, 64)).pow(2).sum().backward()
    summary = budget.summary()
    assert (summary.recomputed_bytes > 0) == (decisions != "swap")
    assert (summary.swapped_in_bytes > 0) == (decisions != "recompute")


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("is_deterministic", [True, False])
def test_sums_without_an_order_are_not_replayed(monkeypatch: pytest.MonkeyPatch, *, is_deterministic: bool) -> None:
    """Ops that add by atomics are kept or swapped, and run again in deterministic mode only."""
    replayed: list[str] = []

    def replay_op(entry: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
        replayed.append(entry.facts.base_name)
        return tape.replay_op(entry, args, kwargs)

    monkeypatch.setattr(replay, "replay_op", replay_op)
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(is_deterministic)
    try:
        rows = torch.randint(0, 16, (64,))
        x = torch.randn(64, 64, requires_grad=True)

        def loss() -> torch.Tensor:
            summed = torch.zeros(16, 64).index_add(0, rows, x.sin())
            return (summed.cumsum(0).exp() * summed.cos()).sum()

        with MemoryBudget("1TiB", Config(decisions="recompute", tier="memory")):
            loss().backward()
    finally:
        torch.use_deterministic_algorithms(before)
    assert {"sin", "exp"} <= set(replayed)
    assert ("index_add" in replayed) == is_deterministic
    assert ("cumsum" in replayed) == is_deterministic


@pytest.mark.usefixtures("device")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_asks_the_device_for_nothing() -> None:
    """The mode is inherited by a worker of a data loader, which may use the host's tensors only."""
    with MemoryBudget("1TiB", Config(tier="memory")):
        torch.ones(10).exp()
        session = current_session()
        assert session is not None
        num_ops = session.counters.num_ops
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            made = torch.ones(10, device="cpu").exp().sum().item()
            answer = b"ok" if made > 27 and session.device.is_off() and session.counters.num_ops == num_ops else b"no"
            os.write(writing, answer)
            os._exit(0)
        os.waitpid(child, 0)
        assert os.read(reading, 2) == b"ok"
        os.close(reading)
        os.close(writing)
        assert not session.device.is_off()
