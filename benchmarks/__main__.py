"""Lists the benchmarks and runs them: `python -m benchmarks`, `... budget --quick`, `... all`."""

from __future__ import annotations

import argparse
import importlib
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import ModuleType

ALL = "all"
NAMES = (
    "budget",
    "policies",
    "following",
    "host",
    "headlines",
    "oom_proof",
    "overheads",
    "resident",
    "everything",
    "lasting",
    "soak",
    "pool",
    "fidelity",
    "arena",
)
ON_REQUEST = ("gpu", "papers", "ledger")  # `all` leaves out what needs more than this machine, or runs nothing on it


def main(arguments: list[str]) -> int:
    """Run what was asked for; 1 when a promise is broken."""
    modules = {name: importlib.import_module(f"benchmarks.{name}") for name in (*NAMES, *ON_REQUEST)}
    parser = build_parser(modules)
    options = parser.parse_args(arguments)
    if options.name is None:
        parser.print_help()
        return 0
    if options.name == ALL:
        quick = ["--quick"] if options.quick else []
        return max(run_one(modules[name], parser.parse_args([name, *quick]), [name, *quick]) for name in NAMES)
    return run_one(modules[options.name], options, arguments)


def run_one(module: ModuleType, options: argparse.Namespace, arguments: list[str]) -> int:
    """Run one benchmark, state its checks and write its results."""
    from benchmarks import results

    # Where somebody keeps their data is nobody's business: the last part of a path is enough.
    command = " ".join(["python -m benchmarks", *(word.rsplit("/", 1)[-1] or word for word in arguments)])
    return results.conclude(module.run(options), options.name, command, options)


def build_parser(modules: dict[str, ModuleType]) -> argparse.ArgumentParser:
    """Build the command line: one subcommand a benchmark."""
    from benchmarks import models, results

    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Measurements of torchdelta.")
    commands = parser.add_subparsers(dest="name", metavar="NAME")
    for name, module in modules.items():
        summary = (module.__doc__ or "").splitlines()[0]
        command = commands.add_parser(name, help=summary, description=module.__doc__)
        results.add_arguments(command)
        command.add_argument("--models", nargs="+", choices=list(models.MODELS), default=list(models.MEASURED_MODELS))
        module.add_arguments(command)
    everything = commands.add_parser(ALL, help="Run them all, one after the other: hours; with --quick, minutes.")
    everything.add_argument("--quick", action="store_true", help="a small part of each")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
