"""HTML of a summary for a notebook: facts as a list, steps as a table. Text only goes in, and all of it is escaped."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["html_table"]


def html_table(
    headline: str, facts: Sequence[tuple[str, str]], heads: Sequence[str], rows: Sequence[Sequence[str]]
) -> str:
    """Return a headline, labelled lines, and a table.

    Facts are (label, text), and a label stands once for the lines that have it; without rows there is no table.
    """
    parts = [f"<p><b>torchdelta</b>: {escape(headline)}</p>"]
    if facts:
        labels = [label if index == 0 or facts[index - 1][0] != label else "" for index, (label, _) in enumerate(facts)]
        lines = "".join(
            '<tr style="vertical-align:top">'
            f'<th style="text-align:left">{escape(label)}</th><td style="text-align:left">{escape(text)}</td></tr>'
            for label, (_, text) in zip(labels, facts, strict=True)
        )
        parts.append(f"<table><tbody>{lines}</tbody></table>")
    if rows:
        parts.append(
            f"<table><thead>{_row('th', heads)}</thead><tbody>{''.join(_row('td', r) for r in rows)}</tbody></table>"
        )
    return f"<div>{''.join(parts)}</div>"


def _row(tag: str, cells: Sequence[str]) -> str:
    return "<tr>" + "".join(f'<{tag} style="text-align:right">{escape(cell)}</{tag}>' for cell in cells) + "</tr>"
