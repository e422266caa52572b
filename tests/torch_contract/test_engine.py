"""The contract with torch: the autograd engine, and the doors to it.

A torch release that changes one fails here, by name.
"""

from __future__ import annotations

import importlib
import subprocess
import sys
from typing import TYPE_CHECKING, Any, ClassVar, cast

import pytest
import torch

from torchdelta._torch.doors import (
    FSDP_STEPS_OF_BACKWARD,
    patch_fsdp_backward,
    patch_functorch_guard,
    patch_run_backward,
    patch_when_imported,
)
from torchdelta._torch.engine import (
    ACCUMULATE,
    call_at_backward_end,
    current_node,
    graph_task_id,
    input_sizes_bytes,
    next_node_number,
    node_number,
    running_function,
)

if TYPE_CHECKING:
    from pathlib import Path


def _engine() -> Any:
    return cast("Any", torch.autograd.Variable)._execution_engine


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


def test_nodes_are_numbered_as_they_are_made() -> None:
    """`next_node_number` and `node_number`."""
    first = next_node_number()
    x = torch.ones(2, requires_grad=True)
    y = (x * 2).sum()
    assert y.grad_fn is not None
    assert [node_number(y.grad_fn.next_functions[0][0]), node_number(y.grad_fn)] == [first, first + 1]
    assert next_node_number() == first + 2


def test_graph_task_id() -> None:
    """It is -1 outside of backward and something else inside, also in a backward inside a backward."""
    seen: list[int] = []
    x = torch.ones(2, requires_grad=True)
    assert graph_task_id() == -1
    y = x * 2
    y.register_hook(lambda _: seen.append(graph_task_id()))
    y.sum().backward()
    assert len(seen) == 1
    assert seen[0] != -1
    assert graph_task_id() == -1


@pytest.mark.parametrize("way", ["Tensor.backward", "autograd.backward", "autograd.grad", "checkpoint", "engine"])
def test_one_door_to_the_engine(way: str) -> None:
    """Every way into backward passes through what is replaced, once, and none does after the undoing."""
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
        elif way == "engine":
            _engine().run_backward(((x * 2).sum(),), (torch.ones(()),), False, False, (x,))
        else:
            torch.utils.checkpoint.checkpoint(torch.sin, x, use_reentrant=True).sum().backward()

    undo = patch_run_backward(make)
    try:
        run()
    finally:
        undo()
    seen = num_calls
    assert seen == (2 if way == "checkpoint" else 1)
    run()
    assert num_calls == seen


def test_the_engine_is_as_before_but_for_its_backwards() -> None:
    """What takes its place is an engine for Dynamo, too, and the other methods act on the only one there is."""
    before, calls = _engine(), []
    undo = patch_run_backward(lambda original: original)
    try:
        assert isinstance(_engine(), type(before))
        assert {name for name in dir(_engine()) if not name.startswith("_")} == {
            *{name for name in dir(before) if not name.startswith("_")},
            *{"below", "run"},
        }
        assert _engine().is_checkpoint_valid() == before.is_checkpoint_valid()
        x = torch.ones(2, requires_grad=True)
        y = x * 2
        y.register_hook(lambda _: _engine().queue_callback(lambda: calls.append(1)))
        y.sum().backward()
    finally:
        undo()
    assert calls == [1]
    assert _engine() is before


