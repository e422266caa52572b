"""A session goes on and off torch without a trace, and does not grow."""

from __future__ import annotations

import gc
import logging
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from tests.runtime.parts import engine_door, module_hooks, optimizer_hooks
from tests.runtime.programs import UNLIMITED, mlp, running, same_bits, train
from torchdelta import BudgetError, Config, MemoryBudget
from torchdelta._torch.modes import mode_stack, num_modes
from torchdelta.errors import TierIOError
from torchdelta.runtime.current import current_session
from torchdelta.runtime.memory.persistents import Persistents
from torchdelta.runtime.session import Session

if TYPE_CHECKING:
    from collections.abc import Callable


def sizes_of(session: Session) -> dict[str, int]:
    """Count everything that a session keeps."""
    transfers = session.room.transfers
    return {
        "live bytes": session.ledger.usage.live_bytes,
        "records": len(session.ledger.records),
        "held": len(session.ledger.held),
        "handles": session.ledger.num_handles,
        "predictions": len(session.recorder.needs.learned),
        "on the tape": sum(
            record.current is not None and record.current.op is not None for record in session.ledger.records.values()
        ),
        "leaving": len(transfers.leaving),
        "away": len(transfers.away),
        "dropped": len(session.room.costs.dropped()),
        "tier": transfers.opened_tier.used_bytes if transfers.opened_tier is not None else 0,
        "files": len(list(Path("/proc/self/fd").iterdir())),
        "threads": threading.active_count(),
    }


LOOPS: dict[str, dict[str, Any]] = {
    "keep": {"decisions": "keep"},
    "recompute": {"decisions": "recompute"},
    "swap": {"decisions": "swap"},
    "disk": {"decisions": "swap", "tier": "disk"},
    "budget": {"policy": "torchdelta"},
    "dtr": {"policy": "dtr"},
}


@pytest.mark.parametrize("name", LOOPS)
def test_nothing_grows_over_fifty_steps(name: str) -> None:
    """Records, held buffers, tape, handles, slots, files and threads are the same after step 5 and step 50."""
    options = dict(LOOPS[name])
    model, x = mlp(64, 2, dropout=0.1), torch.randn(96, 64)
    budget: int | str = UNLIMITED
    if "policy" in options:
        with running() as (memory_budget, _):
            train(model, x)
        budget = int(memory_budget.summary().peak_bytes * 0.8)
    optimizer = torch.optim.AdamW(model.parameters())
    seen: dict[int, dict[str, int]] = {}
    with running(budget, **options) as (memory_budget, session):
        for step in range(51):
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if step in {5, 50}:
                gc.collect()
                seen[step] = sizes_of(session)
    assert seen[50] == seen[5]
    assert seen[50]["handles"] == 0
    assert len(memory_budget.summary().steps) == 51


