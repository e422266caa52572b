"""What the runtime relies on where tensors are emptied in place, and reached without an op."""

from __future__ import annotations

import io
from typing import Any

import torch

from torchdelta._torch.modes import (
    DispatchMode,
    FunctionMode,
    pop_function_mode,
    push_function_mode,
    remove_function_mode,
    top_function_mode,
)
from torchdelta._torch.modules import own_parameters_of
from torchdelta._torch.raw_access import EXPORTING_METHODS, READING_METHODS, patch_raw_access, patch_storage_reads
from torchdelta._torch.storages import memory_behind, resize_storage, storage_behind, tensor_address


def test_a_storage_is_emptied_and_refilled_in_place() -> None:
    """All aliases see the content again; the version does not change, and an array makes a storage not resizable."""
    tensor = torch.arange(10.0)
    alias, version = tensor.detach()[2:], tensor._version
    storage = storage_behind(tensor)
    content = storage.clone()
    resize_storage(storage, 0)
    assert storage.nbytes() == 0
    assert memory_behind(storage) == 0
    resize_storage(storage, content.nbytes())
    storage.copy_(content)
    assert alias.tolist() == list(range(2, 10))
    assert tensor._version == version
    assert tensor_address(tensor) == memory_behind(storage) == tensor.data_ptr()
    assert storage.resizable()
    tensor.numpy()
    assert not storage.resizable()


def test_function_modes_are_pushed_and_popped() -> None:
    """The mode on top sees what Python code calls."""

    class Notes(FunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    seen: list[Any] = []
    mode = Notes()
    assert top_function_mode() is None
    push_function_mode(mode)
    assert top_function_mode() is mode
    torch.ones(2).sum()
    assert pop_function_mode() is mode
    assert len(seen) == 2


def test_a_function_mode_is_removed_from_below_others() -> None:
    """Nothing happens where it is not on the stack."""
    below, above = FunctionMode(), FunctionMode()
    push_function_mode(below)
    push_function_mode(above)
    remove_function_mode(below)
    remove_function_mode(below)
    assert pop_function_mode() is above
    assert top_function_mode() is None


def test_own_parameters() -> None:
    """A module's own parameters are found, those of its children are not, and a module that is not built has none."""
    linear = torch.nn.Linear(2, 3)
    assert {id(p) for p in own_parameters_of(linear)} == {id(linear.weight), id(linear.bias)}
    assert own_parameters_of(torch.nn.Sequential(linear)) == []
    assert own_parameters_of(object.__new__(torch.nn.Linear)) == []


def test_what_reads_memory_is_patched_and_restored() -> None:
    """Every method exists; the patches see their calls, `torch.save` goes through `_save`, and all are removed."""
    before = {name: getattr(torch.Tensor, name) for name in (*READING_METHODS, *EXPORTING_METHODS)}
    seen: list[str] = []

    def make(original: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            seen.append(original.__name__)
            return original(*args, **kwargs)

        return call

    undo = patch_raw_access(reads=make, exports=make, copies=make, saves=make)
    undo_sizes = patch_storage_reads(sizes=make, reads=make)
    tensor = torch.ones(3)
    tensor.numpy()
    repr(tensor)
    torch.save(tensor, io.BytesIO())
    undo_sizes()
    undo()
    assert {"numpy", "_str", "_save", "__reduce_ex__", "nbytes"} <= set(seen)
    assert before == {name: getattr(torch.Tensor, name) for name in before}
    assert tensor.untyped_storage().nbytes() == 12


def test_dynamo_runs_compiled_code_under_a_dispatch_mode_that_says_so() -> None:
    """What Dynamo asks the class of a mode."""
    assert DispatchMode.ignore_compile_internals()
    assert not DispatchMode._should_skip_dynamo()
