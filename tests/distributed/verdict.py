"""Judges a step inside two processes: the same step plainly and inside a budget, in each, bit for bit."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tests.same_bits.judge import (
    DECISIONS,
    UNLIMITED,
    Outcome,
    Scope,
    Step,
    comparable_conditions,
    differences,
    plain_outcome,
    run,
)
from torchdelta import Config, MemoryBudget

if TYPE_CHECKING:
    from collections.abc import Callable

PRESSED = "pressed"
KINDS = (*DECISIONS, PRESSED)
# A share of the peak inside a budget that does not press. Gathered parameters and their gradients cannot leave.
SHARE = 0.8
_plain: dict[str, Outcome] = {}


def judge(
    rank: int, name: str, build: Callable[..., Step], arguments: tuple[Any, ...], kind: str, share: float = SHARE
) -> dict[str, Any]:
    """Run a step plainly (once a process) and as `kind` says. Returns what differs, and what was done."""
    del rank
    with comparable_conditions():
        step = build(*arguments)
        if name not in _plain:
            _plain[name] = plain_outcome(step)
        plain = _plain[name]
        assert plain.raised is None, plain.message
        budgets: list[MemoryBudget] = []
        if kind == PRESSED:
            run(step, _scope(budgets, UNLIMITED, None))
            ours = run(step, _scope(budgets, int(budgets[0].summary().peak_bytes * share), None))
        else:
            ours = run(step, _scope(budgets, UNLIMITED, DECISIONS[kind]))
        summary = budgets[-1].summary()
        found = [difference for difference in differences(plain, ours) if "leaked" not in difference]
        return {
            "differences": found,
            "budget_bytes": summary.budget_bytes,
            "last_peak_bytes": summary.steps[-1].peak_bytes,
            "swapped_out_bytes": summary.swapped_out_bytes,
            "recomputed_bytes": summary.recomputed_bytes,
        }


def _scope(budgets: list[MemoryBudget], size: int | str, decisions: Any) -> Scope:
    def scope() -> MemoryBudget:
        budgets.append(MemoryBudget(size, Config(decisions=decisions, tier="memory")))
        return budgets[-1]

    return scope


def assert_good(answers: list[dict[str, Any]], kind: str) -> None:
    """Assert that both ranks have the plain run's bits, did what was asked, and ended inside their budgets."""
    for answer in answers:
        assert not answer["differences"], answer["differences"][:8]
        if kind == "swap":
            assert answer["swapped_out_bytes"] > 0
        elif kind == "recompute":
            assert answer["recomputed_bytes"] > 0
        elif kind == PRESSED:
            assert answer["swapped_out_bytes"] + answer["recomputed_bytes"] > 0
            # What an op takes inside itself is learned when its shapes are first met; the last step's are known.
            assert answer["last_peak_bytes"] <= answer["budget_bytes"]


def replayed(rank: int, build: Callable[..., Step], *arguments: Any) -> list[str]:
    """Return the names of all ops that a step replays when everything that can be is recomputed."""
    from torchdelta.runtime.memory import replay

    del rank
    names: list[str] = []
    original = replay.replay_op

    def noted(entry: Any, args: Any, kwargs: Any) -> Any:
        names.append(entry.facts.name)
        return original(entry, args, kwargs)

    replay.replay_op = noted
    try:
        run(build(*arguments), _scope([], UNLIMITED, "recompute"))
    finally:
        replay.replay_op = original
    return names
