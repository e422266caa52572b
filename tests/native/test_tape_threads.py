"""The tape and who shares its process: threads that free what it has saved."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from tests.native.test_tape import COMPUTES, Taped
from torchdelta.native.counting import counting_status
from torchdelta.native.gate import Recorded

pytestmark = pytest.mark.skipif(not counting_status().is_on, reason="needs the native parts")

_NUM_OPS = 12


def test_another_thread_frees_graphs_while_python_holds_storages_of_results() -> None:
    """To find out whether such a storage lives, the tape waits for Python's lock, which the other thread has."""
    program = f"from {__name__} import record_while_another_thread_frees as record; record()"
    root = Path(__file__).parents[2]
    subprocess.run(
        [sys.executable, "-c", program], cwd=root, timeout=60, check=True
    )  # it hung in one of the first rounds


def record_while_another_thread_frees() -> None:
    """Run in a process of its own, as a test that hangs ends no other way."""
    torch.set_num_threads(1)
    taped = Taped()
    kept: list[torch.UntypedStorage] = []
    is_recording = threading.Event()

    def step(x: torch.Tensor, keeps: bool) -> torch.Tensor:
        for _ in range(_NUM_OPS):
            x = x.tanh()
            if keeps:
                kept.append(x.untyped_storage())
                if len(kept) > _NUM_OPS:  # the first run of the step is not recorded
                    is_recording.set()
        return x.sum()

    def follow(*, keeps: bool) -> torch.Tensor:
        x = torch.randn(64, requires_grad=True)
        recorded = [COMPUTES] * _NUM_OPS + [Recorded(0)]
        drops = {index: [index - 1] for index in range(1, _NUM_OPS)}
        return taped.follow(lambda: step(x, keeps), recorded, [x.nbytes] * _NUM_OPS, drops=drops, replays={})

    for _ in range(20):
        graphs = [follow(keeps=False) for _ in range(100)]

        def free(graphs: list[torch.Tensor] = graphs) -> None:
            is_recording.wait()
            while graphs:
                graphs.pop()

        thread = threading.Thread(target=free)
        thread.start()
        follow(keeps=True)
        thread.join()
        kept.clear()
        is_recording.clear()
    taped.gate.close()
    taped.tape.clear()
