"""Judge one subject: the plain step twice, then once a mode, everything compared bit for bit.

A step that does not always give the same may by chance do so twice. So where a mode differs, the plain step is run some
more times before that is called the mode's fault; how often is in the record.
"""

from __future__ import annotations

import contextlib
import gc
import time
from typing import TYPE_CHECKING, Any

from tests.following import NUM_STEPS, following_drawn
from tests.paused import paused_at_once
from tests.same_bits import judge
from tools.sweep.pool import CRASHED, TIMEOUT
from tools.sweep.subjects import AUTOCAST, PLAIN, REPEATED
from torchdelta import Config, MemoryBudget

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

    from tools.sweep.pool import Report
    from tools.sweep.subjects import Steps
    from torchdelta import SavedBuffer


def in_turn(buffer: SavedBuffer) -> str:
    """Recompute, swap and keep in turn; a class that saves one buffer only has it recomputed."""
    return ("recompute", "swap", "keep")[buffer.index % 3]


# mode -> (which step, what is decided for every saved buffer)
MODES: dict[str, tuple[str, judge.Decisions]] = {
    "recompute": (PLAIN, "recompute"),
    "swap": (PLAIN, "swap"),
    "mixed": (PLAIN, in_turn),
    "bf16": (AUTOCAST, "recompute"),
}

# The step is repeated in one scope, and a drawn program of it is carried out from the third time on.
FOLLOWED = "followed"
# The same, and parameters and gradients leave as drawn, too.
EVERYTHING = "everything"
DECISION_CLASSES = {FOLLOWED: "saved", EVERYTHING: "all"}
# The step is not recorded at first; from a drawn moment on it is, and all that can leave leaves then.
PAUSED = "paused"
PAUSED_UNTIL_BYTES = (20_000, 40_000, 60_000, 100_000)

# Verdicts of a mode. A promise is broken by the last four, of which two are written by who watches the process.
EQUAL = "equal"
NOT_REPRODUCIBLE = "not reproducible"
PLAIN_FAILS = "plain fails"
UNEQUAL = "unequal"
RAISED = "raised"
BROKEN = (UNEQUAL, RAISED, CRASHED, TIMEOUT)

NUM_DIFFERENCES_KEPT = 6
NUM_MORE_PLAIN_RUNS = 20
FIRST_FOLLOWED = 2


