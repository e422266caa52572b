"""`torchdelta run --class all` where parameters, gradients and optimizer states exceed the memory."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from benchmarks.limits import Finished, run_watched
from torchdelta.native.file_mapping import file_mapper

MIB = 1 << 20
BUDGET_BYTES = 160 * MIB
SCRIPT = """
import sys
import torch

width = int(sys.argv[1])
model = torch.nn.Sequential(*(torch.nn.Linear(width, width, bias=False) for _ in range(24)))
optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
for _ in range(2):
    optimizer.zero_grad()
    model(torch.ones(4, width)).square().mean().backward()
    optimizer.step()
print(4 * sum(parameter.nbytes for parameter in model.parameters()))
"""


@pytest.mark.skipif(file_mapper() is None, reason="needs the native modules")
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's figures of a process's memory")
def test_the_end_takes_no_more_than_the_budget(tmp_path: Path) -> None:
    """A script whose tensors are larger than the machine's memory is not killed when it has done its work."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT, encoding="utf-8")

    def run(width: int) -> Finished:
        command = [sys.executable, "-m", "torchdelta", "run", "--memory-budget", str(BUDGET_BYTES), "--class", "all"]
        environment = os.environ | {"TORCHDELTA_SWAP_DIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
        finished = run_watched([*command, str(script), str(width)], environment, Path.cwd(), 120)
        assert finished.exit_code == 0, finished.stderr
        return finished

    small, large = run(8), run(1216)
    everything_bytes = int(large.stdout)
    assert everything_bytes > 3 * BUDGET_BYTES
    assert large.rss_peak_bytes - small.rss_peak_bytes < BUDGET_BYTES + (everything_bytes - BUDGET_BYTES) // 2
