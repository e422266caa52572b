"""README and documents: every code block runs or says why not, links lead somewhere, the commands are all described."""

from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING

import pytest

from tests.pages import DATA, ROOT, RUN, code_blocks, missing_line, run_page
from tools import figures

if TYPE_CHECKING:
    from pathlib import Path

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
NAMES = [str(path.relative_to(ROOT)) for path in PAGES]
# Pages whose blocks run within a few seconds; the others are left to `make test-rest`.
QUICK = {"README.md", "docs/howto/choose-a-budget.md"}
LONG = {"docs/tutorial.md", "docs/howto/plan-without-a-gpu.md"}

# The page of a framework, and the summary of the budget in its first script.
SUMMARIES = {
    "docs/howto/accelerate.md": "summary",
    "docs/howto/lightning.md": "budget.budget.summary()",
    "docs/howto/pytorch.md": "tight.summary()",
    "docs/howto/transformers.md": "callback.budget.summary()",
    "docs/howto/trl.md": "budget.budget.summary()",
}
# A budget that plain's peak fits in would show nothing.
CHECK = """
summary_of_page = {summary}
assert summary_of_page.swapped_out_bytes + summary_of_page.recomputed_bytes > 0
assert summary_of_page.peak_bytes <= summary_of_page.budget_bytes
share_of_plain = summary_of_page.budget_bytes / summary_of_page.plain_peak.size_bytes
assert 0.5 <= share_of_plain <= 0.8, share_of_plain
"""

_LINK = re.compile(r"(?<!`)\[[^\]]*\]\((?P<target>[^)\s]+)\)")


def _text(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def _pages_to_run() -> list[object]:
    names = [name for name in NAMES if any(block.is_run for block in code_blocks(_text(name)))]
    return [pytest.param(name, marks=_marks(name)) for name in names]


def _marks(name: str) -> list[pytest.MarkDecorator]:
    if name in QUICK:
        return []
    return [pytest.mark.rest, pytest.mark.long] if name in LONG else [pytest.mark.rest]


@pytest.mark.parametrize("name", NAMES)
def test_blocks_run_or_say_why_not(name: str) -> None:
    """A block is python or console, or plain data, or a comment above it says why it is not run."""
    for block in code_blocks(_text(name)):
        place = f"{name}:{block.line}"
        if "not run" in block.notes:
            assert block.notes["not run"], f"{place}: write `<!-- not run: why -->`"
        else:
            allowed = ", ".join([*RUN, *DATA])
            assert block.language in {*RUN, *DATA}, (
                f"{place}: a block of {block.language or 'no language'}: name one of {allowed}, "
                "or write `<!-- not run: why -->` above it"
            )


def _syntax_error(text: str) -> str | None:
    try:
        ast.parse(text)
    except SyntaxError as error:
        return str(error)
    return None


@pytest.mark.parametrize("name", NAMES)
def test_python_is_python(name: str) -> None:
    """Python blocks, also those that are not run and what a diff makes of a loop, can be parsed."""
    for block in code_blocks(_text(name)):
        text = block.text
        if block.language == "diff":
            text = "".join(line[1:] for line in text.splitlines(keepends=True) if not line.startswith("-"))
        if block.language in {"python", "diff"}:
            assert _syntax_error(text) is None, f"{name}:{block.line}"


@pytest.mark.parametrize("name", _pages_to_run())
def test_page_runs(name: str, tmp_path: Path) -> None:
    """The blocks of a page run in their order, and commands print what the page shows.

    The first script of a framework's page has a budget of 50 to 80 % of the plain peak.
    """
    check = CHECK.format(summary=SUMMARIES[name]) if name in SUMMARIES else ""
    done = run_page(ROOT / name, tmp_path, check=check)
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"


@pytest.mark.parametrize("name", NAMES)
def test_links(name: str) -> None:
    """Links to files and to headings lead somewhere."""
    page = ROOT / name
    for link in _LINK.finditer(re.sub(r"```.*?```", "", _text(name), flags=re.DOTALL)):
        target, _, heading = link["target"].partition("#")
        if re.match(r"[a-z]+:", target):
            continue
        path = (page.parent / target).resolve() if target else page
        assert path.exists(), f"{name}: {link['target']} is not there"
        assert path.is_relative_to(ROOT), f"{name}: {link['target']} is outside of the repository"
        if heading:
            assert heading in _headings(path.read_text(encoding="utf-8")), f"{name}: no heading #{heading} in {target}"


def _headings(page: str) -> set[str]:
    titles = re.findall(r"^#{1,6} (.*)$", page, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.strip().lower()).replace(" ", "-") for title in titles}


def test_all_commands_are_described() -> None:
    """The reference has a part for every command."""
    from torchdelta.cli.app import make_app

    names = {command.name or command.callback.__name__ for command in make_app().registered_commands}
    described = re.findall(r"^```\{torchdelta-command\} (\w+)$", _text("docs/reference/cli.md"), flags=re.MULTILINE)
    assert sorted(described) == sorted(names)


def test_all_errors_are_described() -> None:
    """The reference of errors names every error of the library."""
    from torchdelta import errors

    page = _text("docs/reference/errors.md")
    assert [name for name in [*errors.__all__, "BudgetError"] if f"`{name}`" not in page] == []


@pytest.mark.parametrize("path", figures.pages(), ids=lambda path: path.name)
def test_figures_are_those_of_the_raw_files(path: Path) -> None:
    """Each declared figure is in its raw file, to the last digit that is shown."""
    problems = [
        problem for block in figures.blocks(path.read_text(encoding="utf-8")) for problem in figures.check(block)
    ]
    assert problems == [], "run `make figures`, then read what changed"


def test_output_is_compared_without_its_numbers() -> None:
    """A shown line has to be printed, in this order, but for numbers, blanks and what "..." stands for."""
    output = "peak 1.00 GiB of budget 2 GiB; 3 steps\nloss 5.25\ndone in 3 s\n"
    assert missing_line(["peak 20.5 MiB of budget 1.00 GiB;   4 steps", "...", "done in 12.5 s"], output) is None
    assert missing_line(["peak ... 4 steps"], output) is None
    assert missing_line(["loss 1.0", "peak 1 B of budget 1 B; 3 steps"], output) == "peak 1 B of budget 1 B; 3 steps"
    assert missing_line(["failed in 3 s"], output) == "failed in 3 s"
