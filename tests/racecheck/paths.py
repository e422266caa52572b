"""The paths of the library that are checked: small training steps, and the budgets that they run in.

A *path* is a model and a kind of budget. `Bench.play` runs a path on the accelerator that computes late and returns
everything that is wrong: bits that differ from the plain run's, accesses that nothing orders, memory used after it was
freed, and errors. Contents, weights and random numbers are the same in each play; only the order of the work differs.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import tempfile
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final
from unittest import mock

import torch
from torch import nn

from tests.collector import leave_out
from tests.following import following_drawn
from tests.racecheck import device as racecheck
from torchdelta import BudgetError, Config, MemoryBudget
from torchdelta.runtime.tiers import bounced

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torchdelta import SavedBuffer

Scope = contextlib.AbstractContextManager[Any]

AT_ONCE, DRAWN, SCRIPTED = 0, 1, 2
DEVICE: Final = "racecheck"
UNLIMITED: Final = "1TiB"
LEAST_BYTES: Final = 1024  # buffers from this size on may leave
NUM_STEPS: Final = 2
NUM_FOLLOWED_STEPS: Final = 4


class Residual(nn.Module):
    """A convolution with batch norm, dropout in place, and a skip."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(4, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.drop = nn.Dropout(0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Convolve, and add."""
        return self.drop(self.norm(self.first(x)).relu_() + x)


class Branches(nn.Module):
    """A branch on a stream of its own, as a program writes it."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.branch, self.head = nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Fork, and join; the memory that crosses streams is announced."""
        home = torch.accelerator.current_stream()
        side = torch.Stream(device=x.device)
        x = x.sin()
        side.wait_stream(home)
        x.record_stream(side)
        with side:
            aside = self.branch(x).sigmoid().exp()
        hidden = self.trunk(x).tanh()
        home.wait_stream(side)
        aside.record_stream(home)
        return self.head(hidden * aside)


def perceptron() -> nn.Module:
    """Make linear layers with dropout and a norm."""
    return nn.Sequential(
        nn.Linear(32, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 32), nn.LayerNorm(32), nn.Tanh(), nn.Linear(32, 16)
    )


MODELS: Final[dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]]] = {
    "perceptron": (perceptron, (16, 32)),
    "residual": (lambda: nn.Sequential(Residual(), Residual()), (2, 4, 8, 8)),
    "branches": (Branches, (16, 32)),
}


def alternate(buffer: SavedBuffer) -> str:
    """Decide swap, recompute and keep in turn."""
    return ("swap", "recompute", "swap", "keep")[buffer.index % 4]


@dataclass(frozen=True, kw_only=True)
class Budget:
    """A kind of budget.

    Attributes:
        share: Of the plain run's peak; None for no limit.
        options: Of the configuration.
        is_followed: Whether a drawn plan is carried out.
    """

    share: float | None = None
    options: dict[str, Any] = field(default_factory=dict)
    is_followed: bool = False


BUDGETS: Final[dict[str, Budget]] = {
    "swap": Budget(options={"decisions": "swap", "tier": "memory"}),
    "mixed": Budget(options={"decisions": alternate, "tier": "memory"}),
    "recompute": Budget(options={"decisions": "recompute", "tier": "memory"}),
    "disk": Budget(options={"decisions": "swap", "tier": "disk", "host_budget": 8192}),
    "stacked": Budget(options={"decisions": "swap", "tier": "disk", "host_budget": 1 << 17}),
    "swap-only": Budget(share=0.9, options={"policy": "swap-only", "tier": "memory"}),
    "reactive": Budget(share=0.85, options={"policy": "torchdelta", "tier": "memory"}),
    "all": Budget(share=0.7, options={"decision_class": "all", "policy": "swap-only", "tier": "memory"}),
    "followed": Budget(options={"tier": "memory"}, is_followed=True),
}

PATHS: Final = tuple(itertools.product(MODELS, BUDGETS))


@dataclass(frozen=True, kw_only=True)
class Play:
    """What one schedule of a path showed.

    Attributes:
        found: What is wrong, one line each.
        num_kernels: Kernels and copies that were queued.
        has_fitted: Whether the step found room; a budget that is too small for the order of this run is no mistake.
    """

    found: tuple[str, ...]
    num_kernels: int
    has_fitted: bool


