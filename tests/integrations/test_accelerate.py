"""Accelerate: a budget around its loop, its search for a batch size, and its launcher."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import find_executable_batch_size
from accelerate.utils.memory import should_reduce_batch_size
from torch.utils.data import DataLoader, TensorDataset

from tests.sampling import keep, sample
from torchdelta import BudgetError, MemoryBudget

WIDTH = 64
NUM_ROWS = 2048


def model_and_data() -> tuple[torch.nn.Module, TensorDataset]:
    """Return a network whose activations take most, and rows for it; the same in each call."""
    torch.manual_seed(0)
    layers = [layer for _ in range(8) for layer in (torch.nn.Linear(WIDTH, WIDTH), torch.nn.GELU())]
    return torch.nn.Sequential(*layers), TensorDataset(torch.randn(NUM_ROWS, WIDTH))


def train(batch_size: int, *, accumulation: int = 1) -> tuple[list[float], list[bytes]]:
    """Train with Accelerate as its documentation does. Return the losses and the bytes of the parameters."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulation)
    model, rows = model_and_data()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    loader = DataLoader(rows, batch_size)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    losses = []
    for (inputs,) in loader:
        with accelerator.accumulate(model):
            loss = (model(inputs) - inputs.roll(1, dims=-1)).square().mean()
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses, [parameter.detach().numpy().tobytes() for parameter in model.parameters()]


@pytest.mark.parametrize("accumulation", [1, 2])
def test_same_bits(accumulation):
    """Losses and parameters are plain's in 70 % of its memory, also where gradients are accumulated."""
    plain = train(512, accumulation=accumulation)
    with MemoryBudget("1TiB") as whole:
        train(512, accumulation=accumulation)
    limit = int(whole.summary().peak_bytes * 0.7)
    with MemoryBudget(limit) as budget:
        assert train(512, accumulation=accumulation) == plain
    summary = budget.summary()
    assert summary.peak_bytes <= limit
    assert summary.swapped_out_bytes + summary.recomputed_bytes > 0
    assert len(summary.steps) == 4


def test_budget_error_is_out_of_memory_to_accelerate():
    """Accelerate, and so the Trainer, recognise BudgetError by its type, its one argument and its words."""
    model, rows = model_and_data()
    with pytest.raises(BudgetError) as caught, MemoryBudget(100_000):
        model(rows[:][0]).sum().backward()
    assert should_reduce_batch_size(caught.value)
    assert len(caught.value.args) == 1


@pytest.mark.parametrize("is_outside", keep([True, False], [True], 0))
def test_find_executable_batch_size(is_outside):
    """The search goes on after a BudgetError until a batch fits, and trains that one as plain does.

    Args:
        is_outside: The budget runs around the search; else one runs in each attempt.
    """
    with pytest.raises(BudgetError) as caught, MemoryBudget("1MiB"):
        train(NUM_ROWS)
    limit = int(caught.value.least_budget_bytes * 0.7)
    del caught  # its traceback keeps the model alive
    tried: list[int] = []

    @find_executable_batch_size(starting_batch_size=NUM_ROWS)
    def search(batch_size):
        tried.append(batch_size)
        if is_outside:
            return train(batch_size)
        with MemoryBudget(limit):
            return train(batch_size)

    if is_outside:
        with MemoryBudget(limit) as budget:
            found = search()
        assert budget.summary().num_refused_steps == len(tried) - 1
    else:
        found = search()
    assert len(tried) > 1
    assert found == train(tried[-1])


# All three trainings in one launch: processes take longer to start than to train.
SCRIPT = """
import json
from accelerate import Accelerator
from tests.integrations.test_accelerate import train
from torchdelta import MemoryBudget

plain, _ = train(512, accumulation=2)
with MemoryBudget("1TiB") as whole:
    train(512, accumulation=2)
limit = int(whole.summary().peak_bytes * 0.8)
with MemoryBudget(limit) as budget:
    losses, _ = train(512, accumulation=2)
summary = budget.summary()
accelerator = Accelerator()
rank = accelerator.process_index
answer = {
    "plain": plain,
    "losses": losses,
    "limit": limit,
    "peak_bytes": summary.peak_bytes,
    "left_bytes": summary.swapped_out_bytes + summary.recomputed_bytes,
    "num_processes": accelerator.num_processes,
}
with open(f"answer-{rank}.json", "w") as file:
    json.dump(answer, file)
accelerator.wait_for_everyone()
accelerator.end_training()
"""


@pytest.mark.long
@pytest.mark.parametrize("num_processes", sample([2, 1], 0, 1))
def test_launch(num_processes, tmp_path):
    """`accelerate launch` runs a script with a budget; each process has its own, and plain's losses."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "accelerate.commands.launch", "--num_machines", "1"]
    command += ["--mixed_precision", "no", "--dynamo_backend", "no", "--num_cpu_threads_per_process", "1"]
    # The one flag for several processes; on CPUs, which the script asks for, they talk by gloo.
    command += ["--multi_gpu"] if num_processes > 1 else ["--cpu"]
    command += ["--num_processes", str(num_processes), "--main_process_port", "0", str(script)]
    path = os.pathsep.join([os.fspath(Path(__file__).parents[2]), os.environ["PYTHONPATH"]])
    environment = {**os.environ, "PYTHONPATH": path, "HF_HOME": os.fspath(tmp_path)}
    result = subprocess.run(
        command, capture_output=True, text=True, timeout=300, check=False, env=environment, cwd=tmp_path
    )
    assert result.returncode == 0, result.stderr
    for rank in range(num_processes):
        answer = json.loads((tmp_path / f"answer-{rank}.json").read_text())
        assert answer["num_processes"] == num_processes
        assert answer["losses"] == answer["plain"]
        assert answer["peak_bytes"] <= answer["limit"]
        assert answer["left_bytes"] > 0
