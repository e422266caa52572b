"""`torchdelta run` hands its budget to the processes that a script starts, where they train."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.command import torchdelta
from tests.sampling import keep
from torchdelta.cli import children

FOLDER = Path(children.__file__).parent

CHILD = """\
import os, sys
def train():
    import torch
    from torchdelta import MemoryBudget
    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        model(torch.ones(8, 64)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    running = MemoryBudget.current()
    print("child", running and running.budget_bytes, flush=True)
"""
MAIN = (
    CHILD
    + """
if __name__ == "__main__":
    import multiprocessing
    child = multiprocessing.get_context(sys.argv[1]).Process(target=train)
    child.start()
    child.join()
    sys.exit(child.exitcode)
"""
)
LOADER = """\
import torch
from torchdelta import MemoryBudget
class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 1
    def __getitem__(self, index):
        torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
        return int(MemoryBudget.current() is not None)
if __name__ == "__main__":
    loader = torch.utils.data.DataLoader(Data(), num_workers=1, multiprocessing_context="spawn")
    print([int(item) for item in loader])
"""


@pytest.mark.parametrize("method", keep(["spawn", "forkserver"], ["spawn"]))
def test_processes_of_multiprocessing_have_the_budget(tmp_path, method):
    """Each has the same, and its summary goes to stderr with its process id."""
    path = tmp_path / "train.py"
    path.write_text(MAIN)
    done = torchdelta("run", "--memory-budget", "1GiB", path, method)
    assert done.stdout == f"child {2**30}\n"
    assert "torchdelta[pid " in done.stderr
    assert "of budget 1.00 GiB; 2 steps" in done.stderr


@pytest.mark.rest
def test_subprocesses_have_the_budget_and_its_options(tmp_path):
    """A Python process started by the script, with a rank: one line of JSON beside the parent's."""
    (tmp_path / "work.py").write_text(CHILD + "train()\n")
    path = tmp_path / "train.py"
    path.write_text("import subprocess, sys\nsubprocess.run([sys.executable, 'work.py'], check=True)\n")
    done = torchdelta("run", "--memory-budget", "1GiB", "--json", "--tier", "memory", path, cwd=tmp_path)
    assert done.stdout == f"child {2**30}\n"
    child, parent = (json.loads(line) for line in done.stderr.splitlines())
    assert len(child["steps"]) == 2
    assert child["pid"] > 0
    assert parent["steps"] == []


@pytest.mark.rest
def test_workers_of_a_data_loader_have_none(tmp_path):
    """Not even where a worker makes an optimizer."""
    path = tmp_path / "train.py"
    path.write_text(LOADER)
    done = torchdelta("run", "--memory-budget", "1GiB", path)
    assert done.stdout == "[0]\n"
    assert "torchdelta[pid " not in done.stderr


@pytest.mark.rest
def test_a_sitecustomize_of_the_users_own_still_runs(tmp_path):
    """Ours stands in front of it, and runs it; a process that does not train says nothing."""
    (tmp_path / "sitecustomize.py").write_text("import builtins\nbuiltins.MINE = 7\n")
    path = tmp_path / "train.py"
    path.write_text(
        "import subprocess, sys\nsubprocess.run([sys.executable, '-c', 'import torch; print(MINE)'], check=True)\n"
    )
    env = {"PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ["PYTHONPATH"]])}
    done = torchdelta("run", "--memory-budget", "1GiB", path, env=env)
    assert done.stdout == "7\n"
    assert "torchdelta[pid " not in done.stderr


def test_a_process_that_cannot_import_torchdelta_trains_without_a_budget(tmp_path):
    """As in another environment: the folder that comes first in its path is all that it gets."""
    (tmp_path / "torchdelta").mkdir()
    (tmp_path / "torchdelta" / "__init__.py").write_text("raise ImportError('not installed here')")
    (tmp_path / "work.py").write_text(
        "import torch\ntorch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)\nprint('trained')\n"
    )
    variables = {"TORCHDELTA_RUN": "{}", "PYTHONPATH": os.pathsep.join([str(FOLDER), str(tmp_path)])}
    done = subprocess.run(
        [sys.executable, "work.py"],
        cwd=tmp_path,
        env=os.environ | variables,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "trained\n"
    assert done.stderr.startswith("torchdelta[pid ")
    assert done.stderr.endswith("]: this process opens no budget: not installed here\n")
