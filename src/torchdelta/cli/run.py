"""`torchdelta run`: an unchanged training script inside a byte budget."""

import contextlib
import json
import os
import sys
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from torchdelta.cli.children import hand_on
from torchdelta.cli.errors import EXIT_INFEASIBLE, EXIT_USAGE, check_input, check_output, fail, prefix
from torchdelta.cli.progress import Progress
from torchdelta.cli.script import Outcome, run_script, show_error
from torchdelta.cli.stderr import print_on_stderr
from torchdelta.cli.summary_table import show_summary
from torchdelta.config import POLICIES
from torchdelta.errors import TorchdeltaError
from torchdelta.settings import resolve_settings
from torchdelta.whole_file import write_whole

__all__ = ["run"]

_LEAST_BYTES: Final = 2**16  # a smaller number without a unit was meant in another one


def run(
    target: Annotated[
        str,
        typer.Argument(metavar="SCRIPT", help="The script to run; with -m the module.", show_default=False),
    ],
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="[ARGS]...", help="The script's arguments, passed through.", show_default=False),
    ] = None,
    *,
    memory_budget: Annotated[
        str | None,
        typer.Option(
            help="'8GiB', '500MB', '80%' of the device (on CPU: of RAM or the container's limit), bytes, or 'auto': "
            "what is free, less a margin. Required here, as TORCHDELTA_MEMORY_BUDGET, or in the settings file.",
            show_default=False,
        ),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(
            help="Settings file (TOML). Otherwise TORCHDELTA_CONFIG, torchdelta.toml or the table tool.torchdelta "
            "of pyproject.toml here. Options win over the environment, and that over the file.",
            show_default=False,
        ),
    ] = None,
    is_module: Annotated[bool, typer.Option("--module", "-m", help="SCRIPT is a module, as in python -m.")] = False,
    policy: Annotated[
        str | None,
        typer.Option(help=f"What is evicted, and how: {', '.join(POLICIES)}.", show_default="torchdelta"),
    ] = None,
    decision_class: Annotated[
        str | None,
        typer.Option(
            "--class",
            help="What may leave: saved, or all (also parameters, gradients and optimizer states; experimental).",
            show_default="saved",
        ),
    ] = None,
    tier: Annotated[
        str | None, typer.Option(help="Where swapped bytes go: disk or memory.", show_default="disk")
    ] = None,
    swap_dir: Annotated[
        str | None, typer.Option(help="Directory of the swap file, on a real disk.", show_default=False)
    ] = None,
    host_budget: Annotated[str | None, typer.Option(help="Most host memory for swapped data.")] = None,
    disk_budget: Annotated[str | None, typer.Option(help="Most disk space for swapped data.")] = None,
    plan: Annotated[
        Path | None,
        typer.Option(
            help="Follow this plan from the third step on; `torchdelta plan` makes it from --trace-out's trace.",
            show_default=False,
        ),
    ] = None,
    planner: Annotated[
        str | None,
        typer.Option(
            help="Have steps planned while the script runs, and follow the plans: auto (once that pays), torchdelta, "
            "one that `torchdelta plan --planner list` lists, or none.",
            show_default="auto",
        ),
    ] = None,
    trace_out: Annotated[
        Path | None,
        typer.Option(
            help="Write the trace of the second step into this file; '{rank}' in its name becomes the rank.",
            show_default=False,
        ),
    ] = None,
    arena: Annotated[
        bool | None,
        typer.Option(
            "--arena/--no-arena", help="On CPU: plan addresses, for less fragmentation.", show_default="no-arena"
        ),
    ] = None,
    shows_progress: Annotated[
        bool, typer.Option("--progress", help="Show steps, peak and slowdown on stderr while the script runs.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary (on stderr) as one line of JSON.")] = False,
    summary_json: Annotated[
        Path | None,
        typer.Option(help="Also write the summary as JSON into this file; '{rank}' in its name becomes the rank."),
    ] = None,
) -> None:
    """Run an unchanged script inside a byte budget.

    The script keeps its arguments, exit code, stdin and stdout; the summary is printed to stderr at the end.
    An impossible budget exits with 78. Under torchrun: torchrun --no-python python -m torchdelta run ... SCRIPT ARGS

    Each Python process that the script starts (multiprocessing's "spawn" and "forkserver", torchrun, subprocess) gets
    the same budget from its first torch.optim optimizer on, and prints its own summary with its rank or process id.
    Forked processes and DataLoader workers get none.
    """
    if not is_module and not (target and Path(target).exists()):
        fail(f"no script {target!r}")
    if not is_module and not Path(target).is_dir():
        check_input(Path(target))
    trace_out = None if trace_out is None else _of_rank(trace_out)
    check_input(config)
    check_input(plan)
    inputs = {"the script": None if is_module else Path(target), "the configuration": config, "the plan": plan}
    check_output(trace_out, others=inputs)
    if summary_json is not None:
        summary_json = _of_rank(summary_json)
        check_output(summary_json, may_be_device=True, others=inputs | {"the trace": trace_out})
        summary_json = summary_json.absolute()  # the script may change the directory
    # Imported late, so that --help and wrong usage do not wait for torch.
    from torchdelta import BudgetError, MemoryBudget

    arguments_given: dict[str, Any] = {"memory_budget": memory_budget, "policy": policy, "planner": planner}
    arguments_given |= {"decision_class": decision_class, "tier": tier, "swap_dir": swap_dir, "arena": arena}
    arguments_given |= {"host_budget": host_budget, "disk_budget": disk_budget}
    try:
        given = {key: value for key, value in arguments_given.items() if value is not None}
        settings = resolve_settings(given, file=config)
        if settings.memory_budget is None:
            _refuse_budget_after_script(target, arguments or [])
        wanted = settings.required_budget()
        if isinstance(wanted, int) and 0 < wanted < _LEAST_BYTES:  # from a file: text is checked where it is parsed
            fail(f"a memory budget of {wanted} is {wanted} bytes: name the unit, such as {wanted}GiB", EXIT_USAGE)
        budget = MemoryBudget(wanted, settings.config, plan=plan, trace_out=trace_out)
        budget.start()
    except (TorchdeltaError, ValueError) as error:
        fail(str(error), EXIT_INFEASIBLE if isinstance(error, BudgetError) else EXIT_USAGE)

    hand_on(wanted, settings.options, plan=plan, as_json=as_json, shows_progress=shows_progress)
    progress = Progress(budget) if shows_progress and os.environ.get("RANK", "0") == "0" else None
    own_process = os.getpid()
    failure: Exception | None = None
    try:
        outcome = run_script(target, arguments or [], is_module=is_module)
    finally:
        if os.getpid() == own_process:
            if progress is not None:
                progress.stop()
            failure = _stop(budget)
            if isinstance(failure, BudgetError):  # the script caught that of an impossible step, or ended before it
                outcome = Outcome(exit_code=1, error=failure)
    exit_code = _report(outcome, BudgetError)
    if failure is not None and not isinstance(failure, BudgetError):
        print_on_stderr(f"{prefix('run')}: {failure}")
        exit_code = exit_code or 1
    if os.getpid() != own_process:  # a child that the script forked: the budget and its summary are the parent's
        raise typer.Exit(exit_code)
    summary = budget.summary()
    as_text = json.dumps(summary.as_dict())
    if summary_json is not None:
        _write_summary(summary_json, as_text)
    with contextlib.suppress(Exception):  # the script closed it or put another object there, or its reader is gone
        sys.stdout.flush()  # so that the script's output comes before the summary on a terminal
    if as_json:
        print_on_stderr(as_text)
    else:
        show_summary(summary)
    raise typer.Exit(exit_code)


