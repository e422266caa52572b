"""The paths of the library that are checked: small training steps, and the budgets that they run in.

A *path* is a model and a kind of budget. `Bench.play` runs a path on the accelerator that computes late and returns
everything that is wrong: bits that differ from the plain run's, accesses that nothing orders, memory used after it was
freed, more memory than the limit, and errors. Contents, weights and random numbers are the same in each play; only the
order of the work differs.
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


class ReadAside(torch.autograd.Function):
    """A Function that reads its saved tensor on a stream of its own."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        """Save the input."""
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        """Multiply on the stream aside; the memory that crosses streams is announced."""
        home = torch.accelerator.current_stream()
        side = torch.Stream(device=gradients[0].device)
        side.wait_stream(home)
        with side:
            (x,) = ctx.saved_tensors
            result = gradients[0] * x * 2
        home.wait_stream(side)
        result.record_stream(home)
        return result


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
        for _ in range(3):
            hidden = hidden.sin().exp()
        return self.head(ReadAside.apply(hidden.exp()) * aside)


class Refilled(nn.Module):
    """A buffer for the input, filled again on a stream of its own as soon as forward has read it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(32, 32), nn.Linear(32, 16)
        self.buffer = nn.Buffer(torch.zeros(128, 32), persistent=False)
        self.side: torch.Stream | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Read the last input, and fill the buffer with this one."""
        home = torch.accelerator.current_stream()
        if self.side is None:
            self.side = torch.Stream(device=x.device)
        home.wait_stream(self.side)
        result = self.second((self.first(self.buffer * 2 + 1) * self.buffer.exp()).sin())
        self.side.wait_stream(home)
        with self.side:
            self.buffer.copy_(x)
        return result


def perceptron() -> nn.Module:
    """Make linear layers with dropout and a norm."""
    return nn.Sequential(
        nn.Linear(32, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 32), nn.LayerNorm(32), nn.Tanh(), nn.Linear(32, 16)
    )


# What makes each, the shape of its input, and a limit in which a step fits only if something leaves: the share of what
# the plain run's training takes beside what lives before it.
MODELS: Final[dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], float]]] = {
    "perceptron": (perceptron, (128, 32), 0.8),
    "residual": (lambda: nn.Sequential(Residual(), Residual()), (2, 4, 8, 8), 0.8),
    "branches": (Branches, (128, 32), 0.73),
    "refilled": (Refilled, (128, 32), 0.8),
}


def alternate(buffer: SavedBuffer) -> str:
    """Decide swap, recompute and keep in turn."""
    return ("swap", "recompute", "swap", "keep")[buffer.index % 4]


@dataclass(frozen=True, kw_only=True)
class Budget:
    """A kind of budget.

    Attributes:
        is_limited: Whether the limit is that of MODELS; otherwise there is none.
        options: Of the configuration.
        is_followed: Whether a drawn plan is carried out.
    """

    is_limited: bool = False
    options: dict[str, Any] = field(default_factory=dict)
    is_followed: bool = False


BUDGETS: Final[dict[str, Budget]] = {
    "swap": Budget(options={"decisions": "swap", "tier": "memory"}),
    "mixed": Budget(options={"decisions": alternate, "tier": "memory"}),
    "recompute": Budget(options={"decisions": "recompute", "tier": "memory"}),
    "disk": Budget(options={"decisions": "swap", "tier": "disk", "host_budget": 8192}),
    "stacked": Budget(options={"decisions": "swap", "tier": "disk", "host_budget": 1 << 17}),
    "swap-only": Budget(is_limited=True, options={"policy": "swap-only", "tier": "memory"}),
    "reactive": Budget(is_limited=True, options={"policy": "torchdelta", "tier": "memory"}),
    "all": Budget(is_limited=True, options={"decision_class": "all", "policy": "swap-only", "tier": "memory"}),
    "followed": Budget(options={"tier": "memory"}, is_followed=True),
}

PATHS: Final = tuple(itertools.product(MODELS, BUDGETS))


@dataclass(frozen=True, kw_only=True)
class Play:
    """What one schedule of a path showed.

    Attributes:
        found: What is wrong, one line each.
        num_kernels: Kernels and copies that were queued.
        has_fitted: Whether the step found room; a limit that is too small for the order of this run is no mistake.
        left_bytes: What was swapped out or recomputed within the limit.
    """

    found: tuple[str, ...]
    num_kernels: int
    has_fitted: bool
    left_bytes: int = 0


class Bench:
    """Plays paths. One for a process."""

    def __init__(self) -> None:
        self.extension = racecheck.load()
        self.device = torch.device(DEVICE, 0)
        self._plain: dict[tuple[str, int], list[bytes]] = {}
        self._peak_bytes: dict[tuple[str, int], int] = {}
        self._left_bytes = 0
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
                has_fitted = not kind.is_limited
                bits = expected
            except Exception as error:  # noqa: BLE001 - whatever a mutant breaks
                found.append(f"{type(error).__name__}: {str(error)[:200]}")
                bits = expected
            num_wrong = sum(one != other for one, other in zip(bits, expected, strict=True))
            if num_wrong:
                found.append(f"{num_wrong} of {len(expected)} tensors have other bits than the plain run's")
        return Play(found=tuple(found), num_kernels=counts[0], has_fitted=has_fitted, left_bytes=self._left_bytes)

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
                # As late as can be: memory that crosses streams then goes back late, in the plain run as in others.
                self._plain[model, num_steps] = self._train(
                    model, self._measured(model, num_steps), num_steps, SCRIPTED, 0
                )
            assert found == []
        return self._plain[model, num_steps]

    @contextlib.contextmanager
    def _measured(self, model: str, num_steps: int) -> Iterator[None]:
        """Learn how many bytes a model's training takes beside what lives before."""
        lived_bytes = torch.accelerator.memory.memory_allocated(0)
        torch.accelerator.memory.reset_peak_memory_stats(0)
        yield
        self._peak_bytes[model, num_steps] = torch.accelerator.memory.max_memory_allocated(0) - lived_bytes

    @contextlib.contextmanager
    def _scope(self, model: str, kind: Budget, seed: int) -> Iterator[None]:
        self._left_bytes = 0
        with contextlib.ExitStack() as stack:
            stack.enter_context(mock.patch("torchdelta.runtime.session.LEAST_EVICTION_BYTES", LEAST_BYTES))
            if kind.is_followed:
                stack.enter_context(following_drawn(seed, **kind.options))
                yield
                return
            limit: int | str = UNLIMITED
            if kind.is_limited:
                lived_bytes = torch.accelerator.memory.memory_allocated(0)
                limit = lived_bytes + int(MODELS[model][2] * self._peak_bytes[model, NUM_STEPS])
                torch.accelerator.memory.reset_peak_memory_stats(0)
            swap_dir = stack.enter_context(tempfile.TemporaryDirectory())
            with MemoryBudget(limit, Config(swap_dir=swap_dir, **kind.options)) as budget:
                yield
            summary = budget.summary()
            self._left_bytes = summary.swapped_out_bytes + summary.recomputed_bytes
            peak_bytes = torch.accelerator.memory.max_memory_allocated(0)
            assert isinstance(limit, str) or peak_bytes <= limit, f"{peak_bytes} bytes within a limit of {limit} bytes"

    def _train(self, model: str, scope: Scope, num_steps: int, mode: int, seed: int) -> list[bytes]:
        make, shape, _ = MODELS[model]
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
