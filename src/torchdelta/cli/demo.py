"""`torchdelta demo`: trains a real model twice, plain and inside half of its memory, and compares them bit for bit.

The model has the size of GPT-2 and learns the bytes of the source of Python's standard library: nothing is downloaded.
Each run has its own process, where the peak is counted at the allocator.
"""

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from torchdelta.cli.demo_model import DemoResult, DemoRun, DemoStep, broken_promises, differing_steps
from torchdelta.cli.errors import EXIT_FAILED, EXIT_INFEASIBLE, fail, print_result
from torchdelta.cli.options import JsonOption, a_count
from torchdelta.cli.script import EXIT_INTERRUPTED
from torchdelta.config import POLICIES, Config
from torchdelta.host import read_host_memory
from torchdelta.units import format_bytes, parse_size

__all__ = ["demo"]


def demo(
    *,
    memory_budget: Annotated[
        str, typer.Option(help="Budget of the second run: a size, or a share of the plain run's peak.")
    ] = "50%",
    policy: Annotated[str, typer.Option(help=f"What is evicted, and how: {', '.join(POLICIES)}.")] = "torchdelta",
    layers: Annotated[int, typer.Option(callback=a_count, help="Transformer blocks.")] = 12,
    width: Annotated[int, typer.Option(callback=a_count, help="Hidden size, a multiple of 64.")] = 768,
    batch: Annotated[int, typer.Option(callback=a_count, help="Windows of text per step.")] = 8,
    steps: Annotated[int, typer.Option(callback=a_count, help="Training steps.")] = 4,
    as_json: JsonOption = False,
) -> None:
    """Train a real model twice, plain and inside half of its memory, and compare.

    Exits with 1 if a promise is broken: another loss, other parameters, or a peak above the budget.
    """
    plain_run = _checked_run(memory_budget, policy, layers=layers, width=width, batch=batch, steps=steps)
    try:
        with tqdm(total=2 * steps, unit="step", file=sys.stderr, dynamic_ncols=True) as bar:
            bar.set_description("plain")
            plain = _train(plain_run, bar)
            budget_bytes = parse_size(memory_budget, total_bytes=plain.peak_bytes, name="memory budget")
            bar.set_description(f"inside {format_bytes(budget_bytes)}")
            budgeted = _train(replace(plain_run, budget_bytes=budget_bytes), bar)
    except KeyboardInterrupt:
        fail("interrupted", EXIT_INTERRUPTED)
    broken = broken_promises(plain, budgeted)
    if as_json:
        print_result(json.dumps(_as_dict(plain, budgeted, broken)))
    else:
        _print_tables(plain_run, plain, budgeted, broken)
    raise typer.Exit(EXIT_FAILED if broken else 0)


def _checked_run(memory_budget: str, policy: str, *, layers: int, width: int, batch: int, steps: int) -> DemoRun:
    """Check the options before the plain run, which takes a minute."""
    Config(policy=policy)
    parse_size(memory_budget, total_bytes=2**40, name="memory budget")
    if width % 64 != 0:
        near = max(64, 64 * round(width / 64))
        fail(f"--width {width} is not a multiple of 64, the size of an attention head: use {near}")
    if importlib.util.find_spec("transformers") is None:
        fail("the demo needs transformers: pip install transformers", EXIT_FAILED)
    return DemoRun(policy=policy, layers=layers, width=width, heads=width // 64, batch=batch, steps=steps)


def _train(run: DemoRun, bar: Any) -> DemoResult:
    """Run one training in a process of its own, and update the bar after each step."""
    command = [sys.executable, "-m", "torchdelta.cli.demo_train", json.dumps(msgspec.to_builtins(run))]
    # Without this Kineto, which counts the memory, would log two lines for each segment.
    environment = os.environ | {"KINETO_LOG_LEVEL": "99", "TRANSFORMERS_VERBOSITY": "error"}
    result: DemoResult | None = None
    # In a process group of its own, Ctrl-C does not reach the child, which would print a traceback. It is killed below.
    # Its other output goes to stderr immediately.
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment, process_group=0) as child:  # noqa: S603 - own command
        assert child.stdout is not None
        try:
            for line in child.stdout:
                message = _decode(line)
                if isinstance(message, DemoStep):
                    bar.set_postfix(loss=f"{message.loss:.4f}")
                    bar.update()
                elif isinstance(message, DemoResult):
                    result = message
                else:
                    bar.write(line, file=sys.stderr, end="")  # on a line of its own, not on the bar's
        except BaseException:
            child.kill()
            raise
    if child.returncode != 0 or result is None:
        bar.close()
        if child.returncode == EXIT_INFEASIBLE:  # the child has said it
            raise typer.Exit(EXIT_INFEASIBLE)
        fail(_failure_text(run, child.returncode), EXIT_FAILED)
    return result


