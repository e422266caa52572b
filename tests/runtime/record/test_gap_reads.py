"""What is read between the nodes of a backward has come back, where parameters and gradients may leave."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from tests.runtime.parts import empty_everything, is_emptied, running_session
from tests.same_bits.judge import bits_of
from torchdelta import Config, MemoryBudget
from torchdelta._torch.modes import top_function_mode
from torchdelta.runtime.current import current_session


def everything() -> MemoryBudget:
    """Return a scope in which nothing has to leave, but everything may."""
    return MemoryBudget("1TiB", Config(decision_class="all", tier="memory"))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # torch hides it where it is no error
@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.parametrize(
    "starts", ["backward", "engine", "grad", "with a hook", "from a gradient", "over the same graph"]
)
def test_a_backward_in_a_hook_on_a_tensor(starts: str, *, is_compiled: bool) -> None:
    """What it reads and accumulates into is back, though it runs where nothing is recorded."""
    emptied: list[bool] = []

    def run(scope: Any) -> bytes:
        torch.manual_seed(0)
        model, side = torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)
        both = torch.nn.ModuleList([model, side])
        x, given = torch.randn(8, 64), []
        function = torch.compile(_mean, backend="eager") if is_compiled else _mean

        def hook(gradient: torch.Tensor) -> torch.Tensor:
            if is_inside:  # over the same graph
                return gradient * 2
            if isinstance(scope, MemoryBudget):
                empty_everything()
            with torch.enable_grad():
                out = side(gradient.detach())
                if starts == "with a hook":
                    out.register_hook(lambda inner: inner @ side.weight.detach())
                loss = function(out)
            if isinstance(scope, MemoryBudget):
                empty_everything()
                emptied.append(side.weight.grad is not None and is_emptied(side.weight.grad))
            is_inside.append(True)
            if starts == "grad":
                given.append(torch.autograd.grad(loss, side.weight)[0])
            elif starts == "engine":
                torch.autograd.backward([loss])
            elif starts == "from a gradient":
                torch.autograd.backward([side.weight], [side.weight.grad])
            elif starts == "over the same graph":
                given.extend(torch.autograd.grad(outs[-1], model.weight, retain_graph=True))
            else:
                loss.backward()
            is_inside.clear()
            return gradient * function(side.weight.detach())

        outs: list[torch.Tensor] = []
        is_inside: list[bool] = []
        with scope:
            for step in range(3):
                side(x).square().mean().backward()
                hidden = model(x)
                outs.append(hidden.sin().sum())
                hidden.register_hook(hook)
                (hidden * hidden).mean().backward()
                if step == 1:
                    both.zero_grad(set_to_none=False)
            outs.clear()
        return bits_of([parameter.grad for parameter in both.parameters()] + given)

    assert run(everything()) == run(contextlib.nullcontext())
    assert any(emptied)


@pytest.mark.parametrize("recomputes_in", ["the node", "a recorded node", "no node"])
@pytest.mark.parametrize("function", ["cumprod", "prod"])
def test_a_node_without_the_recorder_reads_what_others_have_saved(function: str, recomputes_in: str) -> None:
    """It reads a parameter without an op: the hooks of a checkpoint, or of the program, hand it over."""
    emptied: list[tuple[bool, bool]] = []

    def run(scope: Any) -> bytes:
        torch.manual_seed(0)
        factors = torch.nn.Parameter(torch.rand(64, 64) + 0.5)
        layers = [torch.nn.Linear(64, 64) for _ in range(3)]
        model = torch.nn.ModuleList([*layers, torch.nn.ParameterList([factors])])

        def empty() -> None:
            if isinstance(scope, MemoryBudget):
                empty_everything()
                emptied.append((is_emptied(factors), is_emptied(layers[0].weight)))

        def block(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            product = torch.cumprod(factors, 0) if function == "cumprod" else factors.prod(0)
            for layer in layers:
                empty()
                x = layer(x).relu()
            empty()
            return (product, x) if recomputes_in == "the node" else (product * x.sum(), x)

        with scope:
            for _ in range(2):
                x = torch.randn(8, 64, requires_grad=True)
                if recomputes_in == "no node":
                    with torch.autograd.graph.saved_tensors_hooks(lambda saved: saved, lambda saved: saved):
                        product, out = block(x)
                else:
                    product, out = checkpoint(block, x, use_reentrant=False)  # pyright: ignore[reportGeneralTypeIssues]
                if recomputes_in == "the node":
                    product.sum().backward(retain_graph=True)
                else:
                    out.register_hook(lambda _: empty())
                    out = out + product.sum()
                out.square().mean().backward()
        return bits_of([parameter.grad for parameter in model.parameters()])

    assert run(everything()) == run(contextlib.nullcontext())
    assert any(of_layer for _, of_layer in emptied)
    assert not any(of_factors for of_factors, _ in emptied)


def test_the_library_unpacks_without_the_modes_for_the_program() -> None:
    """Its own torch functions are not taken for the program's, in nodes without the recorder either."""
    seen: list[object] = []

    def run(scope: Any) -> bytes:
        torch.manual_seed(0)
        weight = torch.nn.Parameter(torch.rand(64, 64))
        with scope:
            hidden = weight * 2
            product = (hidden.cumprod(0) * hidden).masked_fill(hidden > 1, 0.0)
            if isinstance(scope, MemoryBudget):
                session = running_session()
                unpack = session.saved._unpack  # noqa: SLF001

                def note(packed: Any) -> torch.Tensor:
                    seen.append(top_function_mode())
                    return unpack(packed)

                session.saved._unpack = note  # noqa: SLF001
                empty_everything()
            product.sum().backward()
        return bits_of([weight.grad])

    assert run(everything()) == run(contextlib.nullcontext())
    assert seen
    assert set(seen) == {None}


