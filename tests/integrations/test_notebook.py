"""`%load_ext torchdelta` in a real IPython shell: budgets for cells, run twice and interrupted."""

from __future__ import annotations

import signal
import textwrap
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.integrations.holding import held_bytes, share_of_peak
from tests.integrations.shells import notebook_shell
from torchdelta import BudgetError, MemoryBudget

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from IPython.core.interactiveshell import InteractiveShell

TRAIN = "model, optimizer = make()\nlosses = train(model, optimizer)"


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[InteractiveShell]:
    """Return a shell with the extension and the functions of a notebook."""
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    with notebook_shell() as shell:
        yield shell


@pytest.fixture
def run(shell: InteractiveShell) -> Iterator[Callable[[str], Any]]:
    """Return a function that runs a cell as a kernel does, with a new handler of Ctrl-C, and returns its result."""
    before = signal.getsignal(signal.SIGINT)

    def run_cell(text: str) -> Any:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            return shell.run_cell(text)
        finally:
            signal.signal(signal.SIGINT, before)

    yield run_cell
    assert run_cell("%memory_budget off").success
    assert MemoryBudget.current() is None
    assert signal.getsignal(signal.SIGINT) is before


@pytest.fixture
def plain(run: Callable[[str], Any], shell: InteractiveShell) -> tuple[list[str], int]:
    """Return the losses without a budget, and a budget of 60 % of what the cells take."""
    held = held_bytes()
    assert run(TRAIN).success
    losses = shell.user_ns["losses"]
    assert run("del model, optimizer").success
    assert run(f"with MemoryBudget({2**40}, config) as budget:\n    train(*make())").success
    budget_bytes = share_of_peak(shell.user_ns["budget"].summary().peak_bytes, 0.6, held)
    assert run("del budget").success
    return losses, budget_bytes


def test_the_following_cells_are_inside_the_budget(shell, run, plain, capsys) -> None:
    """The rest of the cell and the next ones, with plain's losses; then the summary, and off."""
    losses, budget_bytes = plain
    assert run(f"%memory_budget {budget_bytes} config\nat_once = MemoryBudget.current().budget_bytes").success
    assert shell.user_ns["at_once"] == budget_bytes
    for cell in (TRAIN, TRAIN, "1 + 1"):
        shell.user_ns.pop("losses", None)
        assert run(cell).success
        assert shell.user_ns.get("losses", losses) == losses
    capsys.readouterr()
    assert run("%memory_budget").success
    said = capsys.readouterr().out
    assert said.startswith("peak ")
    assert "PASSED" not in said
    assert "6 steps" in said
    assert "nothing was evicted" not in said
    assert run("%memory_budget off").success
    assert run("off = MemoryBudget.current()").success
    assert shell.user_ns["off"] is None


def test_the_budget_can_be_changed(shell, run) -> None:
    """The magic again, also in a cell that is run twice, or beside a budget whose variable was lost."""
    for cell in ("%memory_budget 1GiB", "%memory_budget 2 GiB", "%memory_budget 2 GiB"):
        assert run(cell + "\nsize = MemoryBudget.current().budget_bytes").success
    assert shell.user_ns["size"] == 2 * 2**30
    assert run("%memory_budget off\nMemoryBudget('1GiB').start()\n%memory_budget 3GiB").success
    assert run("size = MemoryBudget.current().budget_bytes").success
    assert shell.user_ns["size"] == 3 * 2**30


def test_a_new_budget_does_not_show_the_figures_of_the_one_before(run, capsys) -> None:
    """Until it has seen a step of its own. After it is turned off, its figures are still shown."""
    assert run("%memory_budget 1GiB\n" + TRAIN).success
    assert run("%memory_budget off").success
    capsys.readouterr()
    assert run("%memory_budget").success
    assert "of budget 1.00 GiB; 3 steps" in capsys.readouterr().out
    assert run("%memory_budget 2GiB").success
    capsys.readouterr()
    assert run("%memory_budget").success
    assert capsys.readouterr().out == "memory budget of 2.00 GiB; no training step was seen\n"


def test_one_cell_alone(shell, run, plain, capsys) -> None:
    """`%%memory_budget` ends with its cell, and a budget of all cells goes on after it."""
    losses, budget_bytes = plain
    assert run("%memory_budget 5GiB").success
    assert run(f"%%memory_budget {budget_bytes} config\n{TRAIN}\nsize = MemoryBudget.current().budget_bytes").success
    assert shell.user_ns["losses"] == losses
    assert shell.user_ns["size"] == budget_bytes
    capsys.readouterr()
    assert run("%memory_budget\nsize = MemoryBudget.current().budget_bytes").success
    assert "3 steps" in capsys.readouterr().out
    assert shell.user_ns["size"] == 5 * 2**30