def test_names_of_the_arguments_of_the_engine() -> None:
    """A program may name all of them, and leave out the last ones. The replacement gets them as from torch."""
    told: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def make(original: Any) -> Any:
        def replacement(outputs: Any, gradients: Any, *args: Any, **kwargs: Any) -> Any:
            told.append((args, kwargs))
            return original(outputs, gradients, *args, **kwargs)

        return replacement

    def run(**others: Any) -> str:
        y = x * 2
        returned = _engine().run_backward(
            tensors=(y,), grad_tensors=(x,), keep_graph=True, create_graph=False, **others
        )
        gradient, x.grad = x.grad, None
        return f"{returned} {gradient}"

    x = torch.ones(2, requires_grad=True)
    flags = {"allow_unreachable": True, "accumulate_grad": True}
    plain = [run(inputs=(x,)), run(**flags)]
    undo = patch_run_backward(make)
    try:
        assert [run(inputs=(x,)), run(**flags)] == plain
        torch.sum(x).backward(retain_graph=True)
    finally:
        undo()
    (args, given), *usual = told
    assert args[:2] == (True, False)
    assert args[2][0] is x
    assert given == dict.fromkeys(flags, False)
    assert usual == [((True, False, ()), flags)] * 2


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
    undo = patch_run_backward(make)
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

    undo = patch_functorch_guard(make)
    try:
        assert torch.func.grad(lambda x: (x * x).sum())(torch.ones(2)).tolist() == [2.0, 2.0]
    finally:
        undo()
    assert entered
    count = len(entered)
    torch.func.grad(lambda x: x.sum())(torch.ones(2))
    assert len(entered) == count


@pytest.mark.rest
def test_call_of_compiled_regions() -> None:
    """AOTAutograd calls what it compiled through the function that is replaced, at the latest in backward."""
    code = """
import torch
from torchdelta._torch.compiled import patch_compiled_call
import torch._dynamo
calls = []
def make(original, inputs_of):
    def replacement(*args, **kwargs):
        calls.append(1)
        inputs = inputs_of(args, kwargs)
        for value in inputs[0] if isinstance(inputs, tuple) else inputs:
            assert isinstance(value, torch.Tensor), inputs
        return original(*args, **kwargs)
    return replacement
undo = patch_compiled_call(make)
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


@pytest.mark.rest
def test_calls_of_compiled_functions() -> None:
    """Each call is told before Dynamo looks at the dispatch keys, of functions compiled before the patch as well."""
    code = """
import torch
import torch._dynamo
from torchdelta._torch.compiled import is_in_compiled_call, patch_compiled_functions
seen = []
def backend(graph, inputs):
    def run(*args):
        seen.append(is_in_compiled_call())
        return graph.forward(*args)
    return run
compiled = torch.compile(lambda x: x * 2, backend=backend)
module = torch.nn.Linear(2, 2)
module.compile(backend=backend)
x = torch.ones(2)
undo = patch_compiled_functions(lambda _function, _inputs: seen.append("call"))
compiled(x), torch.compile(lambda x: x + 1, backend=backend)(x)
assert seen == ["call", True] * 2, seen
assert not is_in_compiled_call()
seen.clear()
module(x)
assert seen[0] == "call" and not is_in_compiled_call()
undo()
seen.clear()
compiled(x)
assert seen == [False]
undo = patch_compiled_functions(lambda _function, _inputs: seen.append("call"))
compiled(x)
assert seen == [False, "call", True]
undo()
context = torch.compile(torch.nn.Linear(2, 2), backend=backend).dynamo_ctx
own = list(context.enter_exit_hooks)
undo = patch_compiled_functions(lambda _function, _inputs: None)
context.enter_exit_hooks.append(None)
undo()
assert context.enter_exit_hooks == [*own, None]
"""
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.rest
def test_packages_kept_out_of_compiled_code() -> None:
    """Dynamo compiles no function of such a package, whether it is imported before the rule is made or after it."""
    code = """
from torchdelta._torch.compiled import keep_out_of_compiled_code
keep_out_of_compiled_code("numbers")()
undo = keep_out_of_compiled_code("fractions")
import fractions, numbers, torch
from torch._dynamo import trace_rules
assert trace_rules.check(fractions.Fraction.limit_denominator)
keep_out_of_compiled_code("numbers")
assert trace_rules.check(numbers.Complex.__bool__)
count = len(trace_rules.SKIP_DIRS)
keep_out_of_compiled_code("numbers")
assert len(trace_rules.SKIP_DIRS) == count
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_input_sizes_bytes() -> None:
    """An autograd node tells the shapes and dtypes of the gradients that flow into it."""
    x = torch.ones(3, 5, requires_grad=True)
    y = x.double() * 2
    assert input_sizes_bytes(y.grad_fn) == 15 * 8
    values, _ = y.sort()
    assert input_sizes_bytes(values.grad_fn) >= 15 * 8
    assert input_sizes_bytes(object()) == 0


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

    before = [vars(FSDPParamGroup)[name] for name in FSDP_STEPS_OF_BACKWARD]
    undo = patch_fsdp_backward(lambda original: lambda *_: original)
    assert [getattr(FSDPParamGroup, name)() for name in FSDP_STEPS_OF_BACKWARD] == before
    undo()
    assert [vars(FSDPParamGroup)[name] for name in FSDP_STEPS_OF_BACKWARD] == before


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
    y.register_hook(lambda _: seen.append(current_node()))
    y.sum().backward()
    assert seen == ["SinBackward0"]
    assert isinstance(current_node(), str)


