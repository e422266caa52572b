"""A host budget and a disk budget are for a machine: the training processes on it share them."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.distributed.pair import NUM_RANKS
from tests.runtime.parts import running_session
from torchdelta import Config, MemoryBudget

if TYPE_CHECKING:
    from pathlib import Path

    from tests.distributed.pair import Pair

NODE_BYTES = 2 << 20

BUDGET_BYTES = 64 << 20  # is no limit here: the decisions are forced


def train(config: Config | None) -> dict[str, Any]:
    """Train a wrapped model for three steps, plainly or inside a budget."""
    torch.manual_seed(torch.distributed.get_rank())
    layers = [layer for _ in range(6) for layer in (nn.Linear(128, 128), nn.GELU())]
    model = DistributedDataParallel(nn.Sequential(*layers))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    batches = [torch.randn(1024, 128) for _ in range(3)]
    budget = None if config is None else MemoryBudget(BUDGET_BYTES, config)
    if budget is not None:
        budget.start()
    losses: list[str] = []
    peak_bytes = capacity_bytes = 0
    for batch in batches:
        loss = model(batch).square().mean()
        loss.backward()
        losses.append(loss.item().hex())
        optimizer.step()
        optimizer.zero_grad()
    if budget is not None:
        tier = running_session().room.transfers.tier
        peak_bytes, capacity_bytes = tier.peak_used_bytes + tier.staging_bytes, tier.capacity_bytes or 0
        budget.stop()
    return {"losses": losses, "peak_bytes": peak_bytes, "capacity_bytes": capacity_bytes}


def trained_on_a_machine(_rank: int, options: dict[str, Any]) -> dict[str, Any]:
    """Train plainly, then with a budget of the machine, as torchrun would start it. Return both, and what was said."""
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logger = logging.getLogger("torchdelta")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    os.environ["LOCAL_WORLD_SIZE"] = str(NUM_RANKS)
    try:
        config = Config(**options, decisions="swap")
        return {"plain": train(None), "inside": train(config), "messages": messages}
    finally:
        del os.environ["LOCAL_WORLD_SIZE"]
        logger.removeHandler(handler)
        logger.setLevel(logging.NOTSET)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"tier": "memory", "host_budget": NODE_BYTES}, "1.00 MiB of the host_budget of 2.00 MiB"),
        ({"tier": "disk", "disk_budget": NODE_BYTES}, "1.00 MiB of the disk_budget of 2.00 MiB"),
    ],
)
def test_two_processes_stay_inside_one_budget(pair: Pair, options: dict[str, Any], said: str) -> None:
    """Each swaps as much as its half takes, says so in one line, and has the plain run's losses."""
    answers = pair.run(trained_on_a_machine, options)
    assert sum(answer["inside"]["peak_bytes"] for answer in answers) > NODE_BYTES // 2
    for answer in answers:
        assert answer["inside"]["losses"] == answer["plain"]["losses"]
        assert answer["inside"]["capacity_bytes"] == NODE_BYTES // NUM_RANKS
        whose = "an equal share for each of 2 training processes of this machine"
        line = f"this process gets {said}: {whose}"
        assert [message for message in answer["messages"] if "share" in message] == [line]
    if options["tier"] == "memory":
        assert sum(answer["inside"]["peak_bytes"] for answer in answers) <= NODE_BYTES


SCRIPT = """\
import sys, torch
import tests.distributed.test_shared_budgets as shared
from torchdelta import Config
torch.set_num_threads(1)
torch.distributed.init_process_group("gloo")
config = Config(tier="memory", host_budget=shared.NODE_BYTES, decisions="swap")
answers = [shared.train(None), shared.train(config)]
with open(sys.argv[1] + f"/{torch.distributed.get_rank()}.json", "w") as file:
    shared.json.dump(answers, file)
torch.distributed.destroy_process_group()
"""


@pytest.mark.rest
def test_torchrun_names_the_processes(tmp_path: Path) -> None:
    """Under a real torchrun, the two processes share the host budget without another option."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={NUM_RANKS}"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(["src", ".", os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(
        [*command, str(script), str(tmp_path)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    used_bytes = 0
    for rank in range(NUM_RANKS):
        plain, inside = json.loads((tmp_path / f"{rank}.json").read_text())
        assert inside["losses"] == plain["losses"]
        assert inside["capacity_bytes"] == NODE_BYTES // NUM_RANKS
        used_bytes += inside["peak_bytes"]
    assert NODE_BYTES // 2 < used_bytes <= NODE_BYTES
