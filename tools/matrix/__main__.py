"""Runs the matrix: `python -m tools.matrix`, `... --python 3.11 --torch 2.13`; `make matrix` builds the wheel first."""

from __future__ import annotations

import argparse
import datetime as dt
import itertools
import platform
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from tools import matrix
from tools.matrix.environments import Combination, attempt, attempt_planning
from tools.matrix.table import outcome_of, page

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tools.matrix.environments import Attempt

ROOT = Path(__file__).parents[2]
PYTHONS = ("3.11", "3.12", "3.13")
TORCHES = ("2.11", "2.12", "2.13", "2.14")


def build_parser() -> argparse.ArgumentParser:
    """Build the command line."""
    parser = argparse.ArgumentParser(prog="python -m tools.matrix", description=matrix.__doc__)
    parser.add_argument("--python", nargs="+", default=list(PYTHONS), choices=PYTHONS, help="minor versions of Python")
    parser.add_argument("--torch", nargs="+", default=list(TORCHES), choices=TORCHES, help="minor versions of torch")
    parser.add_argument("--dist", type=Path, default=ROOT / "dist", help="directory that holds the one wheel to try")
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "reference" / "compatibility.md")
    parser.add_argument(
        "--allow-cuda", action="store_true", help="install builds of torch for CUDA too: several GB each"
    )
    return parser


def try_all(options: argparse.Namespace, wheel: Path) -> Iterator[Attempt]:
    """Try every combination, then every Python without torch; name each on stderr when it is done."""
    for python, torch in itertools.product(options.python, options.torch):
        combination = Combination(python=python, torch=torch)
        yield _told(attempt(combination, wheel, is_cuda_allowed=options.allow_cuda))
    with tempfile.TemporaryDirectory() as directory:
        trace = Path(directory) / "step.trace"
        # Activations are most of it, so that there is something to plan.
        options_of_trace = ("--batch-size", "64", "--optimizer", "none", "-o", str(trace))
        command = [sys.executable, "-m", "torchdelta", "trace", "tools.matrix.smoke:traced", *options_of_trace]
        subprocess.run(command, cwd=ROOT, stdout=subprocess.DEVNULL, check=True)
        for python in options.python:
            yield _told(attempt_planning(python, wheel, trace))


def _told(done: Attempt) -> Attempt:
    combination = done.combination
    print(f"Python {combination.python}, torch {combination.torch}: {outcome_of(done)}", file=sys.stderr, flush=True)
    return done


def main(arguments: list[str]) -> int:
    """Try every combination and write the page; 1 if one that was tried failed."""
    options = build_parser().parse_args(arguments)
    wheels = sorted(options.dist.glob("torchdelta-*-py3-none-any.whl"))
    if len(wheels) != 1:
        print(f"{options.dist} holds {len(wheels)} wheels: it has to be one; `make package` makes it", file=sys.stderr)
        return 2
    attempts = list(try_all(options, wheels[0]))
    text = page(
        attempts,
        date=dt.datetime.now(tz=dt.UTC).date().isoformat(),
        platform=f"{platform.system()} {platform.machine()}, glibc {platform.libc_ver()[1]}",
        command=" ".join(("python -m tools.matrix", *arguments)) if arguments else "make matrix",
    )
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(text, encoding="utf-8")
    print(options.output)
    return int(any(done.is_tried and not done.is_passed for done in attempts))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
