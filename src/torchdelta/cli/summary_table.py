"""Shows a summary on stderr: as tables on a terminal, as plain text elsewhere."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from torchdelta.cli.errors import prefix
from torchdelta.cli.stderr import is_terminal, print_on_stderr

if TYPE_CHECKING:
    from torchdelta.summary import Summary

__all__ = ["show_summary"]


def show_summary(summary: Summary) -> None:
    """Print a summary on stderr."""
    print_on_stderr(_table(summary) if is_terminal(sys.stderr) else f"{prefix()}:\n{summary}")


def _table(summary: Summary) -> str:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(stderr=True, highlight=False)
    console.begin_capture()
    console.print(Text.assemble((prefix(), "bold"), ": ", (summary.headline(), "red" if summary.over_bytes else "")))
    facts = Table.grid(padding=(0, 2))
    before = ""
    for label, text in summary.facts():
        facts.add_row(Text("" if label == before else label, style="cyan"), Text(text))
        before = label
    console.print(facts)
    heads, rows = summary.step_table()
    if rows:
        table = Table(box=None, pad_edge=False, header_style="dim")
        for head in heads:
            table.add_column(head, justify="right")
        for cells in rows:
            table.add_row(*map(Text, cells))
        console.print(table)
    return console.end_capture().removesuffix("\n")