def test_a_new_budget_for_all_cells_may_begin_in_a_cell_with_its_own(shell, run) -> None:
    """`%memory_budget` inside of `%%memory_budget` replaces both, from there on."""
    assert run("%memory_budget 5GiB").success
    assert run("%%memory_budget 4GiB\n%memory_budget 6GiB\nsize = MemoryBudget.current().budget_bytes").success
    assert shell.user_ns["size"] == 6 * 2**30
    assert run("size = MemoryBudget.current().budget_bytes").success
    assert shell.user_ns["size"] == 6 * 2**30


def test_a_cell_that_fails_ends_its_budget(run, capsys) -> None:
    """Its error is shown once, and the cell counts as failed."""
    result = run("%%memory_budget 1GiB\n1 / 0")
    assert not result.success
    said = capsys.readouterr()
    assert (said.out + said.err).count("ZeroDivisionError: division by zero") == 1
    assert run("x = 1").success


def test_an_interrupted_cell_is_run_again(shell, run, plain) -> None:
    """Ctrl-C in the middle of a step: what the step held is freed, and the cell has plain's losses afterwards."""
    losses, budget_bytes = plain
    assert run(f"%memory_budget {budget_bytes} config").success
    interrupted = "train(*make(), hook=lambda step: step == 1 and signal.raise_signal(signal.SIGINT))"
    assert run("handler = signal.getsignal(signal.SIGINT)").success
    assert shell.user_ns["handler"] is not signal.default_int_handler  # one that delays it where that is needed
    for _ in range(3):
        assert isinstance(run(interrupted).error_in_exec, KeyboardInterrupt)
    assert run(TRAIN).success
    assert shell.user_ns["losses"] == losses


def test_a_step_that_does_not_fit_and_raises_another_error_leaves_nothing(run, plain) -> None:
    """What such a step held is freed whatever it raises, and whatever that was raised from."""
    _, budget_bytes = plain
    assert run("""
def read():
    model, _ = make()
    outputs = [model(torch.randn(9999, 64)) for _ in range(9)]
    try:
        outputs[8].detach().numpy()
    except RuntimeError as error:
        raise KeyError from error
""").success
    before = held_bytes()
    assert isinstance(run(f"%memory_budget {budget_bytes} config\nread()").error_in_exec, KeyError)
    assert held_bytes() == before


def test_a_cell_that_leaves_after_an_interrupt_is_run_again(shell, run, plain) -> None:
    """As Lightning does it: SystemExit from KeyboardInterrupt, and both hold tensors."""
    losses, budget_bytes = plain
    assert run(f"%memory_budget {budget_bytes} config").success
    assert run("""
def leave():
    model, optimizer = make()
    try:
        train(model, optimizer, hook=lambda step: step == 1 and signal.raise_signal(signal.SIGINT))
    except KeyboardInterrupt:
        raise SystemExit(1)
""").success
    before = held_bytes()
    with pytest.warns(UserWarning, match="To exit"):
        assert isinstance(run("leave()").error_in_exec, SystemExit)
    assert held_bytes() == before
    assert run(TRAIN).success
    assert shell.user_ns["losses"] == losses


def test_a_budget_that_is_too_small_leaves_room_for_the_next_cell(shell, run, plain) -> None:
    """BudgetError names a budget, and with that one the same cell runs."""
    losses, _ = plain
    limit, num_errors = 100_000, 0
    while True:
        assert run(f"%memory_budget {limit} config").success
        error = run(TRAIN).error_in_exec
        if error is None:
            break
        assert isinstance(error, BudgetError)
        limit, num_errors = error.least_budget_bytes, num_errors + 1
        assert num_errors < 5
    assert num_errors
    assert shell.user_ns["losses"] == losses


def test_a_forward_that_does_not_fit_says_so_at_the_end_of_its_cell(shell, run, plain, capsys) -> None:
    """The next cell does not go on with what was never computed."""
    losses, budget_bytes = plain
    assert run(f"%memory_budget {budget_bytes} config").success
    capsys.readouterr()
    assert run("outputs = [make()[0](torch.randn(9999, 64)) for _ in range(9)]").success
    assert "BudgetError: the memory budget of " in capsys.readouterr().err
    assert "outputs" not in shell.user_ns
    assert run("del _").success
    assert run(TRAIN).success
    assert shell.user_ns["losses"] == losses


