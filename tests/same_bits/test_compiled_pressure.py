"""Compiled code under pressure: its kernels read memory without an op, so all that they read has to be there."""

from __future__ import annotations

import contextlib
import gc
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

from tests.same_bits.judge import bits_of
from torchdelta import BudgetError, Config, MemoryBudget
from torchdelta.native.counting import counting_status

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = pytest.mark.filterwarnings("ignore")

WIDTH, NUM_LAYERS = 64, 6
CRASHES: list[str] = []  # tensors without memory that compiled code was about to read


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    CRASHES.clear()
    gc.collect()  # tensors in the frames of errors that earlier tests expected count against a budget
    yield
    torch.compiler.reset()
    assert not CRASHES


def check_inputs(inputs: Any) -> None:
    """Note where a kernel of compiled code would crash: a tensor without memory."""
    for tensor in inputs:
        if isinstance(tensor, torch.Tensor):
            # Not by the method of torch.Tensor: a scope may have replaced it by one that brings the memory back.
            storage = torch._C.TensorBase.untyped_storage(tensor)  # noqa: SLF001 - see above
            if isinstance(tensor, FakeTensor) or storage.nbytes() < tensor.nbytes:
                CRASHES.append(f"{type(tensor).__name__} of {tuple(tensor.shape)}")
                raise RuntimeError(CRASHES[-1])


def compile_graph(graph: torch.fx.GraphModule, _inputs: Any) -> Callable[..., Any]:
    """Return what runs a graph as it is, after a look at its inputs, and unseen as generated kernels are."""

    def run(*inputs: Any) -> Any:
        check_inputs(inputs)
        with _disable_current_modes():
            return graph(*inputs)

    return run


RAW = aot_autograd(fw_compiler=compile_graph, bw_compiler=compile_graph)


class Layer(nn.Module):
    """A layer of the user's own: Dynamo leaves those of torch.nn as they are if they are compiled in place."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return a tensor of the same shape."""
        return nn.functional.gelu(self.linear(x))


def compiled_whole(model: nn.Sequential) -> Callable[[torch.Tensor], torch.Tensor]:
    """Compile a model."""
    return torch.compile(model, backend=RAW)


def compiled_in_place(model: nn.Sequential) -> Callable[[torch.Tensor], torch.Tensor]:
    """Compile a model by its own method."""
    model.compile(backend=RAW)
    return model


def compiled_function(model: nn.Sequential) -> Callable[[torch.Tensor], torch.Tensor]:
    """Compile a function that calls a model."""
    return torch.compile(lambda x: model(x).sin(), backend=RAW)


def compiled_parts(model: nn.Sequential) -> Callable[[torch.Tensor], torch.Tensor]:
    """Compile every second layer."""

    def forward(x: torch.Tensor) -> torch.Tensor:
        for place, layer in enumerate(layers):
            x = layer(x) if place % 2 else layer(x).sin()
        return x

    layers = [torch.compile(layer, backend=RAW) if place % 2 else layer for place, layer in enumerate(model)]
    return forward


def compiled_layers(model: nn.Sequential) -> Callable[[torch.Tensor], torch.Tensor]:
    """Compile every layer."""
    return nn.Sequential(*(torch.compile(layer, backend=RAW) for layer in model))


def compiled_layers_in_place(model: nn.Sequential) -> Callable[[torch.Tensor], torch.Tensor]:
    """Compile every layer by its own method."""
    for layer in model:
        layer.compile(backend=RAW)
    return model


WAYS = [compiled_whole, compiled_in_place, compiled_function, compiled_parts]


def train(
    way: Callable[[nn.Sequential], Callable[[torch.Tensor], torch.Tensor]],
    scope_of: Callable[[int], contextlib.AbstractContextManager[Any]],
    *,
    num_rows: int | list[int] = 8,
    compiles_optimizer: bool = False,
    extra_shares: float = 0.0,
) -> dict[str, bytes]:
    """Train in a scope that is chosen by the bytes of the parameters. Return the bits of what was trained.

    Before each step of the optimizer a tensor of `extra_shares` of the parameters lives for a moment.
    """
    torch.manual_seed(0)
    model = nn.Sequential(*(Layer() for _ in range(NUM_LAYERS)))
    optimizer = torch.optim.AdamW(model.parameters(), foreach=compiles_optimizer)
    forward = way(model)
    step = torch.compile(optimizer.step, backend=RAW) if compiles_optimizer else optimizer.step
    size_bytes = sum(parameter.nbytes for parameter in model.parameters())
    with scope_of(size_bytes):
        for rows in num_rows if isinstance(num_rows, list) else [num_rows] * 4:
            forward(torch.randn(rows, WIDTH)).square().mean().backward()
            torch.ones(int(extra_shares * size_bytes), dtype=torch.uint8)
            step()
            optimizer.zero_grad()
    return {"model": bits_of(model.state_dict()), "optimizer": bits_of(optimizer.state_dict()["state"])}