def _stop(budget: Any) -> Exception | None:
    """Stop the budget, or one that the script has started in its place. Return what it raises."""
    running = budget.current()
    try:
        if running is not None:
            running.stop()
    except (TorchdeltaError, RuntimeError) as error:  # RuntimeError: no memory for what comes back
        return error
    return None


def _refuse_budget_after_script(target: str, arguments: list[str]) -> None:
    name = "--memory-budget"
    for given, following in zip(arguments, [*arguments[1:], ""], strict=False):
        if given == name or given.startswith(f"{name}="):
            budget = given.partition("=")[2] or following or "8GiB"
            fail(
                f"no memory budget is given: {name} stands after {target} and went to the script; put it before, as in "
                f"torchdelta run {name} {budget} {target}"
            )


def _report(outcome: Outcome, budget_error: type[BaseException]) -> int:
    """Show the script's uncaught exception, if any, and return the exit code."""
    if outcome.error is None:
        return outcome.exit_code
    error: BaseException | None = outcome.error
    seen: set[int] = set()  # after `raise error from error`, an error is its own cause
    while error is not None and id(error) not in seen:
        if isinstance(error, budget_error):
            # Without the traceback: it would show the last op, not the cause.
            print_on_stderr(f"{prefix('run')}: {error}")
            return EXIT_INFEASIBLE
        seen.add(id(error))
        error = error.__cause__  # torch's `Module.to` wraps what moving a parameter raises
    of_hook = show_error(outcome.error)
    return outcome.exit_code if of_hook is None else of_hook


def _write_summary(path: Path, text: str) -> None:
    try:
        write_whole(path, f"{text}\n".encode())
    except OSError as error:  # the script's own exit code is kept
        print_on_stderr(f"{prefix('run')}: cannot write {str(path)!r}: {error.strerror or error}")


def _of_rank(path: Path) -> Path:
    """Return the path with the rank of this process in place of '{rank}'."""
    return Path(str(path).replace("{rank}", os.environ.get("RANK", "0")))
