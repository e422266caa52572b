"""Lists the benchmarks and runs one: `python -m benchmarks`, `python -m benchmarks budget --quick`."""

from __future__ import annotations

import argparse
import importlib
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import ModuleType

NAMES = ("budget", "policies", "oom_proof", "growth")


def main(arguments: list[str]) -> int:
    """Run what was asked for; 1 when a promise is broken."""
    modules = {name: importlib.import_module(f"benchmarks.{name}") for name in NAMES}
    parser = build_parser(modules)
    options = parser.parse_args(arguments)
    if options.name is None:
        parser.print_help()
        return 0
    from benchmarks import results

    command = " ".join(["python -m benchmarks", *arguments])
    outcome = modules[options.name].run(options)
    failed = [check for check in outcome.checks if check.required and not check.passed]
    print(f"\n{len(outcome.checks)} checks, {len(failed)} failed")
    for check in failed:
        print(f"  {check.name}: {check.detail}")
    if not options.no_write:
        checks = [
            {"name": check.name, "passed": check.passed, "required": check.required, "detail": check.detail}
            for check in outcome.checks
        ]
        name = options.name + ("-quick" if options.quick else "") + (f"-{options.tag}" if options.tag else "")
        data = {"passed": outcome.passed, "checks": checks, "data": outcome.data}
        path = results.write(name, command=command, threads=options.threads, disk=outcome.disk, data=data)
        print(f"raw figures in {path.relative_to(results.REPOSITORY)}")
    return 0 if outcome.passed else 1


def build_parser(modules: dict[str, ModuleType]) -> argparse.ArgumentParser:
    """Build the command line: one subcommand a benchmark."""
    from benchmarks import models

    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Measurements of torchdelta.")
    commands = parser.add_subparsers(dest="name", metavar="NAME")
    for name, module in modules.items():
        summary = (module.__doc__ or "").splitlines()[0]
        command = commands.add_parser(name, help=summary, description=module.__doc__)
        command.add_argument("--quick", action="store_true", help="a small part, for trying")
        command.add_argument("--models", nargs="+", choices=list(models.MODELS), default=list(models.MEASURED_MODELS))
        command.add_argument("--threads", type=int, default=1, help="intra-op threads of the measured processes")
        command.add_argument("--timeout", type=float, default=600, help="seconds that one measured process may take")
        command.add_argument("--tag", default="", help="ending of the results file's name")
        command.add_argument("--no-write", action="store_true", help="leave benchmarks/results as it is")
        module.add_arguments(command)
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