def test_a_larger_budget_in_the_cell_whose_forward_did_not_fit(shell, run, plain, capsys) -> None:
    """The error of the smaller one is printed, and the larger one begins. `off` raises the error, and is off."""
    losses, budget_bytes = plain
    forward = "outputs = [make()[0](torch.randn(9999, 64)) for _ in range(9)]"
    assert run(f"%memory_budget {budget_bytes} config\n{forward}\n%memory_budget 1GiB").success
    said = capsys.readouterr().err
    assert "BudgetError: the memory budget of " in said
    assert "removed outputs" in said
    assert run(TRAIN + "\nsize = MemoryBudget.current().budget_bytes").success
    assert shell.user_ns["losses"] == losses
    assert shell.user_ns["size"] == 2**30
    result = run(f"%memory_budget {budget_bytes} config\n{forward}\n%memory_budget off")
    assert isinstance(result.error_in_exec, BudgetError)
    assert "outputs" not in shell.user_ns
    assert run("off = MemoryBudget.current()").success
    assert shell.user_ns["off"] is None


@pytest.mark.parametrize("alone", [False, True], ids=["following cells", "one cell"])
def test_what_a_cell_makes_beyond_its_budget_is_removed(shell, run, capsys, alone: bool) -> None:
    """What it made before, and what it did not make, stays."""
    cell = """\
        few = nn.Linear(4, 4)
        number = 3
        many = [nn.Linear(1024, 1024) for _ in range(8)]
        model = nn.Sequential(*many)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        nothing = torch.zeros(1024, 1024)
        itself = []
        itself.append(itself)
    """
    budget_bytes = held_bytes() + (6 << 20)
    assert run("earlier = nn.Linear(4, 4)").success
    if not alone:
        assert run(f"%memory_budget {budget_bytes}").success
    run((f"%%memory_budget {budget_bytes}\n" if alone else "") + textwrap.dedent(cell))
    assert "many, model, optimizer, nothing" in capsys.readouterr().err
    assert not {"many", "model", "optimizer", "nothing"} & set(shell.user_ns)
    assert shell.user_ns["few"](torch.ones(4)).shape == shell.user_ns["earlier"](torch.ones(4)).shape
    assert shell.user_ns["number"] == 3
    assert run("del few, earlier, number, itself").success


def test_what_a_step_that_does_not_fit_makes_a_cell_raise_is_told_with_its_budget_error(run, plain, capsys) -> None:
    """Torch's words about a tensor without content would not say what is wrong."""
    _, budget_bytes = plain
    assert run(f"%memory_budget {budget_bytes} config").success
    capsys.readouterr()
    error = run("outputs = [make()[0](torch.randn(9999, 64)) for _ in range(9)]; outputs[8].detach().numpy()")
    assert "numpy()" in str(error.error_in_exec)
    assert "BudgetError: the memory budget of " in capsys.readouterr().err


def test_a_graph_may_reach_into_the_next_cell(shell, run, plain) -> None:
    """A forward in one cell and its backward in the next have the bits of one cell."""
    _, budget_bytes = plain
    gradients = []
    for magic in ("pass", f"%memory_budget {budget_bytes} config"):
        assert run(magic).success
        assert run("model, _ = make()\nloss = model(torch.randn(2048, 64)).square().mean()").success
        assert run("loss.backward()").success
        gradients.append([parameter.grad for parameter in shell.user_ns["model"].parameters()])
        assert run("del model, loss, _").success
    assert all(torch.equal(*pair) for pair in zip(*gradients, strict=True))


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("%memory_budget 8 potatoes", "'potatoes' cannot be used"),
        ("%memory_budget potatoes", "potatoes"),
        ("%memory_budget 0.8", "80%"),
        ("%memory_budget 80", "name the unit, such as '80GiB'"),
        ("%memory_budget 8GiB 7", "'7' is no torchdelta.Config"),
        ("%memory_budget 8GiB Config(tier='tape')", "'disk', 'memory'"),
        ("%%memory_budget\n1", "name a budget"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(run, line: str, said: str, capsys) -> None:
    """Without a traceback."""
    capsys.readouterr()
    assert not run(line).success
    printed = capsys.readouterr()
    text = (printed.out + printed.err).strip()
    assert text.startswith("UsageError: ")
    assert said in text
    assert len(text.splitlines()) == 1


def test_without_a_budget_the_magic_says_how(run, capsys) -> None:
    """And loading it again changes nothing."""
    for magic in ("%reload_ext torchdelta", "%memory_budget"):
        assert run(magic).success
    assert "no memory budget: %memory_budget LIMIT" in capsys.readouterr().out
