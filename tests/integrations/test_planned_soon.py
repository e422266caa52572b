"""The default planner, begun early, where others own the loop: a Trainer, Lightning, a notebook, `torchdelta run`."""

from __future__ import annotations

import gc
import json
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from transformers import Trainer

from tests.cli.inside import inside
from tests.cli.test_follow_plan import TRAIN
from tests.following import planned_soon
from tests.integrations.holding import held_bytes, share_of_peak
from tests.integrations.shells import notebook_shell
from tests.integrations.test_lightning import Classifier, assert_equal, assert_pressed, fit
from tests.integrations.trainers import arguments, assert_same, assert_under_pressure, finished, tiny_llama, token_data
from tests.runtime.parts import running_session
from torchdelta import Config, MemoryBudget
from torchdelta.errors import NativeError
from torchdelta.integrations import lightning, transformers
from torchdelta.native.counting import new_counter

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.integrations.trainers import Run
    from torchdelta.summary import Summary

# Lightning and the compiler warn about themselves.
pytestmark = pytest.mark.filterwarnings("ignore")

CONFIG = Config(tier="memory")
LEAST_BYTES = 4096


@pytest.fixture(autouse=True)
def _soon() -> Iterator[None]:
    made = new_counter()
    if isinstance(made, NativeError):
        pytest.skip(f"no counting allocator here: {made}")
    with planned_soon(least_bytes=LEAST_BYTES):
        yield


def assert_followed(summary: Summary | None) -> None:
    """Assert that steps were followed, some after others had reacted, within the budget."""
    assert summary is not None
    assert summary.follow is not None
    assert summary.follow.num_followed_steps > 0
    assert summary.follow.num_reactive_steps > 0
    assert summary.budget_bytes is not None
    assert summary.peak_bytes <= summary.budget_bytes


def test_the_trainer_of_transformers(tmp_path: Path) -> None:
    """Micro-batches of an accumulation, and evaluations between the steps."""

    def train(limit: int | str | None) -> Run:
        gc.collect()
        options = {"max_steps": 6, "gradient_accumulation_steps": 2, "eval_strategy": "steps", "eval_steps": 2}
        trainer = Trainer(
            tiny_llama(),
            arguments(tmp_path, **options),
            train_dataset=token_data(96),
            eval_dataset=token_data(8, seed=2),
            callbacks=[] if limit is None else [transformers.MemoryBudgetCallback(limit, CONFIG)],
        )
        trainer.train()
        return finished(trainer)

    plain = train(None)
    held = held_bytes()
    limit = share_of_peak(train("1TiB").peak_bytes, 0.7, held)
    ours = train(limit)
    assert_same(plain, ours)
    assert_under_pressure(ours, limit)
    assert_followed(ours.summary)


def test_lightning() -> None:
    """Three epochs with validations between them."""
    options = {"max_epochs": 3, "accumulate_grad_batches": 2}
    held = held_bytes()
    roomy = lightning.MemoryBudgetCallback(2**40, CONFIG)
    fit(Classifier, roomy, **options)
    assert roomy.budget is not None
    callback = lightning.MemoryBudgetCallback(share_of_peak(roomy.budget.summary().peak_bytes, 0.7, held), CONFIG)
    assert_equal(fit(Classifier, callback, **options), fit(Classifier, **options))
    assert_pressed(callback)
    assert callback.budget is not None
    assert_followed(callback.budget.summary())


def test_a_notebook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each cell goes on in the same scope: what was planned in one is followed in the next."""
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    held = held_bytes()
    with notebook_shell() as shell:

        def run(cell: str) -> None:
            assert shell.run_cell(cell).success

        run("model, optimizer = make()")
        run("plain = [train(model, optimizer) for _ in range(3)]\ndel model, optimizer")
        run(f"with MemoryBudget({2**40}, config) as budget:\n    train(*make())")
        budget_bytes = share_of_peak(shell.user_ns["budget"].summary().peak_bytes, 0.6, held)
        run(f"%memory_budget {budget_bytes} config\nmodel, optimizer = make()\nlosses = []")
        for _ in range(3):
            run("losses.append(train(model, optimizer))")
        run("summary = MemoryBudget.current().summary()")
        run("%memory_budget off")
        assert shell.user_ns["losses"] == shell.user_ns["plain"]
        assert_followed(shell.user_ns["summary"])


def test_a_script_that_nobody_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`torchdelta run` plans by default, and says in its summary what was followed."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(TRAIN)
    roomy = inside("run", "--memory-budget", "1TiB", "--json", "train.py", 8, 10)
    peak_bytes = max(step["peak_bytes"] for step in json.loads(roomy.stderr.splitlines()[-1])["steps"][1:])
    ours = inside("run", "--memory-budget", peak_bytes * 65 // 100, "--json", "train.py", 8, 10)
    facts = json.loads(ours.stderr.splitlines()[-1])
    assert ours.stdout == roomy.stdout
    assert len(ours.stdout.splitlines()) == 10
    assert facts["follow"]["num_followed_steps"] > 0
    assert facts["peak_bytes"] <= facts["budget_bytes"]


def test_a_compiled_part() -> None:
    """A compiled block between eager ones."""

    def train(scope: Any) -> tuple[list[str], Any]:
        torch.compiler.reset()
        torch.manual_seed(0)
        blocks = [nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.LayerNorm(64)) for _ in range(8)]
        model = nn.Sequential(*blocks[:3], torch.compile(blocks[3], backend="aot_eager"), *blocks[4:])
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        losses: list[str] = []
        with scope as budget:
            for _ in range(9):
                loss = model(torch.randn(512, 64)).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item().hex())
        return losses, budget

    roomy = MemoryBudget("1TiB", CONFIG)
    held = held_bytes()
    plain, _ = train(roomy)
    ours, budget = train(MemoryBudget(share_of_peak(roomy.summary().peak_bytes, 0.75, held), CONFIG))
    assert ours == plain
    assert_followed(budget.summary())
    torch.compiler.reset()


def test_a_scope_left_in_the_middle_of_planning_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests that have no answer are closed with the scope, and nothing is asked after it."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.LayerNorm(64)) for _ in range(8)))

    def step() -> None:
        model.zero_grad()
        model(torch.randn(512, 64)).square().mean().backward()

    held = held_bytes()
    with MemoryBudget("1TiB", CONFIG) as roomy:
        for _ in range(2):
            step()
    waiting = MemoryBudget(share_of_peak(roomy.summary().peak_bytes, 0.7, held), CONFIG)
    with waiting:
        session = running_session()
        planning = session.programs.planning
        assert planning is not None
        monkeypatch.setattr(planning, "poll", lambda *_: None)
        for _ in range(6):
            step()
        assert len(planning) == 1
    assert len(planning) == 0
    assert session.programs.planning is None
    step()
    assert len(planning) == 0
