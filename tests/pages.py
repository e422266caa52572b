"""The code blocks of README and documents: finds them, and runs those of one page in their order.

What a page may say in a comment right above a block:

    <!-- not run: why -->      the block is shown only
    <!-- file: train.py -->    the block is the content of this file, which later blocks use
    <!-- exit: 78 -->          its last command exits with this code (0 without the comment)

A python block is executed in one process with those before it. In a console block, lines that begin with "$ " are
commands (with "> " they go on), which run in the page's own folder; all other lines are output that has to appear in
this order, where numbers and amounts of blanks may differ, and "..." stands for anything.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RUN = ("python", "console")
DATA = ("text", "json", "yaml", "toml", "ini", "csv", "diff")
_FENCE = re.compile(r"^(?P<indent> *)(?P<fence>`{3,}|~{3,})(?P<info>.*)$")
_NOTE = re.compile(r"^\s*<!-- (?P<kind>not run|file|exit):(?P<text>.*)-->\s*$")


@dataclass(frozen=True, kw_only=True)
class CodeBlock:
    """One fenced block.

    Attributes:
        language: What stands behind the fence; empty if nothing does.
        line: The line of the page in which its text begins, from 1.
        text: The block without its indentation.
        notes: What the comments above it say, by kind.
    """

    language: str
    line: int
    text: str
    notes: dict[str, str]

    @property
    def is_run(self) -> bool:
        """Whether the page's test executes it."""
        return self.language in RUN and "not run" not in self.notes


def code_blocks(page: str) -> list[CodeBlock]:
    """Return the fenced blocks of a page, those of Sphinx left out."""
    found: list[CodeBlock] = []
    lines = page.splitlines()
    index = 0
    while index < len(lines):
        opening = _FENCE.match(lines[index])
        if opening is None:
            index += 1
            continue
        begin = index + 1
        end = next(place for place in range(begin, len(lines)) if lines[place].strip() == opening["fence"])
        language = opening["info"].strip()
        if not language.startswith("{"):
            indent = len(opening["indent"])
            text = "\n".join(line[indent:] for line in lines[begin:end]) + "\n"
            found.append(CodeBlock(language=language, line=begin + 1, text=text, notes=_notes(lines, index)))
        index = end + 1
    return found


def _notes(lines: list[str], index: int) -> dict[str, str]:
    """Return what the comments above a line say."""
    notes: dict[str, str] = {}
    for line in reversed(lines[:index]):
        note = _NOTE.match(line)
        if note is not None:
            notes[note["kind"]] = note["text"].strip()
        elif line.strip():
            break
    return notes


def run_page(path: Path, folder: Path, timeout_s: float = 300, check: str = "") -> subprocess.CompletedProcess[str]:
    """Run the blocks of a page in a folder, in a process of their own, and return it.

    Args:
        path: The page.
        folder: Where its files are written and its commands run.
        timeout_s: The most time that it may take.
        check: Python that is executed right after the page's first python block, with the names of that block.
    """
    blocks = [asdict(block) for block in code_blocks(path.read_text(encoding="utf-8")) if block.is_run]
    if check:
        first = next(index for index, block in enumerate(blocks) if block["language"] == "python")
        blocks.insert(first + 1, blocks[first] | {"text": check})
    bin_folder = folder / ".bin"
    bin_folder.mkdir()
    # What a reader types: `python` and `torchdelta` are this interpreter and this checkout.
    for name, command in (("python", sys.executable), ("torchdelta", f"{sys.executable} -m torchdelta")):
        (bin_folder / name).write_text(f'#!/bin/sh\nexec {command} "$@"\n', encoding="ascii")
        (bin_folder / name).chmod(0o755)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TORCHDELTA_")}
    environment |= {
        "PATH": f"{bin_folder}{os.pathsep}{os.environ.get('PATH', '')}",
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(folder)]),
        "OMP_NUM_THREADS": "1",
        "COLUMNS": "100",
        "NO_COLOR": "1",
    }
    return subprocess.run(
        [sys.executable, __file__, str(path.relative_to(ROOT))],
        input=json.dumps(blocks),
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


def missing_line(shown: list[str], output: str) -> str | None:
    """Return the first shown line that the output lacks, numbers and blanks aside; None if all are there."""
    lines = iter([_normal(line) for line in output.splitlines()])
    for line in shown:
        wanted = _normal(line)
        if wanted in {"", "..."}:
            continue
        pattern = re.compile(".*".join(re.escape(part.strip()) for part in wanted.split("...")) + r"\Z")
        if not any(pattern.match(present) for present in lines):
            return line
    return None


def _normal(line: str) -> str:
    """Return a line with # for each number, whatever the unit of a size."""
    line = re.sub(r"[-+]?(?<![A-Za-z_])\d+(?:[.,]\d+)*(?:e-?\d+)?", "#", line)
    return " ".join(re.sub(r"# ?[KMG]?i?B\b", "# B", line).split())


def _execute(page: str, blocks: list[dict[str, object]]) -> None:
    """Run the blocks in this process; exit with 1 at the first one that fails."""
    names: dict[str, object] = {"__name__": "__main__"}
    for block in blocks:
        text, line, notes = str(block["text"]), int(str(block["line"])), dict(block["notes"])  # type: ignore[call-overload]
        if "file" in notes:
            Path(notes["file"]).write_text(text, encoding="utf-8")
        elif block["language"] == "python":
            try:
                # Empty lines in front: a traceback shows the line of the page.
                exec(compile("\n" * (line - 1) + text, page, "exec"), names)  # noqa: S102 - our own documents
            except Exception:  # noqa: BLE001 - whatever it is, the test shows it
                traceback.print_exc()
                sys.exit(1)
        else:
            _execute_console(page, text, line, int(notes.get("exit", "0")))


def _execute_console(page: str, text: str, line: int, exit_code: int) -> None:
    commands: list[tuple[str, list[str]]] = []
    for row in text.splitlines():
        if row.startswith("$ "):
            commands.append((row[2:], []))
        elif row.startswith("> ") and not commands[-1][1]:
            commands[-1] = (f"{commands[-1][0]}\n{row[2:]}", [])
        else:
            commands[-1][1].append(row)
    for index, (command, shown) in enumerate(commands):
        wanted_code = exit_code if index == len(commands) - 1 else 0
        done = subprocess.run(
            ["bash", "-c", command],  # noqa: S607 - the shell of the documents
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        missing = missing_line(shown, done.stdout)
        if done.returncode != wanted_code or missing is not None:
            why = f"exit code {done.returncode}, {wanted_code} is wanted"
            if missing is not None:
                why = f"this line is not in the output, numbers aside: {missing}"
            print(f"{page}:{line}: $ {command}\n{why}\n{done.stdout}", file=sys.stderr)
            sys.exit(1)
        print(f"$ {command}\n{done.stdout}")


if __name__ == "__main__":
    _execute(sys.argv[1], json.load(sys.stdin))
