"""Runs the command line within the test's own process: a second instead of several for what needs torch or numba."""

import os
import sys
from unittest import mock

from typer.testing import CliRunner

from torchdelta.cli.app import make_app


def inside(*arguments, code=0):
    """Run `torchdelta ARGUMENTS`, check its exit code, and return the result with its stdout and stderr."""
    with mock.patch.dict(os.environ):  # `run` sets variables for the processes that a script starts
        result = CliRunner().invoke(
            make_app(), list(map(str, arguments)), catch_exceptions=False, env={"COLUMNS": "200"}
        )
    assert result.exit_code == code, f"exit code {result.exit_code}\n{result.stdout}\n{result.stderr}"
    return result


def run_inside(*arguments, code=0):
    """Run `torchdelta run ARGUMENTS` with a script that may do what it likes to `sys`: that is taken back."""
    main = sys.modules["__main__"]
    with (
        mock.patch.object(sys, "argv", sys.argv.copy()),
        mock.patch.object(sys, "path", sys.path.copy()),
        mock.patch.object(sys, "excepthook", sys.__excepthook__),
    ):
        try:
            return inside("run", *arguments, code=code)
        finally:
            sys.modules["__main__"] = main
