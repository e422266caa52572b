"""The budget of an accelerator is held in its allocator's active bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from tests.same_bits.judge import Scope, bits_of, run, state_of
from torchdelta import BudgetError, Config, MemoryBudget
from torchdelta._torch.device import allocator_statistics, reset_allocator_peak
from torchdelta.errors import SavedTensorError
from torchdelta.runtime.current import current_session
from torchdelta.runtime.device.memory import PeakMeter

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.accelerator
WIDTH, DEPTH, NUM_STEPS = 128, 8, 3


def build() -> nn.Sequential:
    """Make a net whose activations are most of its memory."""
    layers: list[nn.Module] = []
    for _ in range(DEPTH):
        layers += [nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(0.1), nn.LayerNorm(WIDTH)]
    return nn.Sequential(*layers)


def training(peaks: list[int], device: torch.device) -> Callable[[Scope], dict[str, Any]]:
    """Return a step that notes the peak of the active bytes of each training step, as the allocator tells it."""

    def step(scope: Scope) -> dict[str, Any]:
        model = build()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        peaks.clear()
        with scope():
            for _ in range(NUM_STEPS):
                reset_allocator_peak(device)
                loss = model(torch.randn(512, WIDTH)).pow(2).mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                del loss
                statistics = allocator_statistics(device)
                assert statistics is not None
                peaks.append(statistics["peak"])
        return state_of(model)

    return step


@pytest.mark.parametrize("policy", ["torchdelta", "recompute-only", "swap-only"])
@pytest.mark.parametrize("share", [0.7, 0.5])
def test_active_bytes_stay_inside_the_budget(device: torch.device, policy: str, share: float) -> None:
    """The allocator's own peak is at or under the budget in every step, with the plain run's bits."""
    peaks: list[int] = []
    step = training(peaks, device)
    plain = run(step)
    plain_peak_bytes = max(peaks)
    budget_bytes = int(share * plain_peak_bytes)
    budgets: list[MemoryBudget] = []

    def pressed() -> MemoryBudget:
        budgets.append(MemoryBudget(budget_bytes, Config(policy=policy, tier="memory")))
        return budgets[-1]

    ours = run(step, pressed)
    assert ours.message == ""
    assert ours.observed == plain.observed
    summary = budgets[-1].summary()
    assert summary.swapped_out_bytes + summary.recomputed_bytes > 0
    assert max(peaks) <= budget_bytes
    # What the summary says is what the allocator saw, or a little more.
    assert max(peaks) <= summary.peak_bytes <= budget_bytes


def test_with_eviction_off_the_budget_is_passed(device: torch.device) -> None:
    """The measure sees what it is meant to see."""
    peaks: list[int] = []
    step = training(peaks, device)
    run(step)
    budget_bytes = int(0.7 * max(peaks))
    run(step, lambda: MemoryBudget(budget_bytes, Config(decisions="keep", tier="memory")))
    assert max(peaks) > budget_bytes


def test_what_no_storage_accounts_for_counts(device: torch.device) -> None:
    """Rounding up, and memory that another thread or library holds, leave less for the step."""
    hidden = torch.UntypedStorage(8 << 20, device=device)  # a storage that the scan cannot find
    with MemoryBudget("1GiB", Config(tier="memory")) as budget:
        session = current_session()
        assert session is not None
        assert session.ledger.usage.unseen_bytes >= 8 << 20
        tiny = [torch.ones(1) for _ in range(100)]
        session.ledger.usage.ask_counter(fresh=True)
        statistics = allocator_statistics(device)
        assert statistics is not None
        assert session.ledger.usage.total_bytes == statistics["current"]
    assert budget.summary().peak_bytes >= (8 << 20) + 100 * 512
    assert hidden.nbytes() == 8 << 20
    assert len(tiny) == 100


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch's, of its own making
def test_an_impossible_budget_is_told(device: torch.device) -> None:
    """The rest of the step is surveyed on shapes alone, and the least budget that is named is enough."""
    peaks: list[int] = []
    step = training(peaks, device)
    run(step)
    model = build()
    with pytest.raises(BudgetError) as raised, MemoryBudget(max(peaks) // 10, Config(policy="recompute-only")):
        model(torch.randn(512, WIDTH)).pow(2).mean().backward()
    least_bytes = raised.value.least_budget_bytes
    assert max(peaks) // 10 < least_bytes <= max(peaks)
    assert all(parameter.grad is None for parameter in model.parameters())
    del raised
    # Times rank the victims, so another run may need a little more.
    with MemoryBudget(int(1.1 * least_bytes), Config(policy="recompute-only")):
        model(torch.randn(512, WIDTH)).pow(2).mean().backward()
    assert bits_of([parameter.grad for parameter in model.parameters()])


@pytest.mark.usefixtures("device")
def test_an_ops_own_workspace_is_learned() -> None:
    """What an op allocates and frees inside itself is reserved when it runs again."""
    library = torch.library.Library("torchdelta_test", "FRAGMENT")
    library.define("greedy(Tensor x) -> Tensor")

    def greedy(x: torch.Tensor) -> torch.Tensor:
        workspace = torch.UntypedStorage(4 << 20, device=x.device)
        del workspace
        return x + 1

    library.impl("greedy", greedy, "CompositeExplicitAutograd")
    x = torch.randn(64)
    with MemoryBudget("1GiB", Config(tier="memory")):
        session = current_session()
        assert session is not None
        torch.ops.torchdelta_test.greedy(x)
        need = session.recorder.needs.need(
            torch.ops.torchdelta_test.greedy.default._torchdelta_facts,
            torch.ops.torchdelta_test.greedy.default,
            (x,),
            None,
        )
        # Where peaks are seen: the output takes the place of some of it.
        assert (4 << 20) - x.nbytes <= need.workspace_bytes < 5 << 20
        # The measured peak holds it as well.
        assert session.ledger.usage.peak_bytes >= session.ledger.usage.live_bytes + (4 << 20)


@pytest.mark.parametrize("resets", [True, False])
def test_the_peak_of_a_piece_of_code(device: torch.device, *, resets: bool) -> None:
    """A region's workspace is measured; where the peak may not be reset, only a new peak tells, or the watch."""
    with MemoryBudget("1GiB", Config(tier="memory")):
        session = current_session()
        assert session is not None
        reset_allocator_peak(device)
        earlier = torch.ones(1 << 20)
        del earlier
        with PeakMeter(session.ledger.device, session.ledger.usage, resets=resets) as low:
            torch.ones(1 << 18)
        with PeakMeter(session.ledger.device, session.ledger.usage, resets=resets) as high:
            torch.ones(1 << 22)
        is_watched = session.ledger.usage.sees_peaks
    assert low.extra_bytes == (1 << 20 if resets or is_watched else 0)
    assert high.extra_bytes == 1 << 24


