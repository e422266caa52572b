"""The functions of `torch.optim` that take lists, and the ops that do the same to each tensor of one."""

from __future__ import annotations

import contextlib
import gc
import inspect
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from torchdelta._torch.compiled import is_in_compiled_call, note_compiled_calls, patch_compiled_functions
from torchdelta._torch.list_functions import is_list_op, list_functions, patch_list_functions, patch_state_lists

if TYPE_CHECKING:
    from collections.abc import Callable


def note_in(called: list[str]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return what notes the names of the functions that are called."""

    def make(original: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            called.append(original.__name__)
            return original(*args, **kwargs)

        return call

    return make


def test_optimizers_call_the_functions_that_are_found() -> None:
    """For `foreach` and `fused`, each step calls one, whose first argument is the list of parameters."""
    names = {name for _, name in list_functions()}
    assert {"_multi_tensor_adam", "_multi_tensor_sgd", "_fused_adam", "_fused_sgd", "_fused_adagrad"} <= names
    assert len(names) >= 14
    before = {name: vars(module)[name] for module, name in list_functions()}
    parameters = [torch.nn.Parameter(torch.ones(3)) for _ in range(2)]
    for parameter in parameters:
        parameter.grad = torch.ones(3)
    called: list[str] = []
    undo = patch_list_functions(note_in(called))
    torch.optim.AdamW(parameters, foreach=True).step()
    torch.optim.AdamW(parameters, fused=True).step()
    torch.optim.SGD(parameters, foreach=True).step()
    torch.optim.SGD(parameters, foreach=False).step()
    undo()
    torch.optim.SGD(parameters, foreach=True).step()
    assert called == ["_multi_tensor_adam", "_fused_adam", "_multi_tensor_sgd"]
    assert before == {name: vars(module)[name] for module, name in list_functions()}


def test_a_compiled_function_sees_the_originals() -> None:
    """While it is called, also where it breaks the graph; afterwards the replacements are back."""
    called: list[str] = []
    undo_compiled = patch_compiled_functions(lambda _function, _inputs: None)
    undo = patch_list_functions(note_in(called))
    parameters = [torch.nn.Parameter(torch.ones(3))]
    parameters[0].grad = torch.ones(3)
    optimizer = torch.optim.SGD(parameters, foreach=True)
    try:
        torch.compile(optimizer.step, backend="eager")()
        assert called == []
        optimizer.step()
        assert called == ["_multi_tensor_sgd"]
    finally:
        undo()
        undo_compiled()


def test_calls_of_compiled_functions_are_noted() -> None:
    """With the function that was compiled, also where torch wraps it; before and after each call, nested ones too."""
    seen: list[tuple[str, Any]] = []

    def begin(function: Any, inputs: Any) -> Callable[[], None]:
        seen.append(("begin", inspect.unwrap(function)))
        assert [x.shape for x in inputs[0]] == [(2,)]
        return lambda: seen.append(("end", None))

    def double(x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    undo_compiled = patch_compiled_functions(lambda _function, _inputs: None)
    undo = note_compiled_calls(begin)
    linear, in_place = torch.nn.Linear(2, 2), torch.nn.Tanh()
    in_place.compile(backend="eager")
    try:
        torch.compile(double, backend="eager")(torch.ones(2))
        torch.compile(linear, backend="eager")(torch.ones(2))
        in_place(torch.ones(2))
    finally:
        undo()
        undo_compiled()
    torch.compile(double, backend="eager")(torch.ones(2))
    functions = [function for kind, function in seen if kind == "begin"]
    assert functions == [double, linear, in_place._call_impl]
    assert [kind for kind, _ in seen] == ["begin", "end"] * 3


def test_the_originals_stay_if_the_patch_ends_during_a_call() -> None:
    """The end of the call does not put the replacements back."""
    before = {name: vars(module)[name] for module, name in list_functions()}
    undo_compiled = patch_compiled_functions(lambda _function, _inputs: None)
    undo = patch_list_functions(note_in([]))

    @torch._dynamo.disable
    def end() -> None:
        undo()

    def function(x: torch.Tensor) -> torch.Tensor:
        end()
        return x + 1

    torch.compile(function, backend="eager")(torch.ones(2))
    undo_compiled()
    assert before == {name: vars(module)[name] for module, name in list_functions()}


def test_a_call_whose_end_torch_forgets_ends() -> None:
    """As with an error of torch's own after the call: `fullgraph=True` compiled nothing."""
    ends: list[int] = []
    undo_compiled = patch_compiled_functions(lambda _function, _inputs: lambda: ends.append(1))
    function = torch.compile(lambda x: x + 1, backend="eager", fullgraph=True)
    try:
        # An error in torch 2.13, a warning in 2.12. `pytest.raises` would keep the frames, and what is in them.
        with FlopCounterMode(display=False), contextlib.suppress(RuntimeError, UserWarning):
            function(torch.ones(2))
    finally:
        undo_compiled()
    gc.collect()
    assert ends == [1]
    assert not is_in_compiled_call()


def test_all_ends_are_called() -> None:
    """Even if one of them raises."""
    ends: list[int] = []

    def fail() -> None:
        raise ValueError("no")

    undo_compiled = patch_compiled_functions(lambda _function, _inputs: fail)
    undo = note_compiled_calls(lambda _function, _inputs: lambda: ends.append(1))
    try:
        with pytest.raises(ValueError, match="no"):
            torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2))
    finally:
        undo()
        undo_compiled()
    assert ends == [1]
    assert not is_in_compiled_call()


