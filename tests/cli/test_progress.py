"""`torchdelta run --progress`: one line on stderr, by one rank, while a script trains."""

import os
import pty
import subprocess
import sys

import pytest

from tests.cli.command import torchdelta
from tests.native.without import but_of_absence
from tests.sampling import keep

TRAIN = """\
import sys, time
def train():
    import torch
    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(int(sys.argv[1])):
        model(torch.ones(8, 64)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(0.2)
    print("trained")
if __name__ == "__main__":
    train()
"""


@pytest.fixture
def script(tmp_path):
    """Return a script that takes a number of steps, of a fifth of a second each."""
    path = tmp_path / "train.py"
    path.write_text(TRAIN)
    return path


@pytest.mark.rest
def test_a_file_gets_whole_lines(script):
    """The last one names all steps; nothing of it is on stdout, and the summary follows."""
    done = torchdelta("run", "--memory-budget", "1GiB", "--progress", script, 3)
    assert done.stdout == "trained\n"
    lines = done.stderr.splitlines()
    assert lines[0].startswith("torchdelta: step 3, peak ")
    assert " of 1.00 GiB" in lines[0]
    assert lines[1] == "torchdelta:"


def test_a_terminal_gets_one_line_that_changes(script):
    """It is written over by carriage returns, with the rates, and ended before the summary."""
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "torchdelta", "run", "--memory-budget", "1GiB", "--progress", str(script), "12"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=theirs, stdin=subprocess.DEVNULL)
    os.close(theirs)
    shown = b""
    try:
        while part := os.read(ours, 4096):
            shown += part
    except OSError:  # the other end is closed
        pass
    os.close(ours)
    assert process.wait(60) == 0
    before, _, after = "\r\n".join(but_of_absence(shown.decode().split("\r\n"))).partition("\r\n")
    texts = before.split("\r")[1:]
    assert len(texts) > 1
    assert all(text.startswith("torchdelta: step ") for text in texts)
    assert texts[-1].startswith("torchdelta: step 12, peak ")
    assert " (estimated), " in texts[-1]
    assert texts[-1].rstrip().endswith(" steps/s")
    assert "peak " in after.partition("\r\n")[0]  # the summary, as a table on a terminal


@pytest.mark.rest
@pytest.mark.parametrize("rank", keep(["0", "1"], ["1"]))
def test_only_the_first_rank_shows_it(script, rank):
    """Another one prints its summary alone."""
    done = torchdelta("run", "--memory-budget", "1GiB", "--progress", script, 2, env={"RANK": rank})
    assert (f"torchdelta[rank {rank}]: step 2, " in done.stderr) == (rank == "0")
    assert f"torchdelta[rank {rank}]:\npeak " in done.stderr


@pytest.mark.rest
def test_processes_of_torchrun_show_it_once(script, tmp_path):
    """The launcher runs inside the budget, and of the processes that it starts rank 0 shows its steps."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", script, 3]
    done = torchdelta("run", "--memory-budget", "1GiB", "--progress", *launcher, cwd=tmp_path)
    assert done.stderr.count("]: step 3, peak ") == 1
    assert "torchdelta[rank 0]: step 3, peak " in done.stderr
    assert "torchdelta[rank 1]:\npeak " in done.stderr


@pytest.mark.rest
def test_a_script_without_a_step_shows_no_line(tmp_path):
    """There is nothing to say before the first step."""
    path = tmp_path / "idle.py"
    path.write_text("print(1)\n")
    done = torchdelta("run", "--memory-budget", "1GiB", "--progress", path)
    assert "step " not in done.stderr.partition("\npeak ")[0]