def plain_scope(_size_bytes: int) -> contextlib.AbstractContextManager[Any]:
    """Return no scope."""
    return contextlib.nullcontext()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("shares", [1.2, 2.1, 3.0])
def test_a_budget_that_is_refused(way: Any, shares: float) -> None:
    """The rest of the step runs on fake tensors, and ends where compiled code would read them."""
    with pytest.raises(BudgetError, match="needs"):
        train(way, lambda size_bytes: MemoryBudget(int(shares * size_bytes)), num_rows=512)
    torch.compiler.reset()
    plain = train(way, plain_scope)
    torch.compiler.reset()
    assert train(way, lambda size_bytes: MemoryBudget(100 * size_bytes)) == plain


@pytest.mark.skipif(
    tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13),
    reason="what compiled code saves does not pass the hooks, so nothing of it can leave",
)
@pytest.mark.parametrize("way", [compiled_layers, compiled_layers_in_place])
def test_the_budget_holds_once_a_shape_is_known(way: Any) -> None:
    """What compiled code allocates unseen is learned from its calls, and room is made before later ones."""
    budgets: list[MemoryBudget] = []
    rows = [256, 512, 256, 512, 512, 256]

    def scope_of(size_bytes: int) -> MemoryBudget:
        budgets.append(MemoryBudget(22 * size_bytes, Config(tier="memory", planner=None)))
        return budgets[0]

    observed = train(way, scope_of, num_rows=rows)
    torch.compiler.reset()
    assert observed == train(way, plain_scope, num_rows=rows)
    (budget,) = budgets
    steps = budget.summary().steps
    assert len(steps) == len(rows)
    assert all(step.peak_bytes <= budget.budget_bytes for step in steps[2:])
    assert all(step.peak_bytes <= 1.1 * budget.budget_bytes for step in steps[1:2])  # estimated from the smaller shape
    assert budget.summary().swapped_out_bytes > 0


@pytest.mark.parametrize("way", WAYS)
def test_everything_swaps_around_compiled_code(way: Any) -> None:
    """Parameters are back before compiled code runs, and optimizer states leave meanwhile, unless it may read them."""
    shares = 3.6 if way is compiled_function else 2.6  # what a function reads is not known
    plain = train(way, plain_scope)
    torch.compiler.reset()
    budgets: list[MemoryBudget] = []

    def scope_of(size_bytes: int) -> MemoryBudget:
        budgets.append(MemoryBudget(int(shares * size_bytes), Config(decision_class="all", tier="memory")))
        return budgets[0]

    assert train(way, scope_of) == plain
    (budget,) = budgets
    assert budget.summary().swapped_out_bytes > 0


def test_a_step_that_ends_in_a_compiled_function_keeps_its_peak() -> None:
    """What the function allocates is measured beside the peak of the step: neither disturbs the other."""
    model = Layer()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    large_bytes = 64 << 20

    @torch.compile(backend=RAW)
    def train_once(x: torch.Tensor) -> None:
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    with MemoryBudget("8GiB", Config(planner=None)) as budget:
        for step in range(4):
            torch.ones(large_bytes if step % 2 == 0 else 1, dtype=torch.uint8)
            train_once(torch.randn(8, WIDTH))
    peaks_bytes = [step.peak_bytes for step in budget.summary().steps]
    assert len(peaks_bytes) == 4
    assert [peak_bytes >= large_bytes for peak_bytes in peaks_bytes] == [True, False, True, False]


class Swapping(torch.optim.AdamW):
    """Keeps old parameters as a state, and makes their storages those of the parameters again, as SAM does."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Step, from parameters that were put back."""
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        for parameter in parameters:
            self.state[parameter]["old"] = parameter.data.clone()
            parameter.add_(0.01)
        for parameter in parameters:
            parameter.data = self.state[parameter].pop("old")
        super().step(closure)
        for parameter in parameters:
            self.state[parameter]["old"] = parameter.data.clone()
            parameter.data, self.state[parameter]["old"] = self.state[parameter]["old"], parameter.data


