"""Figures in the documents, and the raw files that they come from.

A paragraph, list item or table with figures is followed by a comment that says where each one stands, in their order:

    - GPT-2-like takes 1.39x of plain's time in half of its memory ([raw](benchmarks/results/NAME.json)).
      <!-- figures: 1.39x = ratio: NAME.json > gpt2-like > reactive @ 50% -->

Several sources are separated by semicolons or stand in lines of their own.

| source | value |
|---|---|
| `FILE > KEY > KEY > ...` | the number there; as bytes for MiB and GiB, as a share for % |
| `ratio: FILE > MODEL > CONTENDER [over CONTENDER]` | its step time over plain's, median of rounds |
| `share: FILE > MODEL > BUDGET` | a budget or a peak by its label, as a share of plain's peak |
| `check: FILE > NAME [> N]` | the first (or Nth) number in what the check of that name found |

`python -m tools.figures` compares all figures with the raw files; with `--write` it puts the present values into the
text, with as many digits as stand there. Figures of files that were measured before the runtime was rebuilt have to
say so (`OLD`).
"""

from __future__ import annotations

import argparse
import functools
import json
import re
import statistics
import sys
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Final

from benchmarks.turns import PLAIN, fair_rounds, ratios

__all__ = ["Block", "blocks", "check", "undeclared", "update"]

REPOSITORY: Final = Path(__file__).resolve().parent.parent
RESULTS: Final = REPOSITORY / "benchmarks" / "results"
# When the runtime was rebuilt. Younger files show what is there today.
REBUILT: Final = datetime.fromisoformat("2026-11-23T11:06:20+00:00")
OLD: Final = "before the rebuild"

