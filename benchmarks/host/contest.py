"""One model, as a worker: the ways to run its step take turns, and each says what a step took of its thread's time."""

from __future__ import annotations

import contextlib
import gc
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.host.subjects import PRESSED, SUBJECTS
from benchmarks.settling import may_change
from benchmarks.turns import BESIDE, PLAIN, take_turns
from torchdelta import BudgetError, Config, MemoryBudget

if TYPE_CHECKING:
    from collections.abc import Iterator

    from benchmarks.host.subjects import Subject
    from benchmarks.turns import Block

NO_OP, FITTING, RECORDING = "no-op mode and hooks", "a step that fits", "recording"
TRACING, REACTING, FOLLOWING = "tracing", "reacting at 60 %", "following at 60 %"
CONTENDERS = (PLAIN, NO_OP, FITTING, RECORDING, TRACING)
IN_BUDGET = (PLAIN, NO_OP, REACTING, FOLLOWING)  # those of the pressed subjects
_SHARE = 0.6  # of what a step adds to the memory at rest
_NUM_WARM_STEPS = 3  # ops, needs and graphs are known after them
_NUM_FOLLOWED_STEPS = 12  # until a program's outline is known and used
_MOST_SETTLING_STEPS = 100  # after them, until the times of all programs were compared with their predictions
_PLANNING_S = 120.0
_UNBOUNDED_BYTES = 1 << 40


class _NoOpMode(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def _no_op() -> Iterator[None]:
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor), _NoOpMode():
        yield


def contest(model: str, num_rounds: int) -> dict[str, Any]:
    """Return the rounds: by contender, the processor time of the training thread in each timed step."""
    torch.manual_seed(0)
    subject = {**SUBJECTS, **PRESSED}[model]()
    for _ in range(_NUM_WARM_STEPS * subject.num_kinds):
        subject.step()
    budget_bytes = _pressing_budget(subject) if model in PRESSED else _UNBOUNDED_BYTES
    refused: dict[str, str] = {}

    def run_block(name: str) -> Block | None:
        gc.collect()
        try:
            block: Block = {"thread_s": _times(subject, name, budget_bytes)}
            if name != PLAIN:  # the machine changes its speed within a round
                block[BESIDE] = {"thread_s": _thread_times(subject)}
            return block
        except BudgetError as error:
            refused[name] = str(error).splitlines()[0]
            return None

    contenders = IN_BUDGET if model in PRESSED else CONTENDERS
    return {"rounds": take_turns(contenders, num_rounds, run_block), "budget_bytes": budget_bytes, "refused": refused}


def _pressing_budget(subject: Subject) -> int:
    with MemoryBudget(_UNBOUNDED_BYTES) as budget:
        rest_bytes = budget._session.ledger.usage.total_bytes
        subject.restart()
        for _ in range(2 * subject.num_kinds):
            subject.step()
    return rest_bytes + int(_SHARE * (budget.summary().peak_bytes - rest_bytes))


def _times(subject: Subject, name: str, budget_bytes: int) -> list[float]:
    if name == FOLLOWING:
        return _followed_times(subject, budget_bytes)
    if name == TRACING:  # a trace is that of the second step
        return [_traced_time(subject) for _ in range(max(1, subject.num_steps // 5))]
    scope: Any = contextlib.nullcontext()
    if name == NO_OP:
        scope = _no_op()
    elif name in {FITTING, RECORDING, REACTING}:
        scope = MemoryBudget(budget_bytes if name == REACTING else _UNBOUNDED_BYTES, Config(planner=None))
    with scope:
        if name == RECORDING:
            scope._session.pause.forbid()  # so that every step is recorded
        for _ in range(_NUM_WARM_STEPS * subject.num_kinds):
            subject.step()
        return _thread_times(subject)


def _followed_times(subject: Subject, budget_bytes: int) -> list[float]:
    with MemoryBudget(budget_bytes, Config(planner="torchdelta")) as budget:
        session = budget._session
        for _ in range(_NUM_WARM_STEPS * subject.num_kinds):
            subject.step()
            session.programs.wait(_PLANNING_S)
        for _ in range(_NUM_FOLLOWED_STEPS * subject.num_kinds):
            subject.step()
        for _ in range(_MOST_SETTLING_STEPS):
            if not any(may_change(program, session.programs) for program in session.programs.cache):
                break
            subject.step()
            session.programs.wait(_PLANNING_S)
        if not session.partial.num_steps:
            raise RuntimeError(f"no step was followed and recorded in part: {session.programs.why_no_plan}")
        return _thread_times(subject)


def _traced_time(subject: Subject) -> float:
    with (
        tempfile.TemporaryDirectory() as directory,
        MemoryBudget(_UNBOUNDED_BYTES, trace_out=Path(directory) / "step.trace"),
    ):
        subject.step()
        return _thread_time(subject)


def _thread_times(subject: Subject) -> list[float]:
    subject.restart()  # all contenders run the same steps
    return [_thread_time(subject) for _ in range(subject.num_steps)]


def _thread_time(subject: Subject) -> float:
    began_s = time.thread_time()
    subject.step()
    return time.thread_time() - began_s
