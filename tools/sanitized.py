"""Builds the native modules with a sanitizer and runs their tests: `python -m tools.sanitized [address] [thread]`.

Python and torch themselves are not built with it, so it sees what our own code does. The modules go into a directory of
their own; the sanitizer's library is loaded before Python. Fails if a test fails or the sanitizer reports anything.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final
from unittest import mock

from torchdelta.native import build
from torchdelta.native.modules import NATIVE_MODULES

__all__ = ["main"]

SANITIZERS: Final = ("address", "thread")
# Neither the compiler nor forked workers run under a sanitizer that was loaded for Python.
TESTS: Final = ("tests/native", "--ignore=tests/native/test_build.py", "-k", "not data_loader")
ROOT: Final = Path(__file__).parents[1]
_LIBRARIES: Final = {"address": ("libasan.so", "libstdc++.so"), "thread": ("libtsan.so",)}
# Leaks of Python itself would be reported. Its signal handlers allocate by design. Deadlocks are looked for among at
# most 64 locks, and a fork holds more of the counter's.
_OPTIONS: Final = {
    "address": {"ASAN_OPTIONS": "detect_leaks=0:abort_on_error=1"},
    "thread": {"TSAN_OPTIONS": "exitcode=66:report_signal_unsafe=0:die_after_fork=0:detect_deadlocks=0"},
}


def compiler(sanitizer: str, directory: Path) -> Path:
    """Write a command that compiles with a sanitizer. Return its path."""
    path = directory / f"c++-{sanitizer}"
    original = os.environ.get("CXX", "c++")
    path.write_text(f'#!/bin/sh\nexec {original} -g -fno-omit-frame-pointer -fsanitize={sanitizer} "$@"\n')
    path.chmod(0o755)
    return path


def library(name: str) -> str:
    """Return the path of one of the compiler's libraries."""
    command = [os.environ.get("CXX", "c++"), f"-print-file-name={name}"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def run(sanitizer: str, arguments: list[str]) -> int:
    """Build every module, then run the tests. Return pytest's exit status."""
    with tempfile.TemporaryDirectory(prefix="torchdelta-sanitized-") as name:
        directory = Path(name)
        environment = {"CXX": str(compiler(sanitizer, directory)), "TORCH_EXTENSIONS_DIR": str(directory / "built")}
        with mock.patch.dict(os.environ, environment):
            for module in NATIVE_MODULES:
                path = build.built_path(module.source)
                path.parent.mkdir(parents=True, exist_ok=True)
                print(f"building {module.source.name} with -fsanitize={sanitizer}", flush=True)
                build._compile(module, path)
        environment |= _OPTIONS[sanitizer] | {
            "LD_PRELOAD": " ".join(library(one) for one in _LIBRARIES[sanitizer]),
            "OMP_NUM_THREADS": "1",
        }
        command = [sys.executable, "-m", "pytest", "-q", *(arguments or TESTS)]
        status = subprocess.run(command, cwd=ROOT, env=os.environ | environment, check=False).returncode
        if status:
            print(f"pytest ended with status {status} under {sanitizer}")
        return status


def main() -> None:
    """Run the tests under each sanitizer."""
    parser = argparse.ArgumentParser(prog="python -m tools.sanitized", description="Native tests under sanitizers.")
    parser.add_argument("sanitizers", nargs="*", metavar="SANITIZER", help=f"{' or '.join(SANITIZERS)}; default: both")
    parser.add_argument("--tests", nargs="+", default=[], help="instead of tests/native")
    options = parser.parse_args()
    unknown = [name for name in options.sanitizers if name not in SANITIZERS]
    if unknown:
        parser.error(f"no sanitizer named {unknown[0]}: there are {' and '.join(SANITIZERS)}")
    failed = [name for name in options.sanitizers or SANITIZERS if run(name, options.tests)]
    if failed:
        sys.exit(f"failed under: {', '.join(failed)}")


if __name__ == "__main__":
    main()