def test_name_of_the_accumulating_node() -> None:
    """The node behind a leaf, which adds into its `.grad`, has the name that the runtime looks for."""
    x = torch.ones(2, requires_grad=True)
    y = x * 2
    assert y.grad_fn is not None
    node: Any = y.grad_fn.next_functions[0][0]
    assert node.name() == ACCUMULATE


def test_patch_when_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module that is not there yet is patched by its import; after the undoing it is as it was, or stays as it is."""
    names = ["torchdelta_probe_first", "torchdelta_probe_second"]
    for name in names:
        (tmp_path / f"{name}.py").write_text("value = 1\n", encoding="ascii")
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    finders = list(sys.meta_path)

    def patch(module: Any) -> Any:
        module.value += 1
        return lambda: setattr(module, "value", 1)

    undo, undo_unused = (patch_when_imported(name, patch) for name in names)
    first = importlib.import_module(names[0])
    assert first.value == 2
    undo_again = patch_when_imported(names[0], patch)  # it is there
    assert first.value == 3
    undo_again()
    undo()
    undo_unused()
    assert first.value == 1
    assert importlib.import_module(names[1]).value == 1
    assert sys.meta_path == finders


@pytest.mark.rest
def test_is_in_compiled_region() -> None:
    """An op that compiled code calls is told from one that is called by hand, also after compilation."""
    code = """
import torch
from torchdelta._torch.compiled import is_in_compiled_region
seen = []
with torch.library._scoped_library("torchdelta_region", "DEF") as library:
    library.define("ask(Tensor x) -> Tensor")
    def ask(x):
        seen.append(is_in_compiled_region())
        return x.clone()
    library.impl("ask", ask, "CPU")
    library.impl("ask", torch.empty_like, "Meta")
    op = torch.ops.torchdelta_region.ask.default
    op(torch.ones(2))
    compiled = torch.compile(lambda x: op(x) * 2, backend="aot_eager", fullgraph=True)
    compiled(torch.ones(2))
    compiled(torch.ones(2))
    op(torch.ones(2))
print(seen)
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.split("\n")[0] == "[False, True, True, False]"


class _Scale(torch.autograd.Function):
    """Lists what runs in its backward."""

    seen: ClassVar[list[Any]] = []

    @staticmethod
    def forward(_ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(_ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        function = running_function()
        _Scale.seen.append(function)
        hook = function.register_hook(lambda inputs, _: (hook.remove(), _Scale.seen.append(inputs[0].item()))[0])
        call_at_backward_end(lambda: _Scale.seen.append("end"))
        return gradients[0] * 2


def test_the_custom_function_whose_backward_runs() -> None:
    """A hook that is added to it there runs after its backward, once; the callback runs when all has ended."""
    x = torch.ones((), requires_grad=True)
    other = torch.ones((), requires_grad=True)
    other.register_hook(lambda _: _Scale.seen.append(running_function()))  # no custom Function runs here
    _Scale.seen.clear()
    y = _Scale.apply(x) + other.sin()
    assert running_function() is None
    for _ in range(2):
        y.backward(retain_graph=True)
    assert running_function() is None
    functions = [item for item in _Scale.seen if isinstance(item, torch.autograd.function.FunctionCtx)]
    assert len(functions) == 2
    assert [item for item in _Scale.seen if item not in functions].count(2.0) == 2
    assert _Scale.seen.count(None) == 2
    assert _Scale.seen.count("end") == 2
    assert _Scale.seen[-1] == "end"
