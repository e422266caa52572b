"""Parameters and optimizer states that leave in unusual moments: after a refusal, with a full tier, while saving."""

from __future__ import annotations

import gc
import io
import pickle
import time
from typing import Any

import pytest
import torch
from torch._dynamo.backends.common import aot_autograd
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch.utils._python_dispatch import _disable_current_modes

from tests.runtime.parts import running_session
from torchdelta import BudgetError, Config, MemoryBudget
from torchdelta._torch.storages import storage_behind
from torchdelta.runtime.memory.planned_moves import Move
from torchdelta.runtime.memory.transfers import Transfers
from torchdelta.runtime.tiers import memory

MIB = 1 << 20
ROOM = int(5.5 * MIB)


class Net(torch.nn.Module):
    """Parameters of 1 MiB each."""

    def __init__(self, num_parameters: int) -> None:
        super().__init__()
        self.weights = torch.nn.ParameterList(torch.nn.Parameter(torch.randn(MIB // 4)) for _ in range(num_parameters))


@pytest.fixture(autouse=True)
def without_garbage() -> None:
    """Free what earlier tests have left in reference cycles: it would count against the budget."""
    gc.collect()


def _config(**options: Any) -> Config:
    return Config(decision_class="all", tier="memory", planner=None, **options)


def test_a_full_tier_keeps_nothing_that_needs_no_transfer() -> None:
    """Copies of four tensors that are back fill the tier. Each of them can leave without another copy."""
    net = Net(5)
    parameters = list(net.parameters())
    with MemoryBudget(ROOM, _config(host_budget=4 * MIB)) as budget:
        session = running_session()
        for parameter in parameters:
            parameter.sum()
        big = torch.empty(int(4.2 * MIB), dtype=torch.uint8)
        records = [session.ledger.find(parameter) for parameter in parameters]
        is_away = [record is not None and record.emptied is not None for record in records]
        assert sum(is_away) == 4
        del big
        for _, parameter in sorted(zip(is_away, parameters, strict=True), key=lambda pair: pair[0]):
            parameter.sum()
        torch.ones(MIB, dtype=torch.uint8)
        assert session.room.usage.total_bytes <= ROOM
    assert budget.summary().peak_bytes <= ROOM


def test_garbage_that_is_collected_while_tensors_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model in a reference cycle is not used any more, so it leaves first; then its storages are gone."""
    start_copy = Transfers.start_copy
    num_collected = []

    def start_and_collect(self: Transfers, storage: torch.UntypedStorage) -> Any:
        copy = start_copy(self, storage)
        num_collected.append(gc.collect())
        return copy

    def leave_garbage() -> None:
        net = Net(4)
        sum(parameter.sum() for parameter in net.parameters())
        cycle: list[object] = [net]
        cycle.append(cycle)

    gc.disable()
    try:
        with MemoryBudget(ROOM, _config()) as budget:
            leave_garbage()
            monkeypatch.setattr(Transfers, "start_copy", start_and_collect)
            with torch.no_grad():
                torch.empty(int(4.5 * MIB), dtype=torch.uint8)
    finally:
        gc.enable()
    assert num_collected
    assert budget.summary().peak_bytes <= ROOM


class SavesItself:
    """An object whose state is a saved file."""

    def __init__(self, net: Net, how: str) -> None:
        self.net, self.how = net, how

    def __getstate__(self) -> dict[str, Any]:
        """Return the state, as bytes."""
        if self.how == "pickle":
            return {"how": self.how, "content": pickle.dumps(dict(self.net.state_dict()))}
        file = io.BytesIO()
        torch.save(self.net.state_dict(), file)
        return {"how": self.how, "content": file.getvalue()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Read the bytes."""
        content = state["content"]
        self.state = pickle.loads(content) if state["how"] == "pickle" else torch.load(io.BytesIO(content))  # noqa: S301 - of this test


@pytest.mark.parametrize("how", ["torch.save", "pickle"])
def test_a_state_that_saves_its_own_tensors_inside_torch_save(how: str) -> None:
    """Some of its tensors are away then."""
    torch.manual_seed(0)
    net = Net(8)
    expected = {name: value.clone() for name, value in net.state_dict().items()}
    file = io.BytesIO()
    with MemoryBudget(8 * MIB + int(4.5 * MIB), _config()):
        for parameter in net.parameters():
            parameter.sum()
        session = running_session()
        assert any(record.emptied is not None for record in session.ledger.records.values())
        torch.save(SavesItself(net, how), file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False).state
    assert all(torch.equal(loaded[name], value) for name, value in expected.items())


def test_room_for_a_compiled_module_takes_none_of_its_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planned departures of them are under way when memory is short. The state of a followed step is set up by hand."""
    without_memory: list[torch.Size] = []

    def compile_graph(graph: Any, _inputs: Any) -> Any:
        def run(*inputs: Any) -> Any:
            tensors = [each for each in inputs if isinstance(each, torch.Tensor)]
            without_memory.extend(each.shape for each in tensors if storage_behind(each).nbytes() < each.nbytes)
            assert not without_memory  # a generated kernel would read a null pointer
            with _disable_current_modes():
                return graph(*inputs)

        return make_boxed_func(run)

    medium = memory._MemoryMedium  # noqa: SLF001 - its speed
    write_part = medium.write_part

    def write_slowly(*args: Any) -> None:
        time.sleep(0.02)
        write_part(*args)

    monkeypatch.setattr(medium, "write_part", write_slowly)
    torch.manual_seed(0)
    net = torch.nn.Sequential(*(torch.nn.Linear(512, 512, bias=False) for _ in range(6)))
    optimizer = torch.optim.AdamW(net.parameters(), foreach=False)
    compiled = torch.compile(net, backend=aot_autograd(fw_compiler=compile_graph, bw_compiler=compile_graph))
    x = torch.randn(512, 512)
    with MemoryBudget("2GiB", _config()):
        for _ in range(3):
            compiled(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        session = running_session()
        room, persistents = session.room, session.room.persistents
        assert persistents is not None
        persistents.candidates.search(is_thorough=True)
        found = [session.ledger.find(parameter) for parameter in net.parameters()]
        keys = [known.key for known in persistents.candidates.known.values() if known.record in found]
        assert len(keys) == 6
        persistents.is_active = persistents.planned.is_on = True
        persistents.planned.ask((Move.LEAVE, key) for key in keys)
        persistents.planned.move()
        assert persistents.planned.has_due
        room.is_followed = True
        room.usage.ask_counter()
        room.budget_bytes = room.usage.total_bytes + (64 << 10)
        compiled(x)
    assert not without_memory


def test_a_new_optimizer_after_a_refused_step_is_found() -> None:
    """As a search for the largest batch makes it, for each attempt."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(512, 512, bias=False) for _ in range(8)))  # 32 MiB with AdamW
    with MemoryBudget(18 * MIB, _config()) as budget:

        def train(num_rows: int) -> None:
            optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
            for _ in range(2):
                model(torch.randn(num_rows, 512)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()

        with pytest.raises(BudgetError):
            train(1 << 14)
        model.zero_grad()
        train(8)
    assert budget.summary().num_refused_steps == 1
