"""CUDA graphs and compiled code inside a budget: captured work is left alone, and replays as it would without one."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import nn

from tests.same_bits.judge import Scope, bits_of, inside_budget, seed_everything
from torchdelta import MemoryBudget

pytestmark = [
    pytest.mark.cuda,
    # torch's own, about programs as they are written here; some torch versions raise them inside the compiler.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream does not match"),
    pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores"),
    pytest.mark.filterwarnings("ignore:The CUDA Graph is empty"),
    pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS, but there was no current CUDA context"),
]
DECISIONS = ("recompute", "swap")


def network() -> nn.Sequential:
    """Make a small net."""
    return nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Dropout(0.1), nn.Linear(256, 64))


def captured(scope: Scope) -> Any:
    """Warm up, capture a whole step, and replay it on other numbers."""
    seed_everything()
    model, x = network(), torch.zeros(32, 64)
    with scope():
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                model.zero_grad(set_to_none=True)
                model(x).pow(2).mean().backward()
        torch.cuda.current_stream().wait_stream(side)
        model.zero_grad(set_to_none=True)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            loss = model(x).pow(2).mean()
            loss.backward()
        found = []
        for index in range(3):
            x.fill_(index + 1)
            graph.replay()
            found.append([loss.clone(), *(parameter.grad.clone() for parameter in model.parameters())])
        # And an ordinary step beside it.
        model.zero_grad(set_to_none=True)
        model(torch.randn(32, 64)).pow(2).mean().backward()
        found.append([parameter.grad.clone() for parameter in model.parameters()])
    return bits_of(found)


def graphed_callables(scope: Scope) -> Any:
    """Let torch capture the forward and the backward of a module, and train with it."""
    seed_everything()
    first, middle, last = (
        nn.Linear(64, 64),
        nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)),
        nn.Linear(64, 8),
    )
    with scope():
        middle = torch.cuda.make_graphed_callables(middle, (torch.randn(32, 64, requires_grad=True),))
        for _ in range(3):
            last(middle(first(torch.randn(32, 64)).relu()).sigmoid()).pow(2).mean().backward()
    parameters = [*first.parameters(), *middle.parameters(), *last.parameters()]
    return bits_of([parameter.grad for parameter in parameters])


@pytest.mark.parametrize("decisions", DECISIONS)
@pytest.mark.parametrize("program", [captured, graphed_callables], ids=lambda program: program.__name__)
def test_captured_work_is_left_alone(program: Any, decisions: str) -> None:
    """The same numbers with and without a budget that would have everything leave."""
    plain = program(contextlib.nullcontext)
    assert program(inside_budget(decisions)) == plain


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_compiled_parts(mode: str) -> None:
    """A compiled block in an eager model, with and without captured graphs below it."""
    pytest.importorskip("triton")

    def train(scope: Scope) -> Any:
        torch.compiler.reset()
        seed_everything()
        first, block, last = (
            nn.Linear(64, 64),
            nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)),
            nn.Linear(64, 8),
        )
        compiled = torch.compile(block, mode=mode)
        found = []
        with scope():
            for _ in range(4):
                torch.compiler.cudagraph_mark_step_begin()
                loss = last(compiled(first(torch.randn(32, 64)).relu()).sigmoid()).pow(2).mean()
                loss.backward()
                parameters = [p for m in (first, block, last) for p in m.parameters()]
                found.append([loss.detach().clone(), *(p.grad.clone() for p in parameters)])
                for parameter in parameters:
                    parameter.grad = None  # a captured graph's output, which its next replay overwrites
        return bits_of(found)

    plain = train(contextlib.nullcontext)
    for decisions in DECISIONS:
        assert train(inside_budget(decisions)) == plain


def test_the_processs_peak_is_left_alone_once_regions_are_known() -> None:
    """A compiled region is measured in its first calls; afterwards `max_memory_allocated` is the program's own."""
    pytest.importorskip("triton")
    model = torch.compile(nn.Sequential(nn.Linear(64, 64), nn.GELU()))
    with MemoryBudget("8GiB"):
        for _ in range(6):
            model(torch.randn(32, 64)).sum().backward()
        torch.cuda.reset_peak_memory_stats()
        large = torch.empty(64 << 20, dtype=torch.uint8)
        peak_bytes = torch.cuda.max_memory_allocated()
        del large
        model(torch.randn(32, 64)).sum().backward()
        assert torch.cuda.max_memory_allocated() >= peak_bytes
