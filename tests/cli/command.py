"""Runs the command line as a shell would, in a process of its own."""

import os
import subprocess
import sys


def torchdelta(*arguments, cwd=None, env=None, code=0):
    """Run `torchdelta ARGUMENTS`, check its exit code, and return the finished process with its output."""
    command = [sys.executable, "-m", "torchdelta", *map(str, arguments)]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TORCHDELTA_")}
    # Messages are compared: the width of a terminal must not break them.
    environment |= {"COLUMNS": "200", "NO_COLOR": "1", "OMP_NUM_THREADS": "1"} | (env or {})
    done = subprocess.run(
        command,
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        stdin=subprocess.DEVNULL,
    )
    assert code is None or done.returncode == code, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done
