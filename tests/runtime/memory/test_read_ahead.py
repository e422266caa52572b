"""Persistent tensors move beside the compute: they are read before their use, and copied out before room is needed."""

from __future__ import annotations

import contextlib
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from tests.runtime.parts import running_session
from tests.same_bits.judge import bits_of
from torchdelta import Config, MemoryBudget
from torchdelta.errors import TierIOError
from torchdelta.runtime.memory.emptying import Emptying
from torchdelta.runtime.memory.read_ahead import ReadAhead
from torchdelta.runtime.tiers import memory as memory_tier

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torchdelta.runtime.memory.persistents import Persistents
    from torchdelta.runtime.state.buffer import StorageRecord

WIDTH, NUM_LAYERS, NUM_STEPS = 96, 12, 6
LAYER_BYTES = 4 * WIDTH * WIDTH


def layers() -> torch.nn.Module:
    """Return a model whose parameters are much larger than its activations."""
    torch.manual_seed(0)
    return torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(NUM_LAYERS)))


def train(scope: Any, *, after_step: Callable[[int], None] | None = None, keeps_gradients: bool = False) -> bytes:
    """Train with Adam, which has two states a parameter."""
    model = layers()
    optimizer = torch.optim.Adam(model.parameters(), foreach=False)
    with scope:
        for step in range(NUM_STEPS):
            model(torch.ones(2, WIDTH)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=not keeps_gradients)
            if after_step is not None:
                after_step(step)
    return bits_of([model.state_dict(), optimizer.state_dict()["state"]])


def plain(**options: Any) -> bytes:
    """Train without a budget."""
    return train(contextlib.nullcontext(), **options)


def pressed(share: float = 0.6, **options: Any) -> MemoryBudget:
    """Return a scope with a part of the memory that parameters, gradients and states take."""
    config = Config(decision_class="all", tier="memory", **options)
    return MemoryBudget(int(share * 4 * NUM_LAYERS * LAYER_BYTES), config)


class Refills:
    """Counts what comes back, and what of it was read ahead."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num_ahead = self.num_all = 0
        refill = Emptying.refill

        def note(emptying: Emptying, record: StorageRecord) -> None:
            assert record.emptied is not None
            self.num_all += 1
            self.num_ahead += record.emptied.transfer is not None
            refill(emptying, record)

        monkeypatch.setattr(Emptying, "refill", note)

    def restart(self, _step: int = 0) -> None:
        """Count from here."""
        self.num_ahead = self.num_all = 0


@pytest.mark.parametrize("keeps_gradients", [False, True])
def test_what_left_is_read_before_its_use(monkeypatch: pytest.MonkeyPatch, *, keeps_gradients: bool) -> None:
    """In a loop whose steps are alike, most of it is; the bits stay, and the budget holds."""
    refills = Refills(monkeypatch)
    make_spare = Emptying.make_spare

    def make_at_once(emptying: Emptying, record: StorageRecord) -> bool:
        is_made = make_spare(emptying, record)
        emptying.finish_spare(record)  # the steps here take no time, in which a copy could end
        return is_made

    monkeypatch.setattr(Emptying, "make_spare", make_at_once)
    scope = pressed()
    found = train(
        scope, after_step=lambda step: refills.restart() if step == 2 else None, keeps_gradients=keeps_gradients
    )
    assert found == plain(keeps_gradients=keeps_gradients)
    assert refills.num_all > NUM_STEPS  # something had left
    assert refills.num_ahead > 0.5 * refills.num_all
    assert all(step.peak_bytes <= scope.budget_bytes for step in scope.summary().steps[1:])


def test_without_a_window_nothing_is_read_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control."""
    refills = Refills(monkeypatch)
    monkeypatch.setattr(ReadAhead, "look", lambda self: None)  # noqa: ARG005
    assert train(pressed()) == plain()
    assert refills.num_all
    assert not refills.num_ahead