_COMMENT: Final = re.compile(r"^ *<!-- figures:(?P<sources>.*?)-->\n?", re.MULTILINE | re.DOTALL)
_KINDS: Final = ("ratio: ", "share: ", "check: ")
_NUMBER: Final = r"[-+]?\d[\d,]*(?:\.\d+)?"
_FIGURE: Final = re.compile(rf"(?P<number>{_NUMBER})(?P<gap> ?)(?P<unit>%|x|MiB|GiB|points|)")
# What has digits and is no figure: names, code, links, versions.
_NO_FIGURE: Final = re.compile(
    r"`[^`]*`|\]\([^)]*\)|GPT2?-?\d?|ResNet-\d+|VGG-\d+|FSDP2|\d+ threads?|torch \d[\d.]*|[A-Z]\d+(?:-\d+g)?"
    r"|DELTA \d{4}|bf16|fp32|(?:January|November) \d{4}"
)


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One figure: as the text has it, and its source."""

    text: str
    source: str

    @property
    def path(self) -> Path:
        """The raw file."""
        return RESULTS / _parts(self.source)[1]

    def present(self) -> str:
        """Return the text with the present value, in the same form.

        Raises:
            LookupError: The source is not in its file.
        """
        found = _FIGURE.fullmatch(self.text)
        if found is None:
            raise LookupError(f"{self.text!r} is no figure: write a number, and %, x, MiB, GiB or points if it has one")
        value, unit = _value(self.source), found["unit"]
        scale = {"%": 0.01, "MiB": 2**20, "GiB": 2**30}.get(unit, 1)
        if self.source.startswith("check:"):
            scale = 1  # what a check says is written with its unit
        digits = len(found["number"].partition(".")[2])
        comma = "," if "," in found["number"] else ""
        sign = "+" if found["number"].startswith("+") else ""
        return f"{value / scale:{sign}{comma}.{digits}f}{found['gap']}{unit}"


@dataclass(frozen=True, kw_only=True)
class Block:
    """Text with figures: where it begins and ends, and where its comment does."""

    begin: int
    end: int
    comment_end: int
    text: str
    figures: tuple[Figure, ...]


def blocks(page: str) -> list[Block]:
    """Return all blocks of a page that declare their figures."""
    found: list[Block] = []
    for comment in _COMMENT.finditer(page):
        begin = _begin(page, comment.start())
        figures = tuple(
            Figure(text=text.strip(), source=source.strip())
            for text, _, source in (part.partition(" = ") for part in re.split(r"[;\n]", comment["sources"]))
            if text.strip()
        )
        text = page[begin : comment.start()]
        found.append(Block(begin=begin, end=comment.start(), comment_end=comment.end(), text=text, figures=figures))
    return found


def check(block: Block) -> list[str]:
    """Return what is wrong with a block: figures that drifted, that stand elsewhere, or that are not declared."""
    problems: list[str] = []
    cursor = 0
    for figure in block.figures:
        place = block.text.find(figure.text, cursor)
        if place < 0:
            problems.append(f"{figure.text!r} is declared but does not stand there, in this order")
            continue
        cursor = place + len(figure.text)
        try:
            present = figure.present()
        except (LookupError, OSError, TypeError, ValueError) as error:
            problems.append(f"{figure.text!r}: {figure.source}: {error}")
            continue
        if present != figure.text:
            problems.append(f"{figure.text!r} is {present!r} in {figure.source}")
    num_written, num_declared = len(undeclared(block.text)), len(block.figures)
    if num_written != num_declared:
        written = [found.group() for found in undeclared(block.text)]
        problems.append(f"{num_written} figures {written} stand there, {num_declared} are declared")
    is_old = any(_measured_at(figure.path) < REBUILT for figure in block.figures if figure.path.suffix == ".json")
    if is_old != (OLD in block.text):
        problems.append(f"the raw files are {'older' if is_old else 'younger'} than the rebuild: {OLD!r} says so")
    return [f"{' '.join(block.text.split())[:60]}...: {problem}" for problem in problems]


def undeclared(text: str) -> list[re.Match[str]]:
    """Return the figures in a text, names and code left out."""
    return list(_FIGURE.finditer(_NO_FIGURE.sub(lambda name: " " * len(name.group()), text)))


def update(page: str) -> str:
    """Return a page with the present values."""
    for block in reversed(blocks(page)):
        text, declared, cursor = block.text, page[block.end : block.comment_end], 0
        for figure in block.figures:
            present = figure.present()
            place = text.index(figure.text, cursor)
            text = text[:place] + present + text[place + len(figure.text) :]
            cursor = place + len(present)
            declared = declared.replace(f"{figure.text} = {figure.source}", f"{present} = {figure.source}", 1)
        page = page[: block.begin] + text + declared + page[block.comment_end :]
    return page


def pages() -> list[Path]:
    """Return the pages that declare figures."""
    everything = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").rglob("*.md"))]
    return [path for path in everything if _COMMENT.search(path.read_text(encoding="utf-8"))]


def _begin(page: str, end: int) -> int:
    """Return where the list item, table or paragraph before a comment begins."""
    begin = page.rfind("\n", 0, end - 1) + 1
    while begin > 0 and not page.startswith("- ", begin):
        previous = page.rfind("\n", 0, begin - 1) + 1
        if not page[previous : begin - 1].strip():
            break
        begin = previous
    return begin


def _parts(source: str) -> tuple[str, str, list[str]]:
    """Return the kind of a source, its file and the keys in it."""
    kind, _, rest = source.partition(": ") if source.startswith(_KINDS) else ("", "", source)
    file_name, *keys = (part.strip() for part in rest.split(" > "))
    return kind, file_name, keys


def _value(source: str) -> float:
    """Return the number that a source names."""
    kind, file_name, keys = _parts(source)
    document = _document(RESULTS / file_name)
    if kind == "ratio":
        model, contenders = keys
        contender, _, baseline = contenders.partition(" over ")
        rounds = document["data"][model]["rounds"]
        return statistics.median(ratios(fair_rounds(rounds), contender, baseline or PLAIN))
    if kind == "share":
        model, label = keys
        data = document["data"][model]
        return (data["budgets"] | data["peaks"])[label] / data["peaks"]["plain"]
    if kind == "check":
        name, *number = keys
        detail = next((each["detail"] for each in document["checks"] if each["name"] == name), None)
        if detail is None:
            raise LookupError(f"there is no check {name!r}")
        return float(re.findall(_NUMBER, detail)[int(number[0]) - 1 if number else 0].replace(",", ""))
    value: Any = document["data"]
    for key in keys:
        value = value[int(key)] if isinstance(value, list) else value[key]
    return float(value)


def _measured_at(path: Path) -> datetime:
    return datetime.fromisoformat(_document(path)["environment"]["measured_at"])


@functools.cache
def _document(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))


def main() -> int:
    """Compare or rewrite all pages."""
    parser = argparse.ArgumentParser(prog="python -m tools.figures", description="Figures against their raw files.")
    parser.add_argument("--write", action="store_true", help="put the present values into the pages")
    options = parser.parse_args()
    problems: list[str] = []
    for path in pages():
        page = path.read_text(encoding="utf-8")
        if options.write and (updated := update(page)) != page:
            path.write_text(updated, encoding="utf-8")
            print(f"{path.relative_to(REPOSITORY)}: updated")
            page = updated
        problems += [f"{path.relative_to(REPOSITORY)}: {problem}" for block in blocks(page) for problem in check(block)]
    print("\n".join(problems) or "all figures are those of the raw files")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