class Bench:
    """Plays paths. One for a process."""

    def __init__(self) -> None:
        self.extension = racecheck.load()
        self.device = torch.device(DEVICE, 0)
        self._plain: dict[tuple[str, int], list[bytes]] = {}
        self._peak_bytes: dict[str, int] = {}
        leave_out()  # a session looks at every object that the collector knows

    def play(self, model: str, budget: str, seed: int, *, mode: int = DRAWN) -> Play:
        """Play one schedule of a path.

        Args:
            model: Of MODELS.
            budget: Of BUDGETS.
            seed: Of the order in which the device works.
            mode: Who chooses the order.
        """
        kind = BUDGETS[budget]
        num_steps = NUM_FOLLOWED_STEPS if kind.is_followed else NUM_STEPS
        expected = self._plain_bits(model, num_steps)
        with self.schedule(seed) as (found, counts), watched_disk(self.extension):
            has_fitted = True
            try:
                bits = self._train(model, self._scope(model, kind, seed), num_steps, mode, seed)
            except BudgetError:
                has_fitted = kind.share is None
                bits = expected
            except Exception as error:  # noqa: BLE001 - whatever a mutant breaks
                found.append(f"{type(error).__name__}: {str(error)[:200]}")
                bits = expected
            num_wrong = sum(one != other for one, other in zip(bits, expected, strict=True))
            if num_wrong:
                found.append(f"{num_wrong} of {len(expected)} tensors have other bits than the plain run's")
        return Play(found=tuple(found), num_kernels=counts[0], has_fitted=has_fitted)

    @contextlib.contextmanager
    def schedule(self, seed: int) -> Iterator[tuple[list[str], list[int]]]:
        """Run what is inside as one schedule; afterwards the lists have what was wrong, and how many kernels ran."""
        found: list[str] = []
        counts: list[int] = []
        self.extension.reset()
        self.extension.take_complaints()
        before = self.extension.counts()["num_kernels"]
        try:
            yield found, counts
        finally:
            self.extension.settle()
            self.extension.set_mode(AT_ONCE, seed)
            found[:0] = self.extension.take_complaints()
            counts.append(self.extension.counts()["num_kernels"] - before)

    def _plain_bits(self, model: str, num_steps: int) -> list[bytes]:
        if (model, num_steps) not in self._plain:
            with self.schedule(0) as (found, _):
                torch.accelerator.memory.reset_peak_memory_stats(0)
                before_bytes = torch.accelerator.memory.memory_allocated(0)
                self._plain[model, num_steps] = self._train(model, contextlib.nullcontext(), num_steps, AT_ONCE, 0)
                self._peak_bytes[model] = torch.accelerator.memory.max_memory_allocated(0) - before_bytes
            assert found == []
        return self._plain[model, num_steps]

    @contextlib.contextmanager
    def _scope(self, model: str, kind: Budget, seed: int) -> Iterator[None]:
        with mock.patch("torchdelta.runtime.session.LEAST_EVICTION_BYTES", LEAST_BYTES):
            if kind.is_followed:
                with following_drawn(seed, **kind.options):
                    yield
                return
            with tempfile.TemporaryDirectory() as directory:
                budget: int | str = UNLIMITED
                if kind.share is not None:
                    lived_bytes = torch.accelerator.memory.memory_allocated(0)
                    budget = lived_bytes + int(kind.share * self._peak_bytes[model])
                with MemoryBudget(budget, Config(swap_dir=directory, **kind.options)):
                    yield

    def _train(self, model: str, scope: Scope, num_steps: int, mode: int, seed: int) -> list[bytes]:
        make, shape = MODELS[model]
        self.extension.set_mode(AT_ONCE, seed)
        torch.manual_seed(7)
        network = make().to(self.device)
        optimizer = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)
        inputs = [torch.randn(shape, device=self.device) for _ in range(num_steps)]
        self.extension.set_mode(mode, seed)
        gc.disable()  # a collection frees memory at moments that no seed draws
        try:
            with scope:
                for x in inputs:
                    network(x).pow(2).mean().backward()
                    optimizer.step()
                    optimizer.zero_grad()
        finally:
            gc.enable()
        return [tensor.detach().cpu().numpy().tobytes() for tensor in network.state_dict().values()]


@contextlib.contextmanager
def watched_disk(extension: Any) -> Iterator[None]:
    """Tell the checker when the threads of the disk tier read and write their staging buffers."""
    medium: Any = vars(bounced)["_BouncedMedium"]
    plain_move = medium._move  # noqa: SLF001

    def move(self: Any, view: memoryview, offset_bytes: int, *, is_read: bool) -> None:
        for staging, whole in zip(self._staging, self._views, strict=True):
            if view.obj is whole.obj:
                extension.on_host(staging.address, len(view), is_read, "the file's part")
        plain_move(self, view, offset_bytes, is_read=is_read)

    with mock.patch.object(medium, "_move", move):
        yield