def test_a_call_that_is_refused_leaves_nothing() -> None:
    """What had begun ends, and the function does not run."""
    ends: list[int] = []
    ran: list[int] = []

    def refuse(_function: Any, _inputs: Any) -> Callable[[], None]:
        raise ValueError("no")

    undo_compiled = patch_compiled_functions(lambda _function, _inputs: None)
    undo_first = note_compiled_calls(lambda _function, _inputs: lambda: ends.append(1))
    undo_second = note_compiled_calls(refuse)
    function = torch.compile(lambda x: ran.append(1) or x + 1, backend="eager")
    try:
        with pytest.raises(ValueError, match="no"):
            function(torch.ones(2))
    finally:
        undo_second()
        undo_first()
        undo_compiled()
    assert (ends, ran) == ([1], [])
    assert not is_in_compiled_call()
    assert function(torch.ones(2)).tolist() == [2.0, 2.0]


def test_list_ops() -> None:
    """By the name of their schema."""
    aten = torch.ops.aten
    assert is_list_op(aten._foreach_add_.List)
    assert is_list_op(aten._foreach_norm.Scalar)
    assert is_list_op(aten._fused_adamw_.default)
    assert is_list_op(aten._amp_foreach_non_finite_check_and_unscale_.default)
    assert not is_list_op(aten.add.Tensor)
    assert not is_list_op(aten.cat.default)
    assert not is_list_op(aten._fused_adamw.default)  # returns lists of each kind
    assert not is_list_op(aten._amp_foreach_non_finite_check_and_unscale.default)


@pytest.mark.parametrize("options", [{"foreach": False}, {"foreach": True}, {"fused": True}])
def test_states_are_in_the_list_before_they_are_stored(options: dict[str, bool]) -> None:
    """`SGD` puts new momentum buffers into the list that it has given to `_init_group`."""
    parameters = [torch.nn.Parameter(torch.ones(3)) for _ in range(2)]
    for parameter in parameters:
        parameter.grad = torch.ones(3)
    optimizer = torch.optim.SGD(parameters, momentum=0.9, **options)
    before = vars(torch.optim.SGD)["_init_group"]
    noted: list[list[Any]] = []
    undo = patch_state_lists(noted.append)
    optimizer.step()
    undo()
    assert vars(torch.optim.SGD)["_init_group"] is before
    (states,) = noted
    assert [id(state) for state in states] == [id(optimizer.state[p]["momentum_buffer"]) for p in parameters]
