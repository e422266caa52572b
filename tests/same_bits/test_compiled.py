"""Same bits with a compiled submodule, used before, during and after the scope."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from tests.compilation import QUIET, fresh_compiler  # noqa: F401 - a fixture
from tests.same_bits.judge import UNLIMITED, Scope, assert_same_bits, inside_budget, state_of
from torchdelta import Config, MemoryBudget

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = QUIET


def has_compiler() -> bool:
    """Return whether inductor can build a kernel on this machine."""
    from torch._inductor import cpp_builder
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        return bool(cpp_builder.get_cpp_compiler())
    except (InvalidCxxCompiler, RuntimeError):
        return False


def compiled_block_step(
    backend: str, block: nn.Module | None = None, compile_block: Callable[..., Any] = torch.compile
) -> Any:
    """Make a step whose middle is compiled, in one scope and after it."""
    block = nn.Sequential(nn.Linear(8, 8), nn.GELU()) if block is None else block
    weights = {name: value.clone() for name, value in block.state_dict().items()}
    compiled = compile_block(block, backend=backend)

    def step(scope: Scope) -> dict[str, Any]:
        block.load_state_dict(weights)
        block.zero_grad()
        before, after = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.2)), nn.Linear(8, 1)
        losses: list[float] = []

        def train() -> None:
            loss = after(compiled(before(torch.randn(4, 8))).sin()).pow(2).mean()
            loss.backward()
            losses.append(loss.item())

        with scope():
            train()
            train()
        train()
        return state_of(block, before, after, losses=losses)

    return step


def compile_in_place(block: nn.Module, backend: str) -> nn.Module:
    """Compile a module by its own method."""
    block.compile(backend=backend)
    return block


class Block(nn.Sequential):
    """A block of the user's own: Dynamo compiles it, unlike those of torch.nn, whose frames it leaves as they are."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - torch's name
        """Run the layers, with a graph break between them."""
        hidden = self[0](input).sin()
        torch._dynamo.graph_break()  # noqa: SLF001 - torch documents it so
        return self[1](hidden)


def test_compiled_with_eager_kernels() -> None:
    """Dynamo and AOTAutograd, whose kernels are eager ones."""
    assert_same_bits(compiled_block_step("aot_eager"))


@pytest.mark.parametrize("kind", [nn.Sequential, Block])
def test_compiled_in_place(kind: type[nn.Sequential]) -> None:
    """Dynamo looks at the frames below a module that was compiled by its own method, but not at the library's."""
    block = kind(nn.Linear(8, 8), nn.GELU())
    assert_same_bits(compiled_block_step("aot_eager", block, compile_in_place))


@pytest.mark.parametrize("is_method", [False, True])
def test_compiled_optimizer_steps(is_method: bool) -> None:
    """Dynamo restores the dispatch keys after each call: no mode may come or go in between."""
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step_once() -> None:
        optimizer.step()

    step = torch.compile(optimizer.step if is_method else step_once, backend="eager")
    with MemoryBudget(UNLIMITED):
        for _ in range(6):
            model(torch.ones(4, 8)).sum().backward()
            step()
            optimizer.zero_grad()
            assert torch.ones(3).sum() == 3
    assert torch.ones(3).sum() == 3


@pytest.mark.parametrize("in_place", [False, True])
def test_larger_steps_of_a_compiled_model(in_place: bool) -> None:
    """Recording does not pause where a compiled function runs: it could not resume in there."""
    blocks = [nn.Sequential(nn.Linear(256, 256), nn.GELU()) for _ in range(6)]
    model = nn.Sequential(nn.Linear(8, 256), *blocks)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def run(x: torch.Tensor) -> torch.Tensor:
        return model(x)

    call = compile_in_place(model, "eager") if in_place else torch.compile(run, backend="eager", dynamic=True)
    budget_bytes = 22_000_000
    with MemoryBudget(budget_bytes, Config(tier="memory")) as budget:
        for num_rows in [64] * 5 + [2048] * 3:
            call(torch.ones(num_rows, 8)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert budget.summary().peak_bytes <= budget_bytes
    assert budget.summary().swapped_out_bytes + budget.summary().recomputed_bytes > 0


def test_scope_does_not_stop_the_compiler() -> None:
    """A first call inside the scope is compiled there, and compiled code runs in every call, inside and after."""
    num_runs = 0

    def counting_backend(graph: torch.fx.GraphModule, _inputs: Any) -> Any:
        def run_graph(*inputs: Any) -> Any:
            nonlocal num_runs
            num_runs += 1
            return graph.forward(*inputs)

        return run_graph

    block = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
    compiled = torch.compile(block, backend=counting_backend)
    x = torch.ones(4, 8)
    with inside_budget("swap")():
        compiled(x).sum().backward()
        compiled(x).sum().backward()
    compiled(x).sum().backward()
    assert num_runs == 3


@pytest.mark.rest
@pytest.mark.skipif(not has_compiler(), reason="inductor finds no C++ compiler")
def test_compiled_with_inductor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fused kernels, whose bits no eager replay would give."""
    from torch._inductor import config

    # Vectorised kernels take the C++ compiler several times as long, and change nothing here.
    monkeypatch.setattr(config.cpp, "simdlen", 1)
    assert_same_bits(compiled_block_step("inductor"))
