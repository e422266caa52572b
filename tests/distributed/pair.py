"""Two processes of one gloo group, started once, that run functions which are named to them."""

from __future__ import annotations

import datetime as dt
import multiprocessing
import tempfile
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.connection import Connection

NUM_RANKS = 2
# A rank that waits for one that has failed gives up after this.
COLLECTIVE_TIMEOUT = dt.timedelta(seconds=40)
ANSWER_TIMEOUT_S = 240


class Pair:
    """Both ends of two pipes, and the processes behind them."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._folder = tempfile.TemporaryDirectory(prefix="torchdelta-test-")
        rendezvous = str(Path(self._folder.name) / "rendezvous")
        self._connections: list[Connection] = []
        self._processes: list[Any] = []
        for rank in range(NUM_RANKS):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, rendezvous, theirs), daemon=True)
            process.start()
            theirs.close()
            self._connections.append(ours)
            self._processes.append(process)
        self.is_usable = True

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Run `function(rank, *args)` on both ranks. Returns their results; a rank that fails fails the test."""
        for connection in self._connections:
            connection.send((function, args))
        answers: list[tuple[bool, Any]] = []
        for rank, connection in enumerate(self._connections):
            if not connection.poll(ANSWER_TIMEOUT_S):
                answers.append((False, f"rank {rank} gave no answer in {ANSWER_TIMEOUT_S} s"))
                continue
            try:
                answers.append(connection.recv())
            except EOFError:
                self._processes[rank].join(10)
                answers.append((False, f"rank {rank} died with exit code {self._processes[rank].exitcode}"))
        failures = [text for is_good, text in answers if not is_good]
        if failures:
            self.close()  # what is left of a collective would disturb the next test
        assert not failures, "\n".join(failures)
        return [result for _, result in answers]

    def close(self) -> None:
        """End both processes."""
        self.is_usable = False
        for connection in self._connections:
            connection.close()
        for process in self._processes:
            process.join(5)
            if process.is_alive():
                process.kill()
                process.join()
        self._folder.cleanup()


def _serve(rank: int, rendezvous: str, connection: Connection) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=NUM_RANKS, timeout=COLLECTIVE_TIMEOUT
    )
    while True:
        try:
            function, args = connection.recv()
        except EOFError:
            break
        try:
            connection.send((True, function(rank, *args)))
        except BaseException:  # noqa: BLE001 - it is told to the test
            connection.send((False, f"rank {rank}: {traceback.format_exc()}"))
    dist.destroy_process_group()