def test_gradients_that_are_freed_are_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """A gradient that the program frees after the optimizer's step leaves only if nothing else can."""
    copied: list[bool] = []
    empty = Emptying.empty

    def note(emptying: Emptying, records: list[StorageRecord]) -> bool:
        persistents = _persistents()
        if running_session().steps.is_in_optimizer and running_session().steps.num_steps > 2:
            copied.extend(persistents.candidates.known[record.id].is_gradient for record in records)
        return empty(emptying, records)

    monkeypatch.setattr(Emptying, "empty", note)
    train(pressed(0.7))
    assert copied
    assert sum(copied) < 0.2 * len(copied)


class Gate(threading.Event):
    """Opens when it is set. `reached`: set when a copy waits for that."""

    def __init__(self) -> None:
        super().__init__()
        self.reached = threading.Event()


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    """Make copies to the memory tier wait until the gate is open."""
    opened = Gate()
    write_part = memory_tier._MemoryMedium.write_part  # noqa: SLF001

    def wait_and_write(medium: Any, worker: int, part: Any) -> None:
        opened.reached.set()
        assert opened.wait(20)
        write_part(medium, worker, part)

    monkeypatch.setattr(memory_tier._MemoryMedium, "write_part", wait_and_write)  # noqa: SLF001
    yield opened
    opened.set()


def test_a_write_waits_for_the_copy_that_reads(gate: Gate) -> None:
    """An op that overwrites a tensor whose spare copy is being made waits, and the spare counts no more."""
    with MemoryBudget("1TiB", Config(decision_class="all", tier="memory")):
        _model, parameter = _new_model()
        (parameter * 2).sum().backward()
        emptying, record = _persistents().emptying, _record(parameter)
        assert emptying.make_spare(record)
        assert emptying.has_spare(record)
        assert not emptying.is_clean(record)
        assert gate.reached.wait(20)
        threading.Timer(0.1, gate.set).start()
        with torch.no_grad():
            parameter.add_(1)
        assert gate.is_set()
        assert not emptying.has_spare(record)
        _persistents().evict(0)
        assert record.emptied is not None
        assert parameter.sum().item() == 2 * 64 * 64


def test_a_tensor_that_is_freed_during_its_copy(gate: Gate) -> None:
    """Its memory is free as soon as the copy has ended, and the record goes."""
    with MemoryBudget("1TiB", Config(decision_class="all", tier="memory")):
        _model, parameter = _new_model()
        (parameter * 2).sum().backward()
        assert parameter.grad is not None
        emptying, record, ledger = _persistents().emptying, _record(parameter.grad), running_session().ledger
        ledger.buffer_of(parameter.grad)
        before_bytes = ledger.usage.live_bytes
        assert emptying.make_spare(record)
        parameter.grad = None
        gate.set()
        running_session().room.transfers.drain()
        assert ledger.usage.live_bytes == before_bytes - 64 * 64 * 4
        assert record.address not in ledger.records or ledger.records[record.address] is not record


