"""What a benchmark hands back: raw data, and the promises that it checked."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, kw_only=True)
class Check:
    """One promise, kept or broken. A check that is not required is stated and does not fail the run."""

    name: str
    passed: bool
    detail: str
    required: bool = True


@dataclass(kw_only=True)
class Outcome:
    """Raw data for the results file, and the checks in the order in which they were made."""

    data: dict[str, Any] = field(default_factory=dict)
    checks: list[Check] = field(default_factory=list)
    disk: dict[str, float] | None = None

    def check(self, name: str, detail: str, *, passed: bool, required: bool = True) -> None:
        """Record a check and say so at once: a run takes long and is watched."""
        self.checks.append(Check(name=name, passed=passed, detail=detail, required=required))
        mark = "ok  " if passed else "FAIL" if required else "note"
        print(f"    {mark} {name}: {detail}", flush=True)

    @property
    def passed(self) -> bool:
        """Tell whether every required check holds."""
        return all(check.passed for check in self.checks if check.required)


def format_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Lay out a Markdown table whose columns also line up in a terminal."""
    widths = [max(len(row[column]) for row in [header, *rows]) for column in range(len(header))]
    lines = [[cell.ljust(width) for cell, width in zip(row, widths, strict=True)] for row in [header, *rows]]
    lines.insert(1, ["-" * width for width in widths])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
