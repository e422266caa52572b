"""The tape and who shares its process: threads that free what it has saved, and forked children."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
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


def test_a_forked_child_frees_what_the_tape_has_saved() -> None:
    """Another thread may be recording at the fork. It does not exist in the child."""
    taped, other = Taped(), Taped()
    graphs = [other.forward(torch.randn(8, requires_grad=True))]
    x = torch.randn(1, requires_grad=True)
    num_ops = 5000
    statuses: list[int] = []
    num_recorded = 0
    is_recording = threading.Event()

    def step() -> torch.Tensor:
        nonlocal num_recorded
        results = [x]
        for _ in range(num_ops):
            results.append(results[-1] + 1)
            num_recorded += 1
            if num_recorded == num_ops * 2 - 2000:  # the first run of the step is not recorded
                is_recording.set()
        return results[-1].exp()

    def fork() -> None:
        is_recording.wait()
        while num_recorded < num_ops * 2 and len(statuses) < 20:
            time.sleep(0)  # until the next op, after which the tape looks at all that it holds
            child = os.fork()
            if child == 0:
                signal.alarm(10)
                graphs.clear()
                os._exit(0)
            statuses.append(os.waitpid(child, 0)[1])

    thread = threading.Thread(target=fork)
    thread.start()
    taped.follow(step, [COMPUTES] * (num_ops + 1), [4], drops={0: [0]}, replays={})
    thread.join()
    assert statuses
    assert not any(statuses)
    taped.gate.close()
    taped.tape.clear()