class _GivesWeight(torch.autograd.Function):
    """Returns its input. The gradient of the input is the weight."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Return a copy of the input."""
        ctx.weight = weight
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *_gradients: torch.Tensor) -> Any:
        """Return the weight, without an op that reads it."""
        if current_session() is not None:
            empty_everything()
        return ctx.weight.data, None


@pytest.mark.parametrize("is_late", [False, True])
def test_the_engine_adds_a_parameter_that_a_node_returns(*, is_late: bool) -> None:
    """It is back before it is added to another gradient, also where other nodes run first and it leaves again."""

    def run(scope: Any) -> bytes:
        torch.manual_seed(0)
        first, second, third = (torch.nn.Parameter(torch.randn(64, 64)) for _ in range(3))
        keep = torch.nn.ParameterList([first, second, third])
        with scope:
            for _ in range(2):
                x = torch.tanh(torch.randn(64, 64) @ first)
                other = _GivesWeight.apply(torch.tanh(x) if is_late else x, third)
                out = _GivesWeight.apply(x, second) + other  # pyright: ignore[reportOperatorIssue]
                out.square().mean().backward()
        return bits_of([parameter.grad for parameter in keep])

    assert run(everything()) == run(contextlib.nullcontext())


def _mean(x: torch.Tensor) -> torch.Tensor:
    return (x * x).mean()


