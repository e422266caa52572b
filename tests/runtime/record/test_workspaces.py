"""What ops allocate inside: estimates against the allocator's counter, and first steps that stay in the budget."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from torchdelta import Config, MemoryBudget
from torchdelta.aten.facts import Kind, facts_of
from torchdelta.native.counting import counting_status, new_counter
from torchdelta.runtime.record.needs import Predictor
from torchdelta.runtime.record.workspaces import possible_bytes

if TYPE_CHECKING:
    from collections.abc import Callable

    from torchdelta.runtime.state.need import Need

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


def need_and_taken_bytes(func: Any, args: tuple[Any, ...], num_threads: int) -> tuple[Need, int]:
    """Return what is foreseen for the first run of an op on so many threads, and the most that it then allocates."""
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        return Predictor().need(facts_of(func), func, args, None), allocated_bytes(func, args)
    finally:
        torch.set_num_threads(before)


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
    need, taken_bytes = need_and_taken_bytes(func, args, num_threads)
    assert taken_bytes <= need.total_bytes + need.possible_bytes


class Watching(TorchDispatchMode):
    """Collects the ops that take more than was foreseen for their first run."""

    def __init__(self) -> None:
        super().__init__()
        self.predictor = Predictor()
        self.counter: Any = new_counter()
        self.counter.start()
        self.num_ops = 0
        self.over: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the op and compare."""
        facts = facts_of(func)
        need = self.predictor.need(facts, func, args, kwargs)
        foreseen_bytes, is_first = need.total_bytes + need.possible_bytes, not need.is_workspace_known
        self.counter.mark()
        out = func(*args, **(kwargs or {}))
        taken_bytes = self.counter.growth_bytes()
        if facts.kind is Kind.COMPUTE:
            self.num_ops += 1
            need.learn_workspace(max(need.workspace_bytes, taken_bytes - need.output_bytes))
            if is_first and taken_bytes > foreseen_bytes + 2 * SLACK_BYTES:
                self.over.append(f"{facts.name}: {taken_bytes} bytes, {foreseen_bytes} foreseen")
        return out


def pictures(num_channels: int = 32, size: int = 32) -> torch.Tensor:
    """Return a batch of pictures."""
    return torch.randn(4, num_channels, size, size)


def channels_last() -> torch.Tensor:
    """Return a batch of pictures whose channels lie together."""
    return pictures().to(memory_format=torch.channels_last)


def tokens() -> torch.Tensor:
    """Return a batch of sequences."""
    return torch.randn(4, 256, 128)


def attend(x: torch.Tensor, **options: Any) -> torch.Tensor:
    """Return the attention of tokens to each other, in two heads."""
    heads = x.view(4, 256, 2, 64).transpose(1, 2)
    return functional.scaled_dot_product_attention(heads, heads, heads, **options)


FIRST_RUNS: dict[str, tuple[Callable[[], Callable[[torch.Tensor], torch.Tensor]], Callable[[], torch.Tensor]]] = {
    "convolution": (lambda: nn.Conv2d(32, 32, 3, padding=1), pictures),
    "convolution of a part": (lambda: nn.Conv2d(24, 32, 3, padding=1), lambda: pictures()[:, :24]),
    "convolution in channels-last": (lambda: nn.Conv2d(32, 32, 3), channels_last),
    "depthwise": (lambda: nn.Conv2d(32, 32, 3, padding=1, groups=32), pictures),
    "groups": (lambda: nn.Conv2d(32, 32, 3, padding=1, groups=4), pictures),
    "stride": (lambda: nn.Conv2d(32, 64, 1, stride=2), pictures),
    "dilation": (lambda: nn.Conv2d(32, 32, 3, padding=2, dilation=2), pictures),
    "a wide dilated kernel": (lambda: nn.Conv2d(64, 32, 7, padding=6, dilation=2), lambda: pictures(64, 14)),
    "groups that fill no block": (lambda: nn.Conv2d(40, 6, 7, padding=3, groups=2), lambda: pictures(40)),
    "depthwise in channels-last": (
        lambda: nn.Conv2d(64, 64, 7, padding=3, groups=64).to(memory_format=torch.channels_last),
        lambda: pictures(64, 8).to(memory_format=torch.channels_last),
    ),
    "transposed in channels-last": (
        lambda: nn.ConvTranspose2d(64, 96, 3, stride=2).to(memory_format=torch.channels_last),
        lambda: pictures(64).to(memory_format=torch.channels_last),
    ),
    "three dimensions, dilated": (
        lambda: nn.Conv3d(64, 24, 3, padding=2, dilation=2),
        lambda: torch.randn(1, 64, 8, 8, 8),
    ),
    "a stride over few rows": (lambda: nn.Conv2d(128, 256, 1, stride=2), lambda: pictures(128, 7)),
    "double precision": (lambda: nn.Conv2d(32, 32, 5, padding=2).double(), lambda: pictures().double()),
    "to few channels": (lambda: nn.Conv2d(32, 3, 3, padding=1), pictures),
    "from few channels": (lambda: nn.Conv2d(3, 32, 7, stride=2, padding=3), lambda: pictures(3, 64)),
    "patches": (lambda: nn.Conv2d(3, 96, 16, stride=16), lambda: pictures(3, 128)),
    "transposed": (lambda: nn.ConvTranspose2d(32, 32, 2, stride=2), pictures),
    "one dimension": (lambda: nn.Conv1d(256, 256, 3, padding=1), tokens),
    "three dimensions": (lambda: nn.Conv3d(8, 8, 3, padding=1), lambda: torch.randn(2, 8, 16, 16, 16)),
    "upsampling": (lambda: nn.Upsample(scale_factor=2), pictures),
    "bilinear upsampling": (lambda: nn.Upsample(scale_factor=2, mode="bilinear"), pictures),
    "group norm of a part": (lambda: nn.GroupNorm(4, 24), lambda: pictures()[:, :24]),
    "average pooling of a part": (lambda: nn.AvgPool2d(2), lambda: pictures()[..., :-2]),
    "max pooling in channels-last": (lambda: nn.MaxPool2d(2), channels_last),
    "columns": (lambda: nn.Unfold(3, padding=1), lambda: pictures(8)),
    "layer norm of a part": (lambda: nn.LayerNorm(128), lambda: tokens()[:, :-1]),
    "softmax of a part": (lambda: nn.Softmax(-1), lambda: tokens()[..., :-3]),
    "logsumexp": (lambda: lambda x: x.logsumexp(-1), tokens),
    "attention": (lambda: attend, tokens),
    "attention with dropout": (lambda: lambda x: attend(x, dropout_p=0.1), tokens),
    "causal attention": (lambda: lambda x: attend(x, is_causal=True), tokens),
    "mask": (lambda: lambda x: x[x > 0], tokens),
    "largest": (lambda: lambda x: x.amax(-1), tokens),
}


