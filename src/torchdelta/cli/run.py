"""`torchdelta run`: an unchanged training script inside a byte budget."""

import json
import os
import sys
from pathlib import Path
from typing import Annotated, Any, Final, NoReturn

import typer

from torchdelta.cli.script import Outcome, run_script, show_error
from torchdelta.cli.size import number_or_text
from torchdelta.config import POLICIES, Config
from torchdelta.errors import TorchdeltaError

__all__ = ["run"]

EXIT_USAGE: Final = 2
# EX_CONFIG of sysexits.h: the budget is a setting, and it cannot be held.
EXIT_BUDGET: Final = 78


def run(
    target: Annotated[
        str,
        typer.Argument(metavar="SCRIPT", help="The script to run; with -m the module.", show_default=False),
    ],
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="[ARGS]...", help="Its own arguments, passed through untouched.", show_default=False),
    ] = None,
    *,
    memory_budget: Annotated[
        str,
        typer.Option(
            envvar="TORCHDELTA_MEMORY_BUDGET",
            help="'8GiB', '500MB', '80%' of the device (on CPU of the RAM or the container's limit), or bytes.",
            show_default=False,
        ),
    ],
    is_module: Annotated[bool, typer.Option("--module", "-m", help="SCRIPT is a module, as in python -m.")] = False,
    policy: Annotated[str, typer.Option(help=f"Who leaves, and how: {', '.join(POLICIES)}.")] = "torchdelta",
    tier: Annotated[str, typer.Option(help="Where swapped bytes go: disk or memory.")] = "disk",
    swap_dir: Annotated[
        str | None,
        typer.Option(
            envvar="TORCHDELTA_SWAP_DIR", help="Directory of the swap file, on a real disk.", show_default=False
        ),
    ] = None,
    host_budget: Annotated[str | None, typer.Option(help="Most host memory for swapped data.")] = None,
    disk_budget: Annotated[str | None, typer.Option(help="Most disk space for swapped data.")] = None,
    arena: Annotated[bool, typer.Option("--arena", help="On CPU: planned addresses, less fragmentation.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="The summary (on stderr) as one line of JSON.")] = False,
    summary_json: Annotated[
        Path | None,
        typer.Option(help="Write the summary as JSON into this file too; '{rank}' in its name becomes the rank."),
    ] = None,
) -> None:
    """Run an unchanged script inside a byte budget.

    The script's arguments, exit code, stdout and stdin are its own; the summary goes to stderr when it has ended.
    An impossible budget exits with 78. Under torchrun: torchrun --no-python python -m torchdelta run ... SCRIPT ARGS
    """
    if not is_module and not Path(target).exists():
        _fail(f"no script {target!r}", EXIT_USAGE)
    # Only now: --help and wrong usage answer without waiting for torch.
    from torchdelta import BudgetError, MemoryBudget

    try:
        # Typer cannot know the allowed names; Config does, and its message lists them.
        options: dict[str, Any] = {"policy": policy, "tier": tier, "swap_dir": swap_dir, "arena": arena}
        config = Config(**options, host_budget=host_budget, disk_budget=disk_budget)
        budget = MemoryBudget(number_or_text(memory_budget), config)
        budget.start()
    except (TorchdeltaError, ValueError) as error:
        _fail(str(error), EXIT_BUDGET if isinstance(error, BudgetError) else EXIT_USAGE)

    try:
        outcome = run_script(target, arguments or [], is_module=is_module)
    finally:
        try:
            budget.stop()
        except BudgetError as error:  # an impossible step that the script swallowed or outlived
            outcome = Outcome(exit_code=1, error=error)
    exit_code = _report(outcome, BudgetError)
    _flush_stdout()
    _write_summary(budget.summary(), as_json=as_json, path=summary_json)
    raise typer.Exit(exit_code)


def _report(outcome: Outcome, budget_error: type[BaseException]) -> int:
    """Show what the script did not catch; the exit code to leave with."""
    if outcome.error is None:
        return outcome.exit_code
    if isinstance(outcome.error, budget_error):
        # One line is what helps here: the traceback would name whatever op came last, not the cause.
        typer.echo(f"{_prefix()}: {outcome.error}", err=True)
        return EXIT_BUDGET
    show_error(outcome.error)
    return outcome.exit_code


def _write_summary(summary: Any, *, as_json: bool, path: Path | None) -> None:
    text = json.dumps(summary.as_dict())
    typer.echo(text if as_json else f"{_prefix()}:\n{summary}", err=True)
    if path is not None:
        Path(str(path).replace("{rank}", os.environ.get("RANK", "0"))).write_text(text + "\n", encoding="utf-8")


def _flush_stdout() -> None:
    """Bring the script's output out before the summary, where both go to one terminal."""
    try:
        sys.stdout.flush()
    except (OSError, ValueError):
        return  # the script closed it, or the reader of the pipe has gone: not ours to report


def _prefix() -> str:
    rank = os.environ.get("RANK")
    return "torchdelta" if rank is None else f"torchdelta[rank {rank}]"


def _fail(message: str, exit_code: int) -> NoReturn:
    typer.echo(f"{_prefix()}: {message}", err=True)
    raise typer.Exit(exit_code)
