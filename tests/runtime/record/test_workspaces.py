"""What ops allocate inside: estimates against the allocator's counter, and first steps that stay in the budget."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from torchdelta import Config, MemoryBudget
from torchdelta.aten.facts import facts_of
from torchdelta.native.counting import counting_status, new_counter
from torchdelta.runtime.record.needs import Predictor
from torchdelta.runtime.record.workspaces import possible_bytes

if TYPE_CHECKING:
    from collections.abc import Callable

aten = torch.ops.aten
needs_counter = pytest.mark.skipif(not counting_status().is_on, reason="needs the native counter")
# Every allocation is of at least 64 bytes or so; small buffers of a reduction for each thread come on top.
SLACK_BYTES = 8192


def allocated_bytes(func: Any, args: tuple[Any, ...]) -> int:
    """Return the most that an op allocates while it runs, its outputs included."""
    counter = new_counter()
    assert not isinstance(counter, Exception)
    counter.start()
    counter.mark()
    func(*args)
    return counter.growth_bytes()


@needs_counter
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("reduction", [0, 1, 2])
@pytest.mark.parametrize(
    ("func", "more"),
    [
        (aten.mse_loss.default, ()),
        (aten.smooth_l1_loss.default, ()),
        (aten.huber_loss.default, ()),
        (aten.soft_margin_loss.default, ()),
        (aten.binary_cross_entropy.default, (None,)),
        (aten.binary_cross_entropy_with_logits.default, (None, None)),
    ],
    ids=str,
)
def test_the_buffers_of_a_loss_are_foreseen(func: Any, more: tuple[Any, ...], reduction: int, dtype: Any) -> None:
    """Elementwise losses make element-sized buffers before they reduce; half precision is reduced in float32."""
    x, target = torch.rand(256, 512, dtype=dtype), torch.rand(256, 512, dtype=dtype)
    args = (x, target, *more, reduction)
    need = Predictor().need(facts_of(func), func, args, None)
    assert abs(need.total_bytes - allocated_bytes(func, args)) <= SLACK_BYTES


@needs_counter
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_a_convolution_may_take_covers_what_it_takes(dtype: Any) -> None:
    """On any processor: with instructions for half precision and without."""
    x, weight = torch.randn(4, 8, 24, 24, dtype=dtype), torch.randn(8, 8, 3, 3, dtype=dtype)
    func = aten.convolution.default
    args = (x, weight, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    need = Predictor().need(facts_of(func), func, args, None)
    assert need.possible_bytes > 0
    assert allocated_bytes(func, args) <= need.total_bytes + need.possible_bytes


@needs_counter
@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize(("height", "kernel", "dilation"), [(2, 3, 1), (1, 3, 1), (4, 5, 1), (4, 3, 2), (3, 3, 1)])
def test_the_backward_of_a_convolution_of_few_rows_is_foreseen(
    height: int, kernel: int, dilation: int, num_threads: int
) -> None:
    """As in the last layers of a net on small pictures: oneDNN then copies the weight for each thread."""
    x, weight = torch.randn(4, 64, height, 6), torch.randn(48, 64, kernel, kernel)
    padding = dilation * (kernel // 2)
    grad = torch.randn(4, 48, height, 6)
    func = aten.convolution_backward.default
    spread = ([1, 1], [padding, padding], [dilation, dilation])
    args = (grad, x, weight, None, *spread, False, [0, 0], 1, [True, True, False])
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        need = Predictor().need(facts_of(func), func, args, None)
        taken_bytes = allocated_bytes(func, args)
    finally:
        torch.set_num_threads(before)
    assert taken_bytes <= need.total_bytes + need.possible_bytes


def test_an_expanded_gradient_may_be_copied() -> None:
    """The gradient of a sum is one number seen many times: kernels that need it dense copy it."""
    facts = facts_of(aten.gelu_backward.default)
    x = torch.randn(16, 16)
    assert possible_bytes(facts, (torch.ones(()).expand(16, 16), x), 1024) == 1024
    assert possible_bytes(facts, (torch.ones(16, 16), x), 1024) == 0


def dropouts() -> tuple[nn.Module, Callable[[torch.Tensor], torch.Tensor]]:
    """Return a net whose saved tensors are hardly larger than the state of the random generator."""
    layers = [nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Dropout(0.2)) for _ in range(6)]
    return nn.Sequential(*layers), lambda x: x.flatten(1)[:, :32].sum()


def regression() -> tuple[nn.Module, Callable[[torch.Tensor], torch.Tensor]]:
    """Return a net whose loss makes several buffers as large as an activation."""
    layers = [nn.Sequential(nn.Linear(n, 512), nn.GELU()) for n in (32, 512, 512, 512, 512, 512, 512, 512)]
    return nn.Sequential(*layers), lambda y: functional.mse_loss(y, torch.zeros_like(y))


def half_precision() -> tuple[nn.Module, Callable[[torch.Tensor], torch.Tensor]]:
    """Return convolutions in bfloat16."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(
                *(nn.Sequential(nn.Conv2d(n, 8, 3, padding=1), nn.GELU()) for n in (2, 8, 8, 8, 8, 8))
            )

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return self.net(x.view(16, 2, 16, -1).repeat(1, 1, 1, 16))

    return Net(), lambda y: y.float().mean()


@needs_counter
@pytest.mark.parametrize("make", [dropouts, regression, half_precision], ids=lambda make: make.__name__)
@pytest.mark.parametrize("percent", [70, 80, 90, 97])
def test_the_first_steps_stay_inside_the_budget(make: Any, percent: int) -> None:
    """Before any workspace has been measured, and while the random states of the tape grow."""

    def train(size: int | str) -> Any:
        gc.collect()
        torch.manual_seed(0)
        model, loss_of = make()
        x = torch.randn(16 if make is half_precision else 2048 if make is regression else 64, 32)
        with MemoryBudget(size, Config(tier="memory")) as budget:
            for _ in range(2):
                loss_of(model(x)).backward()
        return budget.summary()

    budget_bytes = train("1GiB").peak_bytes * percent // 100
    assert train(budget_bytes).peak_bytes <= budget_bytes
