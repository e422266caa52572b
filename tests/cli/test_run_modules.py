"""`torchdelta run` of modules and directories: they are `__main__` as under plain Python."""

import subprocess
import sys

import pytest

from tests.cli.command import torchdelta

LATE = """\
import atexit, pickle, sys
class A: pass
atexit.register(lambda: print(pickle.loads(pickle.dumps(A())).__class__.__module__, sys.argv[0].endswith("n__.py")))
"""


@pytest.mark.rest
@pytest.mark.parametrize("options", [["-m"], []])
def test_a_module_and_a_directory_are_the_main_module_until_the_process_ends(tmp_path, options):
    """A function registered with atexit sees what it sees under plain Python."""
    (tmp_path / "jobs").mkdir()
    (tmp_path / "jobs" / "__main__.py").write_text(LATE)
    done = torchdelta("run", "--memory-budget", "1GiB", *options, "jobs", cwd=tmp_path)
    plain = subprocess.run([sys.executable, *options, "jobs"], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout == plain.stdout
    assert done.stdout.startswith("__main__ ")
