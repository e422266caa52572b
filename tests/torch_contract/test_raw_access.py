"""What the runtime relies on where tensors are emptied in place, and reached without an op."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

import pytest
import torch

from torchdelta._torch.doors import patch_raw_results, patch_raw_writes, patch_saving
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

if TYPE_CHECKING:
    from pathlib import Path


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


def test_what_writes_memory_without_an_op_is_patched_and_restored() -> None:
    """The patches get the tensor or the storage that is written, and do not change what is written."""
    seen: list[Any] = []

    def make(original: Any) -> Any:
        def write(written: Any, *args: Any) -> Any:
            seen.append(written)
            return original(written, *args)

        return write

    def write_all() -> tuple[torch.Tensor, list[Any]]:
        tensor = torch.ones(4)
        storage = tensor.untyped_storage()
        tensor.apply_(lambda value: value + 1)
        tensor.map_(tensor, lambda a, b: a * b)
        tensor.map2_(tensor, tensor, lambda a, b, c: a + b + c)
        bytes_of = torch.arange(16, dtype=torch.uint8).untyped_storage()
        storage.copy_(bytes_of)
        storage[3] = 7
        before = tensor.clone()
        storage.fill_(0)
        return before, [tensor, tensor, tensor, storage, storage, storage]

    plain, _ = write_all()
    undo = patch_raw_writes(make)
    patched, written = write_all()
    assert patched.view(torch.uint8).equal(plain.view(torch.uint8))
    assert len(seen) == len(written)
    assert all(a is b for a, b in zip(seen[:3], written[:3], strict=True))
    assert all(each.data_ptr() == written[3].data_ptr() for each in seen[3:])
    seen.clear()
    undo()
    write_all()
    assert seen == []
    assert "apply_" not in vars(torch.Tensor)


def test_the_state_of_a_sobol_sequence_is_written_by_four_functions() -> None:
    """`torch.quasirandom` calls them by their names in torch, three with the state first, one returns it."""
    seen: list[torch.Tensor] = []
    results: list[torch.Tensor] = []

    def make_write(original: Any) -> Any:
        return lambda state, *args: (seen.append(state), original(state, *args))[1]

    def make_draw(original: Any) -> Any:
        def draw(*args: Any, **kwargs: Any) -> Any:
            results.extend(out := original(*args, **kwargs))
            return out

        return draw

    def samples() -> torch.Tensor:
        engine = torch.quasirandom.SobolEngine(3, scramble=True, seed=0)
        engine.fast_forward(2)
        return engine.draw(4)

    plain = samples()
    undos = [patch_raw_writes(make_write), patch_raw_results(make_draw)]
    assert torch.equal(samples(), plain)
    for undo in undos:
        undo()
    assert len(seen) == 3
    assert torch.equal(results[0], plain)
    assert results[1].shape == (3,)
    samples()
    assert len(seen) == 3


def test_saving_is_patched_before_its_file_is_opened(tmp_path: Path) -> None:
    """In both formats, and for files and buffers; it is restored."""

    def make(_original: Any) -> Any:
        def refuse(file: Any) -> None:
            raise RuntimeError(f"not into {type(file).__name__}")

        return refuse

    path = tmp_path / "file.pt"
    undo = patch_saving(make)
    for is_new in (True, False):
        for file in (path, io.BytesIO()):
            with pytest.raises(RuntimeError, match="not into"):
                torch.save(torch.ones(2), file, _use_new_zipfile_serialization=is_new)
    assert not path.exists()
    undo()
    torch.save(torch.ones(2), path)
    assert torch.load(path).equal(torch.ones(2))
