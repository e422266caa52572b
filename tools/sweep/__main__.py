"""Runs the sweep: `python -m tools.sweep`, `... --quick`, `... --only GPT2Model`."""

from __future__ import annotations

import argparse
import sys

from benchmarks import results
from tools import sweep
from tools.sweep import command


def build_parser() -> argparse.ArgumentParser:
    """Build the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.sweep", description=sweep.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    results.add_arguments(parser)
    command.add_arguments(parser)
    return parser


def main(arguments: list[str]) -> int:
    """Judge what is not judged yet; 1 when a promise is broken."""
    options = build_parser().parse_args(arguments)
    outcome = command.run(options)
    return results.conclude(outcome, command.NAME, " ".join(["python -m tools.sweep", *arguments]), options)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
