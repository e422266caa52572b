"""What passes the budget is mapped where the program may read everything: at a scope's end, and in a survey."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.runtime.parts import running_session
from tests.same_bits.judge import bits_of
from torchdelta import BudgetError, Config, MemoryBudget
from torchdelta.native.file_mapping import file_mapper
from torchdelta.runtime.survey.inventory import NO_SWAP_SPACE

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torchdelta.runtime.memory.persistents import Persistents

MIB = 1 << 20
WIDTH, NUM_LAYERS = 1024, 12
EVERYTHING_BYTES = 4 * NUM_LAYERS * 4 * WIDTH * WIDTH  # parameters, gradients and two states
BUDGET_BYTES = EVERYTHING_BYTES // 3

pytestmark = [
    pytest.mark.skipif(file_mapper() is None, reason="needs the native modules"),
    pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs Linux's list of mappings"),
]


class Training:
    """A model whose parameters are much larger than its activations."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(NUM_LAYERS)))
        self.optimizer = torch.optim.Adam(self.model.parameters(), foreach=False)

    def step(self, batch: int = 2) -> None:
        """Train one step. Gradients stay until the next one."""
        self.optimizer.zero_grad()
        self.model(torch.ones(batch, WIDTH)).square().mean().backward()
        self.optimizer.step()

    def bits(self) -> bytes:
        """Return all that was trained."""
        gradients = [parameter.grad for parameter in self.model.parameters()]
        return bits_of([self.model.state_dict(), self.optimizer.state_dict()["state"], gradients])

    def tensors(self) -> list[torch.Tensor]:
        """Return the parameters, their gradients, and the optimizer's states of their size."""
        parameters = list(self.model.parameters())
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        states = [state for each in self.optimizer.state.values() for state in each.values()]
        return [each.detach() for each in parameters + gradients + states if each.numel() > 1]


def budget(**options: Any) -> MemoryBudget:
    """Return a scope with a third of the memory that persistent tensors take."""
    return MemoryBudget(BUDGET_BYTES, Config(decision_class="all", planner=None, **options))


def persistents() -> Persistents:
    """Return those of the running scope."""
    found = running_session().room.persistents
    assert found is not None
    return found


def mapped_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Return the bytes of those whose memory is a part of a file that has no name."""
    ranges = [
        tuple(int(bound, 16) for bound in line.split(maxsplit=1)[0].split("-"))
        for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
        if line.endswith("(deleted)")
    ]
    return sum(each.nbytes for each in tensors if any(start <= each.data_ptr() < end for start, end in ranges))


def trained_plainly(num_steps: int) -> bytes:
    """Train without a budget."""
    plain = Training()
    for _ in range(num_steps):
        plain.step()
    return plain.bits()


def test_the_end_of_a_scope_takes_no_more_than_the_budget(tmp_path: Path) -> None:
    """Everything can be read then, in a new scope it leaves again, and it has the bits of plain PyTorch."""
    expected = trained_plainly(6)
    training = Training()
    for _ in range(3):
        with budget(swap_dir=tmp_path) as scope:
            for _ in range(2):
                training.step()
            assert persistents().emptying.away_bytes > EVERYTHING_BYTES - BUDGET_BYTES
        assert scope.summary().steps[-1].peak_bytes <= BUDGET_BYTES
        memory_bytes = EVERYTHING_BYTES - mapped_bytes(training.tensors())
        assert 0 < memory_bytes <= BUDGET_BYTES
        assert num_swap_files(tmp_path) <= 2  # this scope's, and of what did not leave in it that of the one before
    assert training.bits() == expected
    for tensor in training.tensors():  # in memory of their own
        before = tensor.clone()
        tensor.untyped_storage().resize_(tensor.nbytes + 4)
        assert torch.equal(tensor, before)
    assert mapped_bytes(training.tensors()) == 0
    assert num_swap_files(tmp_path) == 0


def num_swap_files(directory: Path) -> int:
    """Count the files without a name in a directory that this process has open or mapped."""
    lines = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    mapped = {line.split()[4] for line in lines if str(directory) in line}
    links = [link for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
    return len(mapped | {str(link.stat().st_ino) for link in links if str(directory) in str(link.readlink())})


def test_a_refused_step_takes_no_more_than_the_budget(tmp_path: Path) -> None:
    """The program catches the error, and goes on with the batch that fits."""
    expected = trained_plainly(4)
    training = Training()
    with budget(swap_dir=tmp_path, disk_budget=EVERYTHING_BYTES + 2 * MIB) as scope:
        training.step()
        for _ in range(2):
            training.step()
            with pytest.raises(BudgetError) as caught:
                training.step(batch=BUDGET_BYTES // (4 * WIDTH) + 1)
            assert NO_SWAP_SPACE not in str(caught.value)
            assert persistents().emptying.away_bytes > EVERYTHING_BYTES // 2
            assert persistents().ledger.usage.total_bytes <= BUDGET_BYTES
        training.step()
    summary = scope.summary()
    assert summary.peak_bytes <= BUDGET_BYTES
    assert training.bits() == expected


def test_a_scope_that_ends_in_a_refused_step(tmp_path: Path) -> None:
    """Nothing was saved in that step, so no graph keeps the session open."""
    expected = trained_plainly(2)
    training = Training()
    with pytest.raises(BudgetError), budget(swap_dir=tmp_path):  # noqa: PT012
        for _ in range(2):
            training.step()
        torch.ones(BUDGET_BYTES)
    assert training.bits() == expected


def test_a_graph_that_dies_while_the_scope_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its last saved tensor ends the session only when everything is back."""
    expected = trained_plainly(2)
    training = Training()
    with budget(swap_dir=tmp_path):
        for _ in range(2):
            training.step()
        persistents().evict(0)
        graphs = [training.model(torch.ones(2, WIDTH))]
        persistents().evict(0)
        stop = running_session().placing.stop
        monkeypatch.setattr(running_session().placing, "stop", lambda: (graphs.clear(), stop()))
    assert training.bits() == expected