def test_a_state_that_becomes_a_parameter_is_read_by_compiled_code() -> None:
    """What is a parameter and what is a state is looked up again before compiled code runs."""

    def run(scope_of: Callable[[int], contextlib.AbstractContextManager[Any]]) -> dict[str, bytes]:
        torch.manual_seed(0)
        torch.compiler.reset()
        model = nn.Sequential(*(Layer() for _ in range(8)))
        optimizer = Swapping(model.parameters(), foreach=False)
        forward = compiled_layers(model)
        size_bytes = sum(parameter.nbytes for parameter in model.parameters())
        with scope_of(size_bytes):
            for _ in range(4):
                forward(torch.randn(8, WIDTH)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                torch.ones(size_bytes, dtype=torch.uint8)
        return {"model": bits_of(model.state_dict())}

    plain = run(plain_scope)
    for shares in (3.0, 3.5, 4.0):
        config = Config(decision_class="all", tier="memory")
        assert run(lambda size_bytes, at=shares, how=config: MemoryBudget(int(at * size_bytes), how)) == plain


class Trainer(nn.Module):
    """A module whose forward is a whole training step."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(*(Layer() for _ in range(NUM_LAYERS)))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), foreach=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the loss."""
        loss = self.model(x).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()


def test_an_optimizer_in_a_compiled_forward_has_its_states() -> None:
    """The forward of a module does without them only until an optimizer steps in it."""

    def run(scope_of: Callable[[int], contextlib.AbstractContextManager[Any]]) -> dict[str, bytes]:
        torch.manual_seed(0)
        torch.compiler.reset()
        trainer = Trainer()
        step = torch.compile(trainer, backend=RAW)
        size_bytes = sum(parameter.nbytes for parameter in trainer.parameters())
        with scope_of(size_bytes):
            for _ in range(4):
                step(torch.randn(8, WIDTH))
                torch.ones(7 * size_bytes, dtype=torch.uint8)
        return {"model": bits_of(trainer.state_dict())}

    config = Config(decision_class="all", tier="memory")
    budgets: list[MemoryBudget] = []

    def scope_of(size_bytes: int) -> MemoryBudget:
        budgets.append(MemoryBudget(int(9.5 * size_bytes), config))
        return budgets[0]

    assert run(scope_of) == run(plain_scope)
    # Without the counter nobody sees what compiled code allocates, and the rest fits.
    assert budgets[0].summary().swapped_out_bytes > 0 or not counting_status().is_on


def test_a_compiled_optimizer_has_everything_here() -> None:
    """It reads all states, which left before; it is not cut into pieces, and a budget below that is refused."""
    plain = train(compiled_parts, plain_scope, compiles_optimizer=True)

    def scope_of(shares: float) -> Callable[[int], MemoryBudget]:
        return lambda size_bytes: MemoryBudget(int(shares * size_bytes), Config(decision_class="all", tier="memory"))

    torch.compiler.reset()
    assert train(compiled_parts, scope_of(9.5), compiles_optimizer=True, extra_shares=7) == plain
    torch.compiler.reset()
    with pytest.raises(BudgetError, match="needs at least"):  # the rest of the optimizer's step is not seen
        train(compiled_parts, scope_of(3.0), compiles_optimizer=True)


@pytest.mark.skipif(not counting_status().is_on, reason="peaks of compiled code are measured at the allocator")
def test_the_second_call_of_a_region_fits_where_parameters_and_states_may_leave() -> None:
    """What it needs is known then from its first call, which may have passed the budget."""

    def run(scope_of: Callable[[], contextlib.AbstractContextManager[Any]]) -> dict[str, bytes]:
        torch.manual_seed(0)
        torch.compiler.reset()
        blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(48), nn.Linear(48, 96), nn.GELU(), nn.Dropout(0.1), nn.Linear(96, 48))
            for _ in range(4)
        )
        compiled = [torch.compile(blocks[index], backend="aot_eager") for index in (1, 2)]
        optimizer = torch.optim.AdamW(blocks.parameters())
        with scope_of():
            for _ in range(4):
                x = torch.randn(256, 48)
                for part in (compiled[0], blocks[0], compiled[1], blocks[3]):
                    x = x + part(x)
                x.square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        return {"blocks": bits_of(blocks.state_dict())}

    plain = run(contextlib.nullcontext)
    config = Config(decision_class="all", tier="memory", planner=None)
    generous = MemoryBudget("1TiB", config)
    run(lambda: generous)
    budget = MemoryBudget(int(generous.summary().peak_bytes * 0.45), config)
    assert run(lambda: budget) == plain
    assert all(step.peak_bytes <= budget.budget_bytes for step in budget.summary().steps[1:])
