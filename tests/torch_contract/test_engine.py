"""The contract with torch: the autograd engine, and the doors to it.

A torch release that changes one fails here, by name.
"""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch

from torchdelta import _torch


def test_engine_accumulates_in_place_where_one_holds() -> None:
    """The reason for addresses: a gradient whose storage object exists is no longer added to in place."""

    def is_in_place() -> bool:
        x = torch.randn(8, requires_grad=True)
        first = x * 2
        with torch.autograd.profiler.profile() as profiler:
            (first.sin() + first.cos()).sum().backward()
        names = [event.name() for event in profiler.kineto_results.events()]
        return "aten::add_" in names

    assert is_in_place()


def test_graph_task_id() -> None:
    """It is -1 outside of backward and something else inside, also in a backward inside a backward."""
    seen: list[int] = []
    x = torch.ones(2, requires_grad=True)
    assert _torch.graph_task_id() == -1
    y = x * 2
    y.register_hook(lambda _: seen.append(_torch.graph_task_id()))
    y.sum().backward()
    assert len(seen) == 1
    assert seen[0] != -1
    assert _torch.graph_task_id() == -1


@pytest.mark.parametrize("way", ["Tensor.backward", "autograd.backward", "autograd.grad", "checkpoint"])
def test_one_door_to_the_engine(way: str) -> None:
    """Every way into backward passes through the function that is replaced, and none does after the undoing."""
    num_calls = 0

    def make(original: Any) -> Any:
        def replacement(*args: Any, **kwargs: Any) -> Any:
            nonlocal num_calls
            num_calls += 1
            return original(*args, **kwargs)

        return replacement

    def run() -> None:
        x = torch.ones(2, requires_grad=True)
        if way == "Tensor.backward":
            (x * 2).sum().backward()
        elif way == "autograd.backward":
            torch.autograd.backward((x * 2).sum())
        elif way == "autograd.grad":
            torch.autograd.grad((x * 2).sum(), x)
        else:
            torch.utils.checkpoint.checkpoint(torch.sin, x, use_reentrant=True).sum().backward()

    undo = _torch.patch_run_backward(make)
    try:
        run()
    finally:
        undo()
    seen = num_calls
    assert seen == (2 if way == "checkpoint" else 1)
    run()
    assert num_calls == seen


def test_signature_of_the_engine() -> None:
    """Whether the graph is kept is the third argument, whether one is made the fourth."""
    told: list[tuple[Any, ...]] = []

    def make(original: Any) -> Any:
        def replacement(outputs: Any, *args: Any, **kwargs: Any) -> Any:
            told.append(args[1:3])
            assert all(isinstance(output, torch.Tensor) for output in outputs)
            return original(outputs, *args, **kwargs)

        return replacement

    x = torch.ones(2, requires_grad=True)
    undo = _torch.patch_run_backward(make)
    try:
        (x * 2).sum().backward()
        (x * 2).sum().backward(retain_graph=True)
        torch.autograd.grad((x * x).sum(), x, create_graph=True)
    finally:
        undo()
    assert [tuple(map(bool, flags)) for flags in told] == [(False, False), (True, False), (True, True)]


def test_guard_of_functional_transforms() -> None:
    """`torch.func.grad` forbids saved-tensor hooks through the function that is replaced."""
    entered: list[str] = []

    def make(original: Any) -> Any:
        def replacement(message: str) -> Any:
            entered.append(message)
            return original(message)

        return replacement

    undo = _torch.patch_functorch_guard(make)
    try:
        assert torch.func.grad(lambda x: (x * x).sum())(torch.ones(2)).tolist() == [2.0, 2.0]
    finally:
        undo()
    assert entered
    count = len(entered)
    torch.func.grad(lambda x: x.sum())(torch.ones(2))
    assert len(entered) == count


def test_call_of_compiled_regions() -> None:
    """AOTAutograd calls what it compiled through the function that is replaced, at the latest in backward."""
    code = """
import torch
from torchdelta import _torch
import torch._dynamo
calls = []
def make(original):
    def replacement(*args, **kwargs):
        calls.append(1)
        return original(*args, **kwargs)
    return replacement
undo = _torch.patch_compiled_call(make)
compiled = torch.compile(lambda x: (x * 2).sin(), backend="aot_eager")
x = torch.ones(4, requires_grad=True)
y = compiled(x)
forward = len(calls)
y.sum().backward()
print(forward, len(calls))
undo()
compiled(x)
print(len(calls))
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    first, after = result.stdout.splitlines()
    forward, both = map(int, first.split())
    assert both > forward >= 0
    assert int(after) == both


def test_input_sizes_bytes() -> None:
    """An autograd node tells the shapes and dtypes of the gradients that flow into it."""
    x = torch.ones(3, 5, requires_grad=True)
    y = x.double() * 2
    assert _torch.input_sizes_bytes(y.grad_fn) == 15 * 8
    values, _ = y.sort()
    assert _torch.input_sizes_bytes(values.grad_fn) >= 15 * 8
    assert _torch.input_sizes_bytes(object()) == 0


def test_node_attributes() -> None:
    """A node has a name, following nodes, and, where it accumulates, its leaf."""
    x = torch.ones(2, requires_grad=True)
    node = (x * 2).grad_fn
    assert node is not None
    assert node.name() == "MulBackward0"
    ((accumulate, index),) = [edge for edge in node.next_functions if edge[0] is not None]
    assert index == 0
    assert accumulate is not None
    assert accumulate.name() == "torch::autograd::AccumulateGrad"
    assert accumulate.variable is x  # pyright: ignore[reportAttributeAccessIssue]


def test_patch_fsdp_backward() -> None:
    """FSDP2 has the three steps that are patched, by these names, and gets them back."""
    pytest.importorskip("torch.distributed.fsdp")
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

    before = [vars(FSDPParamGroup)[name] for name in _torch.FSDP_STEPS_OF_BACKWARD]
    undo = _torch.patch_fsdp_backward(lambda original: lambda *_: original)
    assert [getattr(FSDPParamGroup, name)() for name in _torch.FSDP_STEPS_OF_BACKWARD] == before
    undo()
    assert [vars(FSDPParamGroup)[name] for name in _torch.FSDP_STEPS_OF_BACKWARD] == before


def test_collectives_do_not_say_what_they_write() -> None:
    """The schemas that the table of collectives stands in for; one that has learned to say so needs it no longer."""
    for op in (torch.ops.c10d.allreduce_, torch.ops.c10d.broadcast_, torch.ops.c10d._allgather_base_):
        assert not any(argument.alias_info is not None for argument in op.default._schema.arguments)
    names = {argument.name for argument in torch.ops.c10d.allreduce_.default._schema.arguments}
    assert {"tensors", "async_op"} <= names


def test_current_node() -> None:
    """Within a backward it is the node that runs; outside of any there is none, or the last one."""
    seen: list[str] = []
    x = torch.ones(2, requires_grad=True)
    y = x.sin()
    y.register_hook(lambda _: seen.append(_torch.current_node()))
    y.sum().backward()
    assert seen == ["SinBackward0"]
    assert isinstance(_torch.current_node(), str)
