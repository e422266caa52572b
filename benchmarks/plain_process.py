"""Plain training in a second process, on request: what measured steps are compared with.

Where a machine changes its speed every few seconds, a block of plain steps after a measured block runs at another
speed. So a measured step and a plain one can alternate: the two of each pair are less than one step apart. The plain
steps run in a process of their own, because a scope of the measured process would change them.

While one of the two runs, the other one waits for a message and takes no processor time, except for copies between the
tiers that go on after a step has returned. The second process takes as much memory as plain training.
"""

from __future__ import annotations

import multiprocessing
from typing import TYPE_CHECKING, Self

import torch

from benchmarks import models
from benchmarks.turns import BESIDE, IN_PAIRS, timed_steps

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.connection import Connection

    from benchmarks.turns import Block

_NUM_WARM_STEPS = 2  # the first one makes the optimizer's states
_END_TIMEOUT_S = 30.0


class PlainProcess:
    """A process that trains one model plainly, on request.

    Args:
        model: The name of a model in `benchmarks.models`.
        optimizer: The name of its optimizer.
        batch_size: The model's own by default.
    """

    def __init__(self, model: str, optimizer: str, batch_size: int | None = None) -> None:
        context = multiprocessing.get_context("spawn")
        self._requests, theirs = context.Pipe()
        arguments = (theirs, model, optimizer, batch_size, torch.get_num_threads())
        self._process = context.Process(target=_serve, args=arguments, daemon=True)
        self._process.start()
        theirs.close()
        self.times_s(_NUM_WARM_STEPS)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def times_s(self, num_steps: int) -> list[float]:
        """Run steps there and return the time of each in seconds.

        Raises:
            EOFError: The process has ended.
        """
        self._requests.send(num_steps)
        return self._requests.recv()

    def timed_pairs(self, step: Callable[[], object], num_steps: int) -> Block:
        """Run steps of our own and of the process in turn, and return both as one block."""
        found: Block = {"times_s": [], "cpu_times_s": [], BESIDE: {"times_s": [], IN_PAIRS: True}}
        for _ in range(num_steps):
            for name, times_s in timed_steps(step, 1).items():
                found[name] += times_s
            # The first one may wait for the pages that the host has taken meanwhile: see [Note: pages that are given
            # back] in turns.py.
            found[BESIDE]["times_s"].append(self.times_s(2)[-1])
        return found

    def close(self) -> None:
        """End the process."""
        self._requests.close()
        self._process.join(_END_TIMEOUT_S)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


def _serve(requests: Connection, model: str, optimizer: str, batch_size: int | None, num_threads: int) -> None:
    """Run as many steps as each message asks for, until the other end closes."""
    torch.set_num_threads(num_threads)
    workload = models.build(model, batch_size)
    built_optimizer = models.build_optimizer(optimizer, workload.model)
    try:
        while True:
            num_steps = requests.recv()
            requests.send(timed_steps(lambda: workload.train(built_optimizer), num_steps)["times_s"])
    except (EOFError, OSError):
        return
