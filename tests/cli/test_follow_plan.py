"""The way from a script to its plan and back: `run --trace-out`, `plan`, `run --plan`; and `run --planner`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from tests.cli.command import torchdelta
from tests.cli.inside import inside
from torchdelta.machine.cache import CachedMachine, cache_directory, write_cached
from torchdelta.machine.catalog import find
from torchdelta.native.counting import new_counter

if TYPE_CHECKING:
    from pathlib import Path

TRAIN = """\
import sys
import torch
from torch import nn
torch.manual_seed(0)
depth, num_steps = int(sys.argv[1]), int(sys.argv[2])
layers = [part for _ in range(depth) for part in (nn.Linear(64, 64), nn.GELU(), nn.LayerNorm(64))]
model = nn.Sequential(*layers, nn.Dropout(0.1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
for _ in range(num_steps):
    optimizer.zero_grad()
    loss = model(torch.randn(1024, 64)).square().mean()
    loss.backward()
    optimizer.step()
    print(loss.item().hex())
"""
NUM_STEPS = 6


@pytest.fixture(autouse=True)
def _needs_counter() -> None:
    if isinstance(new_counter(), Exception):
        pytest.skip("no counting allocator here")


def _facts(done: subprocess.CompletedProcess[str]) -> dict:
    return json.loads(done.stderr.splitlines()[-1])


def _measured(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a cache in which this machine was measured, as by `torchdelta probe`, and that has the compiled code."""
    monkeypatch.delenv("TORCHDELTA_CACHE_DIR", raising=False)
    common = cache_directory()
    cache.mkdir()
    for path in common.iterdir() if common.is_dir() else ():
        if not path.name.startswith("machine-"):
            (cache / path.name).symlink_to(path)
    monkeypatch.setenv("TORCHDELTA_CACHE_DIR", str(cache))
    write_cached("cpu", CachedMachine(torch_version="2.13", measured_at="2026-01-01", machine=find("cpu")))
    return cache


@pytest.mark.rest
@pytest.mark.long
def test_from_a_script_to_its_plan_and_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Real commands: trace, plan, follow. The same output as plain Python, inside the budget, from the file."""
    script = tmp_path / "train.py"
    script.write_text(TRAIN)
    script_line = ("train.py", 8, NUM_STEPS)
    env = {"TORCHDELTA_CACHE_DIR": str(_measured(tmp_path / "cache", monkeypatch))}

    def run(*arguments: object, **options: object) -> subprocess.CompletedProcess[str]:
        return torchdelta(*arguments, cwd=tmp_path, env=env, **options)

    traced = run("run", "--memory-budget", "1TiB", "--trace-out", "step.trace", "--json", *script_line)
    plain_peak_bytes = max(step["peak_bytes"] for step in _facts(traced)["steps"][1:])
    budget_bytes = plain_peak_bytes * 65 // 100
    run("plan", "step.trace", "--memory-budget", budget_bytes * 99 // 100, "--machine", "local", "-o", "step.plan")
    followed = run("run", "--memory-budget", budget_bytes, "--plan", "step.plan", "--json", *script_line)
    plain = subprocess.run(
        [sys.executable, *map(str, script_line)],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},  # as the command has it: sums have other bits on two threads
        capture_output=True,
        text=True,
        check=True,
    )
    assert followed.stdout == plain.stdout == traced.stdout
    facts = _facts(followed)
    assert facts["peak_bytes"] <= budget_bytes
    assert "not followed" not in followed.stderr
    assert facts["follow"]["planner"] == "step.plan"
    assert facts["follow"]["num_followed_steps"] == NUM_STEPS - 2
    assert facts["follow"]["num_unplanned"] == 0

    other = run("run", "--memory-budget", budget_bytes, "--plan", "step.plan", "train.py", 9, NUM_STEPS)
    assert "step.plan is not followed: the plan belongs to another trace: it has " in other.stderr


def test_a_plan_that_cannot_be_read_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the script begins."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("print('began')")
    (tmp_path / "bad.plan").write_text("nonsense")
    for name in ("bad.plan", "no.plan"):
        done = inside("run", "--memory-budget", "1GiB", "--plan", name, "train.py", code=2)
        assert done.stdout == ""
        assert name in done.stderr
        assert len(done.stderr.splitlines()) == 1


def test_an_unknown_planner_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An unknown planner is named with those that are known."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("print('began')")
    done = inside("run", "--memory-budget", "1GiB", "--planner", "belady", "train.py", code=2)
    assert "planner='belady' is not allowed: use 'auto', 'autoswap-aoa'" in done.stderr


def test_a_trace_that_cannot_be_written_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A directory that does not exist is found before the script begins; a run without a second step says so."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("print('began')")
    options = ("run", "--memory-budget", "1GiB", "--trace-out")
    assert inside(*options, "no/step.trace", "train.py", code=2).stdout == ""
    done = torchdelta(*options, "step.trace", "train.py", cwd=tmp_path)
    assert f"no trace was written to {tmp_path / 'step.trace'}: there was no complete second step" in done.stderr
