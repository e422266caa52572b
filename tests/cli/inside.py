"""Runs the command line within the test's own process: a second instead of several for what needs torch or numba."""

import os
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