def test_gradients_in_a_refused_step_leave_again(tmp_path: Path) -> None:
    """The engine makes fake sums, and writes none of them. So the tier needs no second place for them."""
    expected = trained_plainly(3)
    training = Training()
    with budget(swap_dir=tmp_path, disk_budget=EVERYTHING_BYTES + 2 * MIB):
        for _ in range(2):
            training.step()
        for _ in range(2):
            with pytest.raises(BudgetError) as caught:
                training.model(torch.ones(BUDGET_BYTES // (4 * WIDTH) + 1, WIDTH)).square().mean().backward()
            assert NO_SWAP_SPACE not in str(caught.value)
            assert persistents().emptying.away_bytes >= EVERYTHING_BYTES - BUDGET_BYTES
            assert persistents().ledger.usage.total_bytes <= BUDGET_BYTES
        training.step()
    assert training.bits() == expected


def test_what_is_read_in_a_refused_step_is_whole(tmp_path: Path) -> None:
    """A program may read and write memory without an op before it learns that the step does not fit."""
    training = Training()
    weight = next(iter(training.model.parameters()))
    with budget(swap_dir=tmp_path):
        for _ in range(2):
            training.step()
        before = [bits_of([tensor]) for tensor in training.tensors()]
        records = running_session().ledger.records
        with pytest.raises(BudgetError):  # noqa: PT012
            out = training.model(torch.ones(BUDGET_BYTES // (4 * WIDTH) + 1, WIDTH))
            assert sum(record.emptied is not None for record in records.values()) == 0
            weight.detach().numpy()[0, 0] = 7.0
            out.sum().backward()
        after = [bits_of([tensor]) for tensor in training.tensors()]
        assert weight[0, 0].item() == 7.0
        assert after[0] != before[0]
        assert after[1:] == before[1:]


@pytest.mark.parametrize("options", [{"tier": "memory"}, {}])
def test_without_a_mapping_everything_comes_back(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """From the memory tier, and where the file system cannot map."""
    refused: list[int] = []

    def refuse(*_: object) -> None:
        refused.append(1)
        raise OSError

    mapper = file_mapper()
    assert mapper is not None
    monkeypatch.setattr(mapper, "map_pieces", refuse)
    training, plain = Training(), Training()
    for each, scope in ((training, budget(swap_dir=tmp_path, **options)), (plain, contextlib.nullcontext())):
        with scope:
            for _ in range(2):
                each.step()
    assert training.bits() == plain.bits()
    assert bool(refused) == (not options)
    assert mapped_bytes(training.tensors()) == 0