@needs_counter
@pytest.mark.parametrize("loss", [torch.sum, lambda y: y.square().sum()], ids=["sum", "squares"])
@pytest.mark.parametrize("name", FIRST_RUNS)
def test_first_runs_take_no_more_than_was_foreseen(name: str, loss: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Of each op, in forward and backward: what it returns, and what it allocates and frees again meanwhile."""
    build, draw = FIRST_RUNS[name]
    func, x = build(), draw().requires_grad_()
    with Watching() as watching:
        loss(func(x)).backward()
    assert watching.num_ops >= 3
    assert not watching.over


@pytest.mark.parametrize(
    ("other", "expected_bytes"),
    [
        (torch.ones(16, dtype=torch.bool), 16 * 4),
        (torch.ones(16, dtype=torch.float64), 16 * 8),
        (torch.tensor(2.0, dtype=torch.float64), 0),
        (torch.ones(16), 0),
        (torch.ones(16).to(torch.float8_e4m3fn), 0),
    ],
    ids=["bool", "double", "number", "same", "no common dtype"],
)
def test_tensors_of_another_dtype_are_converted(other: torch.Tensor, expected_bytes: int) -> None:
    """To the common dtype; a number does not change it, and where there is none the op itself raises."""
    assert possible_bytes(facts_of(aten.mul.Tensor), (torch.ones(16), other), 64) == expected_bytes


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


@pytest.mark.parametrize(
    ("x", "weight", "options"),
    [
        (torch.ones(1, 4, 8, 8), torch.ones(4, 4, 3, 3), ([1, 1], [0, 0], [1, 1], False, [0, 0], 0)),
        (torch.ones(1, 4, 8, 8), torch.ones(4, 4, 3, 3), ([1, 1], [0, 0], [1, 1], True, [0, 0], 0)),
        (torch.ones(1, 4, 8, 8), torch.ones(4, 4, 3, 3), ([1, 1], [0, 0], [], False, [0, 0], 1)),
        (torch.ones(4), torch.ones(4, 4, 3), ([1], [0], [1], False, [0], 1)),
        (torch.ones(4, 4), torch.ones(4, 4), ([1], [0], [1], False, [0], 1)),
    ],
    ids=["no groups", "no groups, transposed", "no dilation", "one dimension", "two dimensions"],
)
def test_a_wrong_convolution_raises_what_plain_raises(x: torch.Tensor, weight: torch.Tensor, options: Any) -> None:
    """The estimate before it says nothing of its arguments."""
    with pytest.raises(RuntimeError) as plain:
        torch.convolution(x, weight, None, *options)
    with MemoryBudget("1TiB"), pytest.raises(RuntimeError) as caught:
        torch.convolution(x, weight, None, *options)
    assert type(caught.value) is type(plain.value)
    assert str(caught.value) == str(plain.value)