def test_a_copy_that_fails_is_no_spare(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tensor stays, and its content is right."""

    def fail(_medium: Any, _worker: int, _part: Any) -> None:
        raise OSError("no space")

    with MemoryBudget("1TiB", Config(decision_class="all", tier="memory")):
        _model, parameter = _new_model()
        (parameter * 2).sum().backward()
        emptying, record = _persistents().emptying, _record(parameter)
        with monkeypatch.context() as patch:
            patch.setattr(memory_tier._MemoryMedium, "write_part", fail)  # noqa: SLF001
            assert emptying.make_spare(record)
            emptying.finish_spare(record)
        assert not emptying.has_spare(record)
        assert record.emptied is None
        assert parameter.sum().item() == 64 * 64


@pytest.mark.parametrize("num_failures", [1, 2])
def test_a_read_ahead_that_fails_is_read_once_more(monkeypatch: pytest.MonkeyPatch, num_failures: int) -> None:
    """If that fails, too, its use raises; the copy stays for the next attempt."""
    failures = [OSError("broken")] * num_failures
    read_part = memory_tier._MemoryMedium.read_part  # noqa: SLF001

    def fail_first(medium: Any, worker: int, part: Any) -> None:
        if failures:
            raise failures.pop()
        read_part(medium, worker, part)

    monkeypatch.setattr(memory_tier._MemoryMedium, "read_part", fail_first)  # noqa: SLF001
    with MemoryBudget("1TiB", Config(decision_class="all", tier="memory")):
        _model, parameter = _new_model()
        (parameter * 2).sum().backward()
        persistents, record = _persistents(), _record(parameter)
        live_bytes = running_session().ledger.usage.live_bytes
        persistents.evict(0)
        assert record.emptied is not None
        assert persistents.emptying.start_refill(record)
        assert record.size_bytes == parameter.nbytes
        if num_failures == 2:
            with pytest.raises(TierIOError, match="cannot be brought back"):
                parameter.sum()
        assert parameter.sum().item() == 64 * 64
        assert record.emptied is None
        assert _record(parameter) is record
        persistents.bring_all()
        assert running_session().ledger.usage.live_bytes == live_bytes


def test_a_read_ahead_can_be_given_up() -> None:
    """Its memory is free again, and the copy is read at the next use."""
    with MemoryBudget("1TiB", Config(decision_class="all", tier="memory")):
        _model, parameter = _new_model()
        (parameter * 2).sum().backward()
        persistents, record = _persistents(), _record(parameter)
        persistents.evict(0)
        low_bytes = running_session().ledger.usage.live_bytes
        assert persistents.emptying.start_refill(record)
        assert running_session().ledger.usage.live_bytes == low_bytes + parameter.nbytes
        persistents.evict(low_bytes)
        assert running_session().ledger.usage.live_bytes == low_bytes
        assert parameter.sum().item() == 64 * 64


@pytest.mark.parametrize("hooked", ["weight", "bias"])
def test_a_hook_of_one_leaf_runs_before_the_other_is_accumulated(hooked: str) -> None:
    """One node gives both their gradients; what leaves in the hook is back before the engine adds to it."""
    num_emptied: list[bool] = []

    def run(scope: Any) -> bytes:
        torch.manual_seed(0)
        norm, x = torch.nn.LayerNorm(1024), torch.randn(4, 1024)
        other = norm.bias if hooked == "weight" else norm.weight
        num_calls: list[int] = []

        def hook(parameter: torch.Tensor) -> None:
            num_calls.append(len(num_calls))
            assert parameter.grad is not None
            if isinstance(scope, MemoryBudget):
                persistents = _persistents()
                for each in norm.parameters():
                    if each.grad is not None and _record(each.grad).emptied is None:
                        persistents.emptying.make_spare(_record(each.grad))
                        persistents.is_active = True
                persistents.evict(0)
                num_emptied.append(other.grad is not None and _record(other.grad).emptied is not None)
            with torch.enable_grad():
                torch.autograd.grad((parameter * 2).sum(), parameter)  # a backward inside of the other

        getattr(norm, hooked).register_post_accumulate_grad_hook(hook)
        with scope:
            for _ in range(4):
                (norm(x) * x).sum().backward()
                if len(num_calls) % 2 == 0:
                    norm.zero_grad(set_to_none=False)
        assert len(num_calls) == 4
        return bits_of([norm.weight.grad, norm.bias.grad])

    assert run(MemoryBudget("1TiB", Config(decision_class="all", tier="memory"))) == run(contextlib.nullcontext())
    assert any(num_emptied)


def test_a_checkpoint_that_recomputes_in_an_unrecorded_node() -> None:
    """The first node of its backward may be one that runs without the recorder: what it reads is brought back."""

    def run(scope: Any) -> bytes:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 64))
        x, mask = torch.randn(8, 64, requires_grad=True), torch.rand(8, 64) > 0.5

        def block(x: torch.Tensor) -> torch.Tensor:
            return model(x).masked_fill(mask, 0.0)

        with scope:
            for _ in range(2):
                out = checkpoint(block, x, use_reentrant=False)
                assert isinstance(out, torch.Tensor)
                loss = out.sum()
                if isinstance(scope, MemoryBudget):
                    _persistents().evict(0)
                    assert _record(next(model.parameters())).emptied is not None
                loss.backward()
        return bits_of([parameter.grad for parameter in model.parameters()])

    assert run(MemoryBudget("1TiB", Config(decision_class="all", tier="memory"))) == run(contextlib.nullcontext())


def test_what_leaves_in_place_does_not_leave_as_a_saved_tensor() -> None:
    """The memory of a gradient that is being filled is not copied out, even if the program has dropped it."""
    with MemoryBudget("1TiB", Config(decision_class="all", tier="memory")):
        _model, parameter = _new_model()
        (parameter * 2).sum().backward()
        assert parameter.grad is not None
        product = parameter * parameter.grad
        session, record = running_session(), _record(parameter.grad)
        _persistents().evict(0)
        assert record.emptied is not None
        assert _persistents().emptying.start_refill(record)
        buffer = record.current
        assert buffer is not None
        parameter.grad = None
        assert not session.room.is_evictable(buffer)
        product.sum().backward()


@pytest.mark.parametrize("sizes", [(32, 64, 128), (128, 64, 32)])
def test_a_scope_that_ends_on_a_broken_disk(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, sizes: tuple[int, ...]
) -> None:
    """One tensor cannot be read. The others are whole when the error comes, and the scope has ended cleanly."""
    read_part, failing = memory_tier._MemoryMedium.read_part, [False]  # noqa: SLF001

    def fail_for_the_small(medium: Any, worker: int, part: Any) -> None:
        if failing[0] and part.size_bytes == 32 * 32 * 4:
            raise OSError("broken")
        time.sleep(0.2)  # the scope ends first
        read_part(medium, worker, part)

    monkeypatch.setattr(memory_tier._MemoryMedium, "read_part", fail_for_the_small)  # noqa: SLF001
    parameters = [torch.nn.Parameter(torch.ones(size, size)) for size in sizes]
    whole = [parameter for parameter in parameters if len(parameter) > 32]
    model = torch.nn.ParameterList(parameters)
    threads = threading.enumerate()
    with (  # noqa: PT012
        pytest.raises(TierIOError, match="cannot be brought back"),
        MemoryBudget("1TiB", Config(decision_class="all", tier="memory")),
    ):
        sum((parameter * 2).sum() for parameter in model).backward()  # pyright: ignore[reportAttributeAccessIssue]
        _persistents().evict(0)
        for size in (64, 128):
            torch.full((size, size), 7.0)  # in the memory that is free now
        for parameter in whole:
            _persistents().emptying.start_refill(_record(parameter))
        failing[0] = True
    assert [parameter.detach().numpy().sum() for parameter in whole] == [parameter.numel() for parameter in whole]
    lost = min(parameters, key=len)
    assert lost.untyped_storage().nbytes() == lost.nbytes
    assert lost.grad is not None
    assert lost.isnan().all()
    assert lost.grad.isnan().all()
    assert [record.message for record in caplog.records if "holds NaN" in record.message] == [
        "a parameter, gradient or optimizer state of 4096 bytes is lost and holds NaN: its copy cannot be read"
    ] * 2
    assert not set(threading.enumerate()) - set(threads)


def _new_model() -> tuple[torch.nn.Module, torch.nn.Parameter]:
    """Return a module with one parameter; what no module has does not leave."""
    parameter = torch.nn.Parameter(torch.ones(64, 64))
    return torch.nn.ParameterList([parameter]), parameter


def _persistents() -> Persistents:
    persistents = running_session().room.persistents
    assert persistents is not None
    return persistents


def _record(tensor: torch.Tensor) -> StorageRecord:
    record = running_session().ledger.find(tensor)
    assert record is not None
    return record
