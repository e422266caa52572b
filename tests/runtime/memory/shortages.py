"""Memory that runs out: in an op of a small training, and below a limit that the system sets for a process."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from tests.runtime.programs import UNLIMITED, mlp, running, train
from torchdelta._torch.ops import execute

if TYPE_CHECKING:
    from collections.abc import Callable

    from torchdelta.runtime.session import Session


class Shortage:
    """Runs ops, and lets one of a kind fail once, as an allocator does, after it has drawn random numbers."""

    def __init__(self, name: str, skip: int = 0, error: Callable[[], BaseException] | None = None) -> None:
        self.name = name
        self.skip = skip
        self.num_failures = 0
        self.error = error or (lambda: torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"))

    def __call__(self, func: Any, facts: Any, args: Any, kwargs: Any) -> Any:
        """Run or fail."""
        if facts.name.startswith(self.name):
            self.skip -= 1
            if self.skip == -1:
                self.num_failures += 1
                if facts.is_random:
                    torch.rand(100)
                raise self.error()
        return execute(func, facts, args, kwargs)


class Noise(nn.Module):
    """Adds random numbers that an op draws into a new tensor."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Scale by noise."""
        return x * (torch.rand_like(x) + 0.5)


def model() -> tuple[nn.Module, torch.Tensor]:
    """Build a net with random numbers, statistics and in-place ops."""
    torch.manual_seed(3)
    net = nn.Sequential(mlp(64, 3, dropout=0.2), Noise(), nn.BatchNorm1d(64), nn.ReLU(inplace=True))
    return net, torch.randn(96, 64)


def run(shortage: Shortage | None, **options: Any) -> tuple[list[torch.Tensor], Session, torch.Tensor]:
    """Train two steps, with a shortage somewhere in them."""
    net, x = model()
    with running(UNLIMITED, **options) as (_, session):
        if shortage is not None:
            session.recorder.execute = shortage
        observed = train(net, x)
    return observed, session, torch.default_generator.get_state()


def outcome(
    program: str, tmp_path: os.PathLike[str], *arguments: str, timeout_s: float | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a program in a process of its own.

    Each activation is mapped alone: in glibc's heap aligned blocks leave holes that no block of their size fits into,
    so that whether a step fits would depend on the order in which they were freed.
    """
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "TORCHDELTA_SWAP_DIR": str(tmp_path),
        "MALLOC_ARENA_MAX": "1",
        "MALLOC_MMAP_THRESHOLD_": str(2**20),
    }
    return subprocess.run(
        [sys.executable, "-c", program, *arguments],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout_s,
    )
