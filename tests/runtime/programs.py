"""Small programs that the tests of the runtime train, and two counts of memory that owe nothing to the runtime."""

from __future__ import annotations

import contextlib
import gc
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.parameter import UninitializedTensorMixin

from tests.runtime.parts import running_session
from torchdelta import Config, MemoryBudget
from torchdelta._torch.fake import FakeTensor
from torchdelta._torch.storages import storage_address

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torchdelta.runtime.session import Session

UNLIMITED = "1TiB"
_MEMORY_EVENT = "[memory]"


class Allocations:
    """What the allocator has handed out and got back on this thread, read from the profiler's memory events."""

    def __init__(self) -> None:
        self.live_bytes = 0
        self.peak_bytes = 0

    @contextlib.contextmanager
    def watch(self) -> Iterator[None]:
        """Follow the allocator for a while; the totals carry over to the next time."""
        with torch.autograd.profiler.profile(profile_memory=True) as profiler:
            yield
        for event in profiler.kineto_results.events():
            if event.name() == _MEMORY_EVENT:
                self.live_bytes += event.nbytes()
                self.peak_bytes = max(self.peak_bytes, self.live_bytes)


def op_names(run: Callable[[], Any]) -> list[str]:
    """Return the names of the aten ops that a call runs, in order, as the profiler sees them below every mode.

    An op that a mode passes on is seen twice, one within the other: it counts once.
    """
    with torch.autograd.profiler.profile() as profiler:
        run()
    events = [event for event in profiler.kineto_results.events() if event.name().startswith("aten::")]
    events.sort(key=lambda event: (event.start_ns(), -event.duration_ns()))
    names: list[str] = []
    enclosing: list[tuple[int, str]] = []
    for event in events:
        while enclosing and enclosing[-1][0] <= event.start_ns():
            enclosing.pop()
        if not enclosing or enclosing[-1][1] != event.name():
            names.append(event.name())
        enclosing.append((event.start_ns() + event.duration_ns(), event.name()))
    return names


def reachable_bytes() -> int:
    """Return the bytes of all storages that some Python object holds, gradients included."""
    sizes: dict[int, int] = {}
    for thing in gc.get_objects():
        if not issubclass(type(thing), torch.Tensor) or isinstance(thing, UninitializedTensorMixin):
            continue
        if isinstance(thing, FakeTensor):  # torch.compile leaves some behind
            continue
        if thing.layout is not torch.strided or thing.device.type == "meta":
            continue
        for tensor in (thing, thing.grad if thing.is_leaf else None):
            if tensor is not None:
                sizes[storage_address(tensor)] = tensor.untyped_storage().nbytes()
    return sum(sizes.values())


@contextlib.contextmanager
def running(budget: int | str = UNLIMITED, **options: Any) -> Iterator[tuple[MemoryBudget, Session]]:
    """Open a budget that records every step, and yield it with its session.

    Swapped bytes stay in memory unless told otherwise.
    """
    options.setdefault("tier", "memory")
    with MemoryBudget(budget, Config(**options)) as memory_budget:
        session = running_session()
        session.pause.forbid()
        yield memory_budget, session


def mlp(width: int = 64, depth: int = 3, *, dropout: float = 0.0) -> nn.Sequential:
    """Build a small perceptron; its buffers are larger than the least that is ever evicted."""
    layers: list[nn.Module] = []
    for _ in range(depth):
        layers += [nn.Linear(width, width), nn.GELU(), nn.LayerNorm(width)]
        if dropout:
            layers.append(nn.Dropout(dropout))
    return nn.Sequential(*layers)


class Attention(nn.Module):
    """One block of a transformer."""

    def __init__(self, width: int = 32, num_heads: int = 4) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Attend, and add."""
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm(x)).view(batch, length, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        weights = (q @ k.transpose(-1, -2)).softmax(-1)
        mixed = weights @ v
        return x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))


class Residual(nn.Module):
    """A convolution with batch norm, and a skip."""

    def __init__(self, channels: int = 8) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1)
        self.norm = nn.BatchNorm2d(channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Convolve, normalize, rectify in place, add."""
        return torch.relu_(self.norm(self.conv(x))) + x


def train(
    model: nn.Module, x: torch.Tensor, *, num_steps: int = 2, lr: float = 0.05, momentum: float = 0.9
) -> list[torch.Tensor]:
    """Train with SGD, and return every loss and, at the end, every parameter and buffer."""
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum)
    observed: list[torch.Tensor] = []
    for _ in range(num_steps):
        loss = model(x).square().mean()
        loss.backward()
        observed.append(loss.detach())
        del loss
        optimizer.step()
        optimizer.zero_grad()
    observed += [parameter.detach().clone() for parameter in model.parameters()]
    observed += [buffer.detach().clone() for buffer in model.buffers()]
    return observed


def same_bits(expected: list[torch.Tensor], actual: list[torch.Tensor]) -> bool:
    """Return whether two lists of tensors hold the same bytes."""
    return len(expected) == len(actual) and all(
        a.dtype == b.dtype
        and a.shape == b.shape
        and a.contiguous().numpy().tobytes() == b.contiguous().numpy().tobytes()
        for a, b in zip(expected, actual, strict=True)
    )