def test_nothing_is_recorded_while_a_graph_is_captured(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ops pass, saved tensors stay as they are, and the backward of a captured step runs as if nobody were there."""
    del device
    model = build()
    with MemoryBudget("1TiB", Config(decisions="recompute", tier="memory")) as budget:
        session = current_session()
        assert session is not None
        monkeypatch.setattr(session.device, "is_capturing", lambda: True)
        model(torch.randn(64, WIDTH)).pow(2).mean().backward()
        assert session.counters.num_ops == 0
        assert session.ledger.num_handles == 0
        monkeypatch.undo()
        model(torch.randn(64, WIDTH)).pow(2).mean().backward()
    assert budget.summary().recomputed_bytes > 0


def test_times_of_ops_come_from_events(device: torch.device) -> None:
    """Every op in the trace of the first step has the time that its events measured."""
    del device
    model = build()
    with MemoryBudget("1GiB", Config(tier="memory")) as budget:
        for _ in range(2):
            model(torch.randn(64, WIDTH)).pow(2).mean().backward()
            model.zero_grad()
    trace = budget.trace()
    products = [op for op in trace.ops if op.name.startswith("aten.addmm")]
    # One key, one time: the layers are alike.
    assert len(products) == DEPTH
    assert len({op.time_s for op in products}) == 1
    assert all(op.time_s > 0 for op in trace.ops if op.name.startswith("aten."))


def test_what_is_allocated_between_nodes_is_learned(device: torch.device) -> None:
    """A leaf whose first gradient is cloned where no op runs: from the second step on there is room for it."""
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH)]
    offset = nn.Parameter(torch.zeros(2048, WIDTH))
    data = torch.randn(512, WIDTH)

    def step() -> int:
        reset_allocator_peak(device)
        x = data
        for layer in layers:
            x = layer(x).tanh()
        (x.mean() + offset.sum()).backward()
        del x
        for parameter in (offset, *(p for layer in layers for p in layer.parameters())):
            parameter.grad = None
        statistics = allocator_statistics(device)
        assert statistics is not None
        return statistics["peak"]

    plain_bytes = max(step(), step())
    statistics = allocator_statistics(device)
    assert statistics is not None
    least_bytes = statistics["current"] + 2048 * WIDTH * 4
    budget_bytes = least_bytes + (plain_bytes - least_bytes) * 3 // 4
    with MemoryBudget(budget_bytes, Config(policy="recompute-only", tier="memory")) as budget:
        first, *later = [step() for _ in range(4)]
    assert first <= budget_bytes + 2048 * WIDTH * 4
    assert max(later) <= budget_bytes
    assert budget.summary().recomputed_bytes > 0


@pytest.mark.parametrize("is_held", [False, True])
def test_a_storage_that_was_shrunk_unseen_is_refused(device: torch.device, *, is_held: bool) -> None:
    """A saved tensor whose memory C++ code has given back is an error that names it, never other numbers."""
    del device
    x = torch.randn(64, 64, requires_grad=True)
    with MemoryBudget("1TiB", Config(tier="memory")):
        y = x * 2
        loss = y.sin().sum()
        storage = y.untyped_storage()
        if not is_held:
            del y
        super(torch.UntypedStorage, storage).resize_(0)  # below the patched method
        with pytest.raises(SavedTensorError, match="resized to 0 bytes"):
            loss.backward()
