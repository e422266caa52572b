"""Processes that a script under `torchdelta run` starts: each that trains opens its own scope with the same budget.

`run` puts the budget into the environment, and the folder of `sitecustomize.py` first into PYTHONPATH. Every Python
interpreter that inherits them (multiprocessing's "spawn" and "forkserver", torchrun, subprocess) runs that file. It
opens the scope when the first optimizer is constructed, since DataLoader workers, servers and launchers never construct
one. A forked child starts no new interpreter, so it gets no scope.
"""

from __future__ import annotations

import json
import os
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any, Final

from torchdelta.cli.stderr import print_on_stderr

__all__ = ["VARIABLE", "hand_on", "open_scope"]

VARIABLE: Final = "TORCHDELTA_RUN"  # the budget and the options, as JSON; sitecustomize.py knows the name too


def hand_on(
    memory_budget: int | str, options: dict[str, Any], *, plan: Path | None, as_json: bool, shows_progress: bool = False
) -> None:
    """Give the budget, and a plan, to every Python process that is started from now on; rank 0 shows progress."""
    plan_path = None if plan is None else str(plan.absolute())  # a process may start in another directory
    given = {"memory_budget": memory_budget, "options": options, "plan": plan_path, "as_json": as_json}
    given["progress"] = shows_progress
    os.environ[VARIABLE] = json.dumps(given)
    folder = str(Path(__file__).parent)
    others = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path and path != folder]
    os.environ["PYTHONPATH"] = os.pathsep.join([folder, *others])


def open_scope() -> None:
    """Enforce the budget on this thread until the process ends, which prints the summary on stderr."""
    import torch.utils.data

    from torchdelta import Config, MemoryBudget
    from torchdelta.errors import TorchdeltaError

    if torch.utils.data.get_worker_info() is not None or MemoryBudget.current() is not None:
        return
    given = json.loads(os.environ[VARIABLE])
    try:
        budget = MemoryBudget(given["memory_budget"], Config(**given["options"]), plan=given["plan"])
        budget.start()
    except (TorchdeltaError, ValueError) as error:
        print_on_stderr(f"{_prefix()}: this process trains without a budget: {error}")
        return
    progress = None
    if given["progress"] and os.environ.get("RANK") == "0":
        from torchdelta.cli.progress import Progress

        progress = Progress(budget)
    # A process of multiprocessing runs finalizers but no atexit functions; other processes run both.
    Finalize(None, _close, args=(budget, progress), kwargs={"as_json": given["as_json"]}, exitpriority=0)


def _close(budget: Any, progress: Any, *, as_json: bool) -> None:
    from torchdelta.errors import TorchdeltaError

    if progress is not None:
        progress.stop()
    try:
        if type(budget).current() is budget:
            budget.stop()
    except TorchdeltaError as error:  # an impossible step whose error was not raised yet
        print_on_stderr(f"{_prefix()}: {error}")
    summary = budget.summary()
    as_dict = {"pid": os.getpid(), **summary.as_dict()}
    print_on_stderr(json.dumps(as_dict) if as_json else f"{_prefix()}:\n{summary}")


def _prefix() -> str:
    rank = os.environ.get("RANK")
    return f"torchdelta[pid {os.getpid()}]" if rank is None else f"torchdelta[rank {rank}]"