@pytest.mark.parametrize("is_here", [False, True])
@pytest.mark.parametrize("how", ["swaps", "assigns the data", "assigns an old one"])
def test_a_hook_that_assigns_a_gradient(how: str, *, is_here: bool) -> None:
    """The engine adds to it next, without an op: it is back, and a copy from before is not used again."""
    was_emptied: list[bool] = []

    def run(scope: Any) -> bytes:
        torch.manual_seed(0)
        a, b = (torch.nn.Linear(64, 64, bias=False) for _ in range(2))
        both, x = torch.nn.ModuleList([a, b]), torch.randn(8, 64)

        def hook(_: torch.Tensor) -> None:
            if isinstance(scope, MemoryBudget):
                was_emptied.append(is_emptied(old[0]))
            if how == "swaps":
                a.weight.grad, b.weight.grad = b.weight.grad, a.weight.grad
            elif how == "assigns the data":
                a.weight.grad.data = old[0]
            else:
                a.weight.grad = old[0]

        with scope:
            (a(x) + 2 * b(x)).square().mean().backward()
            old = [b.weight.grad]
            handle = a.weight.register_hook(hook)
            for _ in range(2):
                old[0] = b.weight.grad
                if isinstance(scope, MemoryBudget):
                    if is_here:  # with a copy of what it is now
                        old[0].mul_(1.0)
                    empty_everything()
                    if is_here:
                        old[0].sum()
                a(x).square().mean().backward()
                if isinstance(scope, MemoryBudget):
                    empty_everything()
            handle.remove()
        return bits_of([parameter.grad for parameter in both.parameters()])

    assert run(everything()) == run(contextlib.nullcontext())
    assert was_emptied[0] == (not is_here)


@pytest.mark.parametrize("what", ["a gradient", "a state"])
def test_a_hook_that_returns_what_is_away(what: str) -> None:
    """In place of the gradient: the engine clones it, or adds it."""
    was_emptied: list[bool] = []

    def run(scope: Any) -> bytes:
        torch.manual_seed(0)
        a, b = (torch.nn.Linear(64, 64, bias=False) for _ in range(2))
        both, x = torch.nn.ModuleList([a, b]), torch.randn(8, 64)
        optimizer = torch.optim.Adam(both.parameters(), foreach=False)

        def hook(_: torch.Tensor) -> torch.Tensor:
            if isinstance(scope, MemoryBudget):
                was_emptied.append(is_emptied(given[0]))
            return given[0]

        with scope:
            (a(x) + 2 * b(x)).square().mean().backward()
            optimizer.step()
            assert b.weight.grad is not None
            given = [b.weight.grad if what == "a gradient" else optimizer.state[b.weight]["exp_avg"]]
            a.weight.grad = None
            handle = a.weight.register_hook(hook)
            for _ in range(2):
                out = a(x).square().mean()
                if isinstance(scope, MemoryBudget):
                    empty_everything()
                out.backward()
            handle.remove()
        return bits_of([parameter.grad for parameter in both.parameters()])

    assert run(everything()) == run(contextlib.nullcontext())
    assert was_emptied == [True] * 2


def test_a_hook_of_a_nested_backward_that_returns_what_is_away() -> None:
    """A hook on a tensor starts a backward; a hook of one of its leaves returns a state."""
    was_emptied: list[bool] = []

    def run(scope: Any) -> bytes:
        torch.manual_seed(0)
        model, side, other = (torch.nn.Linear(64, 64, bias=False) for _ in range(3))
        both, x = torch.nn.ModuleList([model, side, other]), torch.randn(8, 64)
        optimizer = torch.optim.Adam(both.parameters(), foreach=False)

        def hook(_: torch.Tensor) -> torch.Tensor:
            if isinstance(scope, MemoryBudget):
                empty_everything()
                was_emptied.append(is_emptied(given))
            return given

        def start(gradient: torch.Tensor) -> None:
            with torch.enable_grad():
                side(gradient.detach()).square().mean().backward()

        with scope:
            (model(x) + side(x) + other(x)).square().mean().backward()
            optimizer.step()
            given = optimizer.state[other.weight]["exp_avg"]
            handle = side.weight.register_hook(hook)
            for _ in range(2):
                out = model(x)
                out.register_hook(start)
                out.square().mean().backward()
            handle.remove()
        return bits_of([parameter.grad for parameter in both.parameters()])

    assert run(everything()) == run(contextlib.nullcontext())
    assert was_emptied == [True] * 2