def _failure_text(run: DemoRun, returncode: int) -> str:
    name = "the plain run" if run.budget_bytes is None else f"the run inside {format_bytes(run.budget_bytes)}"
    if returncode < 0:
        available_bytes = read_host_memory().available_bytes
        memory = "" if available_bytes is None else f"; {format_bytes(available_bytes)} of memory are free now"
        return f"{name} was killed by signal {-returncode}{memory}: make it smaller with --layers or --batch"
    return f"{name} failed with exit code {returncode}"


def _decode(line: str) -> DemoStep | DemoResult | None:
    for kind in (DemoStep, DemoResult):
        try:
            return msgspec.json.decode(line, type=kind)
        except msgspec.DecodeError:
            continue
    return None


def _print_tables(run: DemoRun, plain: DemoResult, budgeted: DemoResult, broken: list[str]) -> None:
    console = Console()
    console.print(
        f"GPT-2-sized model ({run.layers} layers x {run.width}, {plain.num_parameters / 1e6:.0f} M parameters), "
        f"batch {run.batch} x {run.sequence} bytes of Python's standard library, AdamW, {run.steps} steps",
        highlight=False,
    )
    table = Table("", "plain", "torchdelta", "ratio")
    for column in table.columns[1:]:
        column.justify = "right"

    def add(title: str, value: Callable[[DemoResult], float], text: Callable[[float], str]) -> None:
        first, second = value(plain), value(budgeted)
        table.add_row(title, text(first), text(second), f"{second / first:.2f}")

    table.add_row("budget", "-", format_bytes(budgeted.budget_bytes or 0), "")
    add("peak, counted at the allocator", lambda result: result.peak_bytes, format_bytes)
    add("resident memory, high-water mark", lambda result: result.rss_peak_bytes, format_bytes)
    add("step time (median)", lambda result: result.step_time_s, "{:.2f} s".format)
    differing = differing_steps(plain, budgeted)
    for first, second in zip(plain.steps, budgeted.steps, strict=True):
        same = "differs" if first.index in differing else "same bits"
        table.add_row(f"loss, step {first.index + 1}", f"{first.loss:.9f}", f"{second.loss:.9f}", same)
    same = "same bits" if plain.parameters_sha256 == budgeted.parameters_sha256 else "differ"
    table.add_row("final parameters, SHA-256", plain.parameters_sha256[:12], budgeted.parameters_sha256[:12], same)
    console.print(table)
    console.print(f"identical: {'yes' if _identical(plain, budgeted) else 'NO'}", highlight=False)
    for line in broken:
        console.print(f"broken promise: {line}", highlight=False)


def _as_dict(plain: DemoResult, budgeted: DemoResult, broken: list[str]) -> dict[str, Any]:
    return {
        "identical": _identical(plain, budgeted),
        "broken_promises": broken,
        "budget_bytes": budgeted.budget_bytes,
        "plain_peak_bytes": plain.peak_bytes,
        "peak_bytes": budgeted.peak_bytes,
        "plain_rss_peak_bytes": plain.rss_peak_bytes,
        "rss_peak_bytes": budgeted.rss_peak_bytes,
        "plain_time_s": plain.step_time_s,
        "time_s": budgeted.step_time_s,
        "plain": msgspec.to_builtins(plain),
        "torchdelta": msgspec.to_builtins(budgeted),
    }


def _identical(plain: DemoResult, budgeted: DemoResult) -> bool:
    return (
        not differing_steps(plain, budgeted)
        and plain.parameters_sha256 == budgeted.parameters_sha256
        and plain.rng_sha256 == budgeted.rng_sha256
    )
