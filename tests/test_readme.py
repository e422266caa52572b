"""The README: short, and no figure without its raw file."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tools import figures

ROOT = Path(__file__).resolve().parent.parent
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")
ITEMS = re.findall(r"^- .*?(?=^- |^\n|^#|\Z)", TEXT, flags=re.MULTILINE | re.DOTALL)
# A ratio or a share: "3.7x", "60 %", "3 times".
_MEASURED = re.compile(r"\d\s?(?:x\b|%|times\b|percent\b)")


def test_is_short() -> None:
    """It has fewer than 120 lines."""
    assert len(TEXT.splitlines()) < 120


def test_first_screen() -> None:
    """What it is, the loop, the picture, how to install it and how to see it work come first, in this order."""
    wanted = ["# torchdelta", "```diff", "![", "## Install", "make demo"]
    places = [TEXT.find(part) for part in wanted]
    assert -1 not in places
    assert places == sorted(places)


def test_every_figure_of_a_list_is_declared() -> None:
    """An item with a figure names the raw file that holds it, in a link and in a comment."""
    for item in ITEMS:
        shown, _, comment = item.partition("<!-- figures:")
        if not figures.undeclared(shown):
            continue
        assert comment, f"no raw file is declared for the figures of: {shown}"
        linked = {Path(target).name for target in re.findall(r"\]\(([^)]+)\)", shown)}
        named = {figure.path.name for block in figures.blocks(item) for figure in block.figures}
        assert named <= linked, f"{sorted(named - linked)} is not linked in: {shown}"


def measured_outside_of_items(text: str) -> list[str]:
    """Return the lines outside of list items and code blocks that state a ratio or a share."""
    for pattern in (r"^```.*?^```", r"^- .*?(?=^- |^\n|^#|\Z)"):
        text = re.sub(pattern, "", text, flags=re.MULTILINE | re.DOTALL)
    return [line for line in text.splitlines() if _MEASURED.search(line)]


def test_ratios_are_in_lists() -> None:
    """Every ratio and share is in a list item, where the tests around this one look for its raw file."""
    assert measured_outside_of_items(TEXT) == []
    claim = "It is 3.7x faster. In 60 % of the memory."
    assert measured_outside_of_items(TEXT.replace("## Evidence\n", f"## Evidence\n\n{claim}\n")) == [claim]


def test_evidence_has_raw_files() -> None:
    """Every item of the evidence links to a raw file."""
    evidence = TEXT.partition("## Evidence")[2].partition("\n## ")[0]
    items = re.findall(r"^- .*?(?=^- |^\n|^#|\Z)", evidence, flags=re.MULTILINE | re.DOTALL)
    assert len(items) >= 5
    assert [item for item in items if "benchmarks/results/" not in item.partition("<!--")[0]] == []


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (("1.5x", "1.6x"), "'1.6x' is '1.5x'"),
        (("of 40", "of 40 and 50"), "3 figures"),
        (("more > 0", "less > 0"), "less"),
    ],
)
def test_drift_is_found(change: tuple[str, str], problem: str, monkeypatch, tmp_path: Path) -> None:
    """A figure that differs from its file, one that is not declared, and a source that is not there are problems."""
    file = '{"environment": {"measured_at": "2026-12-01T00:00:00Z"}, "data": {"more": [1.5, 40]}}'
    (tmp_path / "raw.json").write_text(file, encoding="utf-8")
    monkeypatch.setattr(figures, "RESULTS", tmp_path)
    page = "- It takes 1.5x of 40.\n  <!-- figures: 1.5x = raw.json > more > 0; 40 = raw.json > more > 1 -->\n"
    (block,) = figures.blocks(page)
    assert figures.check(block) == []
    (block,) = figures.blocks(page.replace(*change))
    assert any(problem in found for found in figures.check(block))


def test_figures_are_updated(monkeypatch, tmp_path: Path) -> None:
    """`make figures` writes the values of the raw file into text and comment, with as many digits as before."""
    file = '{"environment": {"measured_at": "2026-12-01T00:00:00Z"}, "data": {"a": 0.3125, "b": 3145728, "c": 2048}}'
    (tmp_path / "raw.json").write_text(file, encoding="utf-8")
    monkeypatch.setattr(figures, "RESULTS", tmp_path)
    page = "x\n\n- {0} and {1}, {2} steps\n  <!-- figures: {0} = raw.json > a;\n  {1} = raw.json > b\n"
    page += "  {2} = raw.json > c -->\n\ny\n"
    updated = figures.update(page.format("10.0 %", "1 MiB", "1,000"))
    assert updated == page.format("31.2 %", "3 MiB", "2,048")
    (block,) = figures.blocks(updated)
    assert figures.check(block) == []


def test_figures_from_before_the_rebuild_say_so(monkeypatch, tmp_path: Path) -> None:
    """A figure of an old file has to say that it is old, and one of a new file must not."""
    monkeypatch.setattr(figures, "RESULTS", tmp_path)
    for day, is_old in (("2026-11-20", True), ("2026-12-01", False)):
        file = f'{{"environment": {{"measured_at": "{day}T00:00:00Z"}}, "data": {{"a": 2}}}}'
        (tmp_path / f"{day}.json").write_text(file, encoding="utf-8")
        for note in ("", f" ({figures.OLD})"):
            (block,) = figures.blocks(f"- 2 steps{note}\n  <!-- figures: 2 = {day}.json > a -->\n")
            assert (figures.check(block) == []) == (is_old == bool(note))
