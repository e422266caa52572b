"""Runs the trainings: `python -m tools.frameworks`, `... --only axolotl`; `make frameworks`."""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

from tools import frameworks
from tools.frameworks.environment import ready
from tools.frameworks.framework import FRAMEWORKS
from tools.frameworks.training import CASES, FrameworkError, compare, make_material

ROOT = Path(__file__).parents[2]


def build_parser() -> argparse.ArgumentParser:
    """Build the command line."""
    parser = argparse.ArgumentParser(prog="python -m tools.frameworks", description=frameworks.__doc__)
    parser.add_argument("--only", nargs="+", default=list(FRAMEWORKS), choices=list(FRAMEWORKS))
    parser.add_argument("--environments", type=Path, default=ROOT / "build" / "frameworks", help="where they are kept")
    return parser


def main(arguments: list[str]) -> int:
    """Train with each framework and print a line for each case; 1 if one failed."""
    options = build_parser().parse_args(arguments)
    num_failed = 0
    for name in options.only:
        framework = FRAMEWORKS[name]
        try:
            python = ready(framework, options.environments / name, ROOT)
        except subprocess.CalledProcessError as error:
            num_failed += 1
            print(f"{name}: FAILED: {error}", flush=True)
            continue
        for case in CASES:
            with tempfile.TemporaryDirectory(prefix="torchdelta-frameworks-") as directory:
                try:
                    make_material(python, Path(directory))
                    outcome = compare(framework, python, case, Path(directory))
                except FrameworkError as error:
                    num_failed += 1
                    outcome = f"FAILED: {error}"
            print(f"{name}, {case}: {outcome}", flush=True)
    return int(num_failed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
