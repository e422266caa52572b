"""Writes the attempts as a page of the documents."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchdelta.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tools.matrix.environments import Attempt

__all__ = ["outcome_of", "page"]


def page(attempts: Sequence[Attempt], *, date: str, platform: str, command: str) -> str:
    """Return the page in Markdown.

    Args:
        attempts: One for each combination, in the order of the rows.
        date: The day of the run, "2026-11-24".
        platform: The machine in words.
        command: The command that ran.
    """
    num_tried = sum(attempt.is_tried for attempt in attempts)
    num_passed = sum(attempt.is_passed for attempt in attempts)
    lines = [
        "# Compatibility",
        "",
        "The package supports Python 3.11 to 3.13 and torch 2.11 to 2.14 on Linux. This page says which combinations",
        f"were tried, and is written by `{command}`; do not edit it by hand.",
        "",
        "Each combination has a fresh virtual environment with torch and the wheel of this version. `+cpu` names a",
        "CPU build; the others are builds for CUDA, which were tried on a CPU (`--allow-cuda`).",
        "A small model (convolutions, batch norm, dropout, attention; AdamW) is trained for three steps, plain and in",
        "75 % of its peak. A combination has passed if losses, parameters and buffers are equal bit for bit, the peak",
        "stayed inside the budget, memory was evicted, and the wheel brought nothing but `msgspec` along.",
        "",
        "With torch 2.11 and 2.12, followed steps are recorded as a whole, which takes more host time than later.",
        "",
        "`torch none`: the wheel without torch, in which `torchdelta plan` and `torchdelta simulate` have to work.",
        "",
        f"Run on {date}, {platform}: {num_tried} of {len(attempts)} combinations could be had, {num_passed} passed.",
        "",
        "| Python | torch | result | native counter | peak, budget |",
        "|---|---|---|---|---|",
    ]
    lines += [_row(attempt) for attempt in attempts]
    return "\n".join([*lines, ""])


def outcome_of(attempt: Attempt) -> str:
    """Return what came of a combination, in words."""
    if attempt.is_passed:
        return "passed"
    return f"{'FAILED' if attempt.is_tried else 'not tried'}: {attempt.reason}"


def _row(attempt: Attempt) -> str:
    result = attempt.result
    memory = f"{format_bytes(result['peak_bytes'])}, {format_bytes(result['budget_bytes'])}" if result else ""
    cells = [
        result.get("python", attempt.combination.python),
        result.get("torch", attempt.combination.torch),
        outcome_of(attempt).replace("|", "\\|"),
        result.get("native", ""),
        memory,
    ]
    return f"| {' | '.join(cells)} |"