def judge_modes(steps: Steps, modes: Sequence[str], report: Report) -> dict[str, Any]:
    """Judge a subject's steps in every mode; each phase is reported before it begins.

    Returns:
        For each mode its verdict and what was found.
    """
    found: dict[str, Any] = {}
    plain: dict[str, judge.Outcome | dict[str, Any]] = {}
    for mode in modes:
        kind, decisions = MODES.get(mode, (PLAIN, "keep"))
        for each in (REPEATED, kind) if mode in DECISION_CLASSES else (kind,):
            kind = each
            if kind not in plain:
                report(kind, found)
                plain[kind] = plain_outcome(steps, kind)
            if not isinstance(plain[kind], dict):
                break  # else a model keeps something of its first run: a new one runs each time
        report(mode, found)
        expected = plain[kind]
        if isinstance(expected, dict):
            found[mode] = expected
        elif mode in DECISION_CLASSES:
            found[mode] = judge_followed(steps[kind], expected, DECISION_CLASSES[mode])
        elif mode == PAUSED:
            # Subjects differ in the bytes that a step leaves, so this is a draw.
            limit_bytes = PAUSED_UNTIL_BYTES[expected.tracked_bytes // 64 % len(PAUSED_UNTIL_BYTES)]
            found[mode] = judge_in(lambda limit=limit_bytes: paused_at_once(limit), steps[kind], expected)
        else:
            config = Config(decisions=decisions, tier="memory")
            found[mode] = judge_in(lambda config=config: MemoryBudget(judge.UNLIMITED, config), steps[kind], expected)
    return found


def plain_outcome(steps: Steps, kind: str) -> judge.Outcome | dict[str, Any]:
    """Run a step plainly, twice.

    Returns:
        What ours is compared with, or the reason why nothing can be.
    """
    if kind not in steps:
        return {"verdict": PLAIN_FAILS, "detail": [f"no step for {kind}"]}
    first = judge.run(steps[kind])
    if first.raised is not None:
        return {"verdict": PLAIN_FAILS, "detail": [first.message[:300]]}
    second = judge.run(steps[kind])
    differing = contents(judge.differences(first, second))
    if differing:
        return {"verdict": NOT_REPRODUCIBLE, "detail": differing[:NUM_DIFFERENCES_KEPT], "num": len(differing)}
    return second


def judge_in(open_budget: judge.Scope, step: judge.Step, expected: judge.Outcome) -> dict[str, Any]:
    """Run a step inside a budget, and compare it with the plain one."""
    budgets: list[MemoryBudget] = []

    @contextlib.contextmanager
    def scope() -> Generator[MemoryBudget]:
        with open_budget() as budget:
            budgets.append(budget)
            yield budget

    started_s = time.perf_counter()
    actual = judge.run(step, scope)
    time_s = time.perf_counter() - started_s
    differing = judge.differences(expected, actual)
    leaked = leaks(step, scope, actual) if judge.leaks(expected, actual) else []
    leaked += [
        f"{budget._past[-1].ledger.num_handles} saved tensors held" for budget in budgets if holds_handles(budget)
    ]
    differing = contents(differing)
    verdict = EQUAL
    if actual.raised is not None:
        verdict, differing = RAISED, [actual.message[:600]]
    elif differing:
        verdict = UNEQUAL
        differing_run = differing_plain_run(step, expected)
        if differing_run:
            verdict = NOT_REPRODUCIBLE
            differing.insert(0, f"plain itself differs, in run {2 + differing_run}")
    result: dict[str, Any] = {"verdict": verdict, "time_s": round(time_s, 4)}
    if differing:
        result |= {"detail": differing[:NUM_DIFFERENCES_KEPT], "num": len(differing)}
    if leaked:
        result["leaks"] = leaked
    if budgets:
        summary = budgets[0].summary()
        result["num_recomputed_ops"] = summary.num_recomputed_ops
        result["recomputed_bytes"] = summary.recomputed_bytes
        result["swapped_out_bytes"] = summary.swapped_out_bytes
    return result


def judge_followed(step: judge.Step, expected: judge.Outcome, decision_class: str) -> dict[str, Any]:
    """Repeat a step inside one scope and compare each time with the plain one, the followed times included."""
    started_s = time.perf_counter()
    outcomes: list[judge.Outcome] = []
    if decision_class == "all":
        # Frozen modules are not found. In later steps they are frozen again, so that the judge's collections are short.
        gc.unfreeze()
    with following_drawn(decision_class=decision_class) as budget:
        for index in range(NUM_STEPS):
            if decision_class == "all" and index == FIRST_FOLLOWED:
                gc.freeze()
            outcomes.append(judge.run(step))
            if outcomes[-1].raised is not None:
                break
    time_s = time.perf_counter() - started_s
    session = budget._past[-1]
    lane = session.partial.lane
    verdict, differing = EQUAL, [d for o in outcomes for d in contents(judge.differences(expected, o))]
    if outcomes[-1].raised is not None:
        verdict, differing = RAISED, [outcomes[-1].message[:600]]
    elif differing:
        verdict = NOT_REPRODUCIBLE if differing_plain_run(step, expected) else UNEQUAL
    result: dict[str, Any] = {
        "verdict": verdict,
        "time_s": round(time_s, 4),
        "num_followed_steps": session.follower.num_followed_steps,
        "num_partial_steps": session.partial.num_steps,
        "num_native_steps": lane.num_steps if lane is not None else 0,
    }
    persistents = session.room.persistents
    if persistents is not None:
        result["num_emptied"] = persistents.emptying.num_emptied
    if differing:
        result |= {"detail": differing[:NUM_DIFFERENCES_KEPT], "num": len(differing)}
    if holds_handles(budget):
        result["leaks"] = [f"{session.ledger.num_handles} saved tensors held"]
    summary = budget.summary()
    result["num_recomputed_ops"] = summary.num_recomputed_ops
    result["recomputed_bytes"] = summary.recomputed_bytes
    result["swapped_out_bytes"] = summary.swapped_out_bytes
    return result


def differing_plain_run(step: judge.Step, expected: judge.Outcome) -> int:
    """Run a step plainly until it gives something else than before; return in which run it did, 0 if in none."""
    for number in range(1, NUM_MORE_PLAIN_RUNS + 1):
        if contents(judge.differences(expected, judge.run(step))):
            return number
    return 0


def holds_handles(budget: MemoryBudget) -> bool:
    """Tell whether saved tensors of a stopped budget are still alive."""
    return bool(budget._past and budget._past[-1].ledger.num_handles)


def contents(differences: list[str]) -> list[str]:
    """Leave the differences that are no leaks."""
    return [difference for difference in differences if not difference.endswith("leaked")]


def leaks(step: judge.Step, scope: judge.Scope, actual: judge.Outcome) -> list[str]:
    """Say what grows with every run.

    A cache of torch or of the model that fills once is no leak; neither is what grows as much without a budget (a
    model whose class keeps a cache of what its instances made).
    """
    growth = judge.leaks(actual, judge.run(step, scope))
    if growth and growth == judge.leaks(judge.run(step), judge.run(step)):
        return []
    return growth