def test_python_objects_do_not_grow() -> None:
    """The collector lists as many objects after 30 steps as after 10, but for the step summaries themselves."""
    model, x = mlp(64, 2), torch.randn(64, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    counts: list[int] = []
    with running(decisions="recompute") as (_, session):
        for step in range(31):
            model(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            if step in {10, 20, 30}:
                gc.collect()
                counts.append(len(gc.get_objects()) - len(session.steps.summaries))
    assert counts[2] - counts[1] <= counts[1] - counts[0] + 5
    assert counts[2] - counts[1] <= 5


def test_everything_is_taken_off_again() -> None:
    """Hooks, patches, modes and the thread's session are gone after the stop."""
    door, guard = engine_door(), torch.autograd.graph.disable_saved_tensors_hooks
    num_hooks = len(optimizer_hooks)
    with MemoryBudget(UNLIMITED, Config(decisions=lambda _: "keep")):
        assert engine_door() is not door
        assert current_session() is not None
        assert num_modes() == 1
        assert not module_hooks
    assert engine_door() is door
    assert torch.autograd.graph.disable_saved_tensors_hooks is guard
    assert current_session() is None
    assert num_modes() == 0
    assert len(optimizer_hooks) == num_hooks


def test_patches_stay_until_the_last_session() -> None:
    """Two threads' sessions share them; whoever stops last takes them off."""
    door = engine_door()
    first_in, second_out = threading.Event(), threading.Event()
    seen: list[bool] = []

    def other() -> None:
        with MemoryBudget(UNLIMITED):
            first_in.set()
            assert second_out.wait(timeout=60)
            seen.append(engine_door() is door)

    thread = threading.Thread(target=other)
    with MemoryBudget(UNLIMITED):
        thread.start()
        assert first_in.wait(timeout=60)
    second_out.set()
    thread.join()
    assert seen == [False]
    assert engine_door() is door


def test_tier_is_closed_when_the_last_graph_is_gone() -> None:
    """Not before: a backward after the stop reads from it."""
    threads = threading.active_count()
    x = torch.randn(64, 64, requires_grad=True)
    with running(decisions="swap", tier="disk") as (_, session):
        total = (x * 2).sin().sum()
    assert session.ledger.num_handles > 0
    total.backward()
    assert session.ledger.num_handles == 0
    assert threading.active_count() == threads
    assert not session.ledger.records


def test_session_dies_with_its_scope() -> None:
    """After a collection no session of the past is left, also of scopes that ended in an error."""

    def sessions() -> int:
        gc.collect()
        return sum(type(thing) is Session for thing in gc.get_objects())

    x = torch.randn(64, 64, requires_grad=True)
    before = sessions()
    for decisions in ("recompute", "swap", "keep"):
        with running(decisions=decisions):
            (x * 2).sin().sum().backward()
        with pytest.raises(KeyError), running(decisions=decisions):  # noqa: PT012
            (x * 2).sin().sum()
            raise KeyError
    with pytest.raises(BudgetError), running(20_000):
        (torch.randn(256, 256, requires_grad=True) * 2).sin().sum().backward()
    assert sessions() == before


def test_functional_transforms_work_inside() -> None:
    """Their region is left plain, and the recorder is back after it."""
    w = torch.randn(8, 8, requires_grad=True)
    plain = torch.func.grad(lambda row: (row @ w.detach()).sin().sum())(torch.ones(8))
    with running(decisions="recompute") as (_, session):
        ours = torch.func.grad(lambda row: (row @ w.detach()).sin().sum())(torch.ones(8))
        jacobian = torch.func.jacrev(lambda row: (row * 2).sin())(torch.ones(3))
        batched = torch.func.vmap(lambda row: row.sin().sum())(torch.ones(4, 3))
        assert mode_stack() == [session.recorder]
        (w * 2).sin().sum().backward()
    assert torch.equal(ours, plain)
    assert jacobian.shape == (3, 3)
    assert batched.shape == (4,)
    assert w.grad is not None


@pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf"
)  # Dynamo asks every input for it
@pytest.mark.parametrize("decisions", ["recompute", "swap", "keep"])
def test_compiled_submodule_works_during_and_after(decisions: str) -> None:
    """A compiled part beside eager ones.

    The same bits, compiled before the scope or inside it, and it still runs compiled afterwards.
    """
    from torch._dynamo import lookup_backend

    torch.compiler.reset()
    num_graphs = 0

    def backend(graph: Any, inputs: Any) -> Callable[..., Any]:
        nonlocal num_graphs
        num_graphs += 1
        return lookup_backend("aot_eager")(graph, inputs)

    def observe(compiled: Callable[..., Any], model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
        model.zero_grad()
        loss = compiled(model[0](x)).sin().sum()
        loss.backward()
        return [
            loss.detach().clone(),
            *(parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None),
        ]

    model, x = nn.Sequential(mlp(64, 1), mlp(64, 2)), torch.randn(64, 64)
    compiled = torch.compile(model[1], backend=backend)
    plain = observe(compiled, model, x)
    assert num_graphs == 1
    with running(decisions=decisions) as (_, session):
        inside = [observe(compiled, model, x) for _ in range(2)]
        fresh = torch.compile(lambda y: (y * 2).tanh(), backend=backend)
        assert fresh(x).shape == x.shape
        assert mode_stack() == [session.recorder]
    after = observe(compiled, model, x)
    assert all(same_bits(plain, ours) for ours in [*inside, after])
    graphs_before = num_graphs
    observe(compiled, model, x)
    assert num_graphs == graphs_before
    torch.compiler.reset()


class _Refusing(logging.Handler):
    """A handler of the program that raises for one message."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.text = text

    def emit(self, record: logging.LogRecord) -> None:
        """Raise for that message."""
        if self.text in record.getMessage():
            raise RuntimeError("mine")


@pytest.mark.parametrize("text", ["no trace was written", "result:"])
def test_an_error_while_a_budget_ends_leaves_nothing_behind(tmp_path: Path, text: str) -> None:
    """Everything is removed from torch all the same, and the next budget runs."""
    logger, handler = logging.getLogger("torchdelta"), _Refusing(text)
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    num_threads, num_hooks = threading.active_count(), len(optimizer_hooks)
    try:
        with (
            pytest.raises(RuntimeError, match="mine"),
            MemoryBudget("1GiB", Config(decisions="swap"), trace_out=tmp_path / "step.trace"),
        ):
            mlp()(torch.randn(8, 64)).sum()
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
    assert current_session() is None
    assert num_modes() == 0
    assert not mode_stack()
    assert len(optimizer_hooks) == num_hooks
    gc.collect()
    assert threading.active_count() == num_threads
    with running(UNLIMITED):
        train(mlp(), torch.randn(8, 64))


def test_what_cannot_be_brought_back_hides_no_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two errors at a budget's end the lost content is raised, and the `BudgetError` is its context."""
    model = mlp()

    def close(_: object) -> None:
        raise TierIOError("mine")

    monkeypatch.setattr(Persistents, "close", close)
    least = sum(parameter.nbytes for parameter in model.parameters())
    with pytest.raises(TierIOError, match="mine") as raised, running(least, decision_class="all"):
        model(torch.randn(1 << 14, 64)).sum()  # too large, and no backward ends the survey
    assert isinstance(raised.value.__context__, BudgetError)
    assert current_session() is None
