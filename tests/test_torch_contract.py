"""The contract with torch: what each private API that `_torch.py` uses must do.

A torch release that changes one fails here, by name.
"""

from __future__ import annotations

import gc
import inspect
import subprocess
import sys
import weakref
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from torchdelta import _torch, _torch_device, _torch_symbolic


class Names(TorchDispatchMode):
    """Notes the names of the ops that it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Note, and run."""
        del types
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


def test_storage_address() -> None:
    """The address is the `_cdata` of the storage, and asking makes no storage object."""
    x = torch.zeros(4)
    address = _torch.storage_address(x)
    assert _torch.storage_num_holders(address) == 1
    assert address == x.untyped_storage()._cdata
    assert _torch.storage_address(x[2:]) == address
    assert _torch.storage_address(torch.zeros(4)) != address


def test_storage_address_of_tensors_without_a_storage() -> None:
    """It raises RuntimeError (or its subclass NotImplementedError), which the ledger expects."""
    with pytest.raises(RuntimeError):
        _torch.storage_address(torch.eye(2).to_sparse())


def test_storage_num_holders() -> None:
    """Each tensor on a storage holds it once, and so does its Python object."""
    x = torch.zeros(4)
    address = _torch.storage_address(x)
    alias = x.detach()
    assert _torch.storage_num_holders(address) == 2
    storage = x.untyped_storage()
    assert _torch.storage_num_holders(address) == 3
    del alias, storage
    gc.collect()
    assert _torch.storage_num_holders(address) <= 2


def test_storage_at() -> None:
    """A living storage is found by its address, as the object that it has already."""
    x = torch.arange(4.0)
    found = _torch.storage_at(_torch.storage_address(x))
    assert found.nbytes() == x.nbytes
    assert found.data_ptr() == x.data_ptr()
    assert found is x.untyped_storage()


def test_storage_over() -> None:
    """It reads and writes the memory that it was given, owns nothing, and tells of its own death."""
    x = torch.arange(8, dtype=torch.uint8)
    storage = _torch.storage_over(x.data_ptr() + 2, 4, torch.device("cpu"))
    assert (storage.nbytes(), storage.data_ptr()) == (4, x.data_ptr() + 2)
    died: list[int] = []
    weakref.finalize(storage, died.append, 1)
    view = torch.empty(0, dtype=torch.uint8).set_(storage, 0, (4,), (1,))
    del storage
    view.fill_(9)
    assert x.tolist() == [0, 1, 9, 9, 9, 9, 6, 7]
    assert not died
    del view
    assert died


def test_storage_object_lives_as_long_as_its_storage() -> None:
    """A weak reference to it tells of the storage's death, not of the last Python name's."""
    died: list[int] = []
    x = torch.zeros(4)
    reference = weakref.ref(x.untyped_storage(), lambda _: died.append(1))
    gc.collect()
    assert reference() is x.untyped_storage()
    y = x.view(2, 2)
    del x
    gc.collect()
    assert not died
    del y
    gc.collect()
    assert died == [1]


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


def test_no_dispatch() -> None:
    """No Python dispatch mode sees what runs inside."""
    with Names() as names:
        with _torch.NoDispatch():
            x = torch.zeros(2) + 1
        seen_inside = list(names.seen)
        x = x * 2
    assert seen_inside == []
    assert names.seen == ["aten.mul.Tensor"]


def test_no_function() -> None:
    """No function mode and no `__torch_function__` sees what runs inside."""

    class Refuses(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            raise AssertionError(func)

    with Refuses(), _torch.NoFunction():
        assert (torch.zeros(2) + 1).sum().item() == 2


def test_below_autograd() -> None:
    """No graph is made inside, whatever the grad mode says."""
    x = torch.ones(2, requires_grad=True)
    with _torch.BelowAutograd(), torch.enable_grad():
        y = torch.ops.aten.mul.Tensor(x, 2)
    assert y.grad_fn is None
    assert not y.requires_grad


def test_autocast_keys() -> None:
    """Excluded, an op runs in the dtypes of its arguments also where autocast is on."""
    a = torch.randn(4, 4)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.mm(a, a).dtype is torch.bfloat16
        with _torch.ExcludeKeys(_torch.AUTOCAST_KEYS):
            assert torch.mm(a, a).dtype is torch.float32


def test_quietly() -> None:
    """All of it together.

    Unseen, without a graph, uncast, and everything as before afterwards, after an exception too.
    """
    x = torch.randn(4, 4, requires_grad=True)
    with Names() as names, torch.autocast("cpu", torch.bfloat16):
        with _torch.Quietly():
            y = torch.mm(x, x)
            assert not torch.is_grad_enabled()
        with pytest.raises(KeyError), _torch.Quietly():
            raise KeyError
        assert torch.is_grad_enabled()
        assert names.seen == []
    assert y.dtype is torch.float32
    assert not y.requires_grad
    with torch.no_grad():
        with _torch.Quietly():
            pass
        assert not torch.is_grad_enabled()


def test_set_grad_enabled() -> None:
    """It sets the mode that kernels read."""
    try:
        _torch.set_grad_enabled(False)
        assert not torch.is_grad_enabled()
    finally:
        _torch.set_grad_enabled(True)
    assert torch.is_grad_enabled()


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


def test_stack_of_modes() -> None:
    """Push, pop, count and look: the same stack that `with mode` uses."""
    outer, inner = Names(), Names()
    with outer:
        assert _torch.num_modes() == 1
        _torch.push_mode(inner)
        assert _torch.mode_stack() == [outer, inner]
        torch.zeros(2)
        assert _torch.pop_mode() is inner
        assert _torch.mode_stack() == [outer]
    assert inner.seen == ["aten.zeros.default"]
    assert outer.seen == ["aten.zeros.default"]
    assert _torch.num_modes() == 0


@pytest.mark.parametrize("position", [0, 1, 2])
def test_without_mode(position: int) -> None:
    """One mode is taken out of the stack, wherever it is, and put back in its place, after an exception too."""
    modes = [Names(), Names(), Names()]
    with modes[0], modes[1], modes[2]:
        with pytest.raises(KeyError), _torch.without_mode(modes[position]) as found:  # noqa: PT012
            assert found
            assert _torch.mode_stack() == [mode for mode in modes if mode is not modes[position]]
            raise KeyError
        assert _torch.mode_stack() == modes
        with _torch.without_mode(Names()) as found:
            assert not found
            assert _torch.mode_stack() == modes


@pytest.mark.parametrize("position", [0, 1, 2])
def test_remove_mode(position: int) -> None:
    """One mode is gone for good, and the others keep their order; one that is not there changes nothing."""
    modes = [Names(), Names(), Names()]
    for mode in modes:
        _torch.push_mode(mode)
    _torch.remove_mode(modes[position])
    left = [mode for mode in modes if mode is not modes[position]]
    assert _torch.mode_stack() == left
    _torch.remove_mode(modes[position])
    assert _torch.mode_stack() == left
    while _torch.num_modes():
        _torch.pop_mode()


@pytest.mark.parametrize("position", [0, 1])
def test_remove_saved_hooks(position: int) -> None:
    """One pair is gone for good, from below another one too."""
    calls: list[str] = []

    def hooks(name: str) -> tuple[Any, Any]:
        def pack(tensor: torch.Tensor) -> torch.Tensor:
            calls.append(name)
            return tensor

        return pack, lambda tensor: tensor

    pairs = [hooks("outer"), hooks("inner")]
    for pair in pairs:
        torch.autograd.graph.saved_tensors_hooks(*pair).__enter__()
    _torch.remove_saved_hooks(*pairs[position])
    x = torch.ones(2, requires_grad=True)
    x.sin()
    _torch.remove_saved_hooks(*pairs[1 - position])
    x.sin()
    _torch.remove_saved_hooks(*pairs[0])
    assert calls == [("inner", "outer")[position]]


def test_without_saved_hooks() -> None:
    """All hooks are off inside and on afterwards, in order."""
    calls: list[str] = []

    def hooks(name: str) -> Any:
        def pack(tensor: torch.Tensor) -> torch.Tensor:
            calls.append(name)
            return tensor

        return torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)

    x = torch.ones(2, requires_grad=True)
    with hooks("outer"), hooks("inner"):
        with _torch.without_saved_hooks():
            x.sin()
        assert calls == []
        x.sin()
    assert calls == ["inner"]
    x.sin()
    assert calls == ["inner"]


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


def test_numeric_environment() -> None:
    """What kernels read is read, and set again."""
    before = _torch_device.numeric_environment()
    changed = (torch.float64, not before[1], True, "medium", before[4])
    try:
        _torch_device.set_numeric_environment(changed)
        assert torch.get_default_dtype() is torch.float64
        assert torch.backends.mkldnn.enabled == changed[1]
        assert torch.are_deterministic_algorithms_enabled()
        assert torch.get_float32_matmul_precision() == "medium"
        assert _torch_device.numeric_environment() == changed
    finally:
        _torch_device.set_numeric_environment(before)
    assert _torch_device.numeric_environment() == before


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


def test_views_with_bits() -> None:
    """Conjugate and negative views share their storage."""
    x = torch.tensor([1 + 2j])
    assert _torch.conj(x).is_conj()
    assert _torch.neg_view(x.real).is_neg()
    assert _torch.storage_address(_torch.conj(x)) == _torch.storage_address(x)


def test_op_overloads() -> None:
    """An op has a schema with aliases, tags, a namespace, a fast call, and room for an attribute."""
    func = torch.ops.aten.add_.Tensor
    assert isinstance(func, _torch.OpOverload)
    assert func._schema.arguments[0].alias_info is not None
    assert func._schema.arguments[0].alias_info.is_write
    assert func.namespace == "aten"
    assert func._op(torch.ones(1), 1).item() == 2
    assert torch.Tag.nondeterministic_seeded in torch.ops.aten.bernoulli.default.tags
    func._torchdelta_contract = 1  # pyright: ignore[reportAttributeAccessIssue]
    assert torch.ops.aten.add_.Tensor._torchdelta_contract == 1
    del func._torchdelta_contract


def test_fake_tensors() -> None:
    """A meta tensor becomes a fake one that says it is on the device, and costs nothing."""
    mode = _torch.FakeTensorMode(allow_non_fake_inputs=True)
    fake = _torch.fake_view(mode, torch.empty(4, 4, device="meta"), "cpu")
    assert isinstance(fake, _torch.FakeTensor)
    assert fake.device.type == "cpu"
    with mode:
        made = fake @ torch.ones(4, 2)
    assert isinstance(made, _torch.FakeTensor)
    assert made.shape == (4, 2)
    assert made.untyped_storage().device.type == "meta"


def test_unknown_names_are_attribute_errors() -> None:
    """Names that are made at their first use are the only ones."""
    with pytest.raises(AttributeError):
        _ = _torch.NoSuchName


def test_dispatch_modes_have_the_hooks_for_compilation() -> None:
    """The two class methods that the recorder overrides exist in torch under these names."""
    assert inspect.ismethod(TorchDispatchMode.ignore_compile_internals)
    assert inspect.ismethod(TorchDispatchMode._should_skip_dynamo)


def test_fake_mode() -> None:
    """The fake-tensor mode that is on is found, also below a mode that asks from inside an op."""
    found: list[Any] = []

    class Asks(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            del types
            found.append((_torch.fake_mode(), _torch.num_modes()))
            return func(*args, **(kwargs or {}))

    assert _torch.fake_mode() is None
    with Asks():
        torch.ones(1)
        with _torch.FakeTensorMode() as mode:
            torch.ones(1)
    assert found == [(None, 0), (mode, 1)]


def test_an_op_that_a_mode_declines_goes_to_the_subclass_with_the_mode_on() -> None:
    """What a subclass runs inside is seen by the mode that returned NotImplemented; modes below miss the op itself."""

    class Wrapper(torch.Tensor):
        @staticmethod
        def __new__(cls, inner: torch.Tensor) -> Any:
            return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

        def __init__(self, inner: torch.Tensor) -> None:
            self.inner = inner

        @classmethod
        def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            del types
            return func(*(a.inner if isinstance(a, Wrapper) else a for a in args), **(kwargs or {}))

    class Declines(Names):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if types:
                self.seen.append("declined")
                return NotImplemented
            return super().__torch_dispatch__(func, types, args, kwargs)

    wrapper = Wrapper(torch.ones(3))
    assert wrapper.data_ptr() == 0  # a hollow storage
    with Names() as below, Declines() as mode:
        wrapper.sin()
    assert mode.seen == ["declined", "aten.sin.default"]
    assert below.seen == ["aten.sin.default"]


def test_patch_storage_resize() -> None:
    """Every resize of a storage from Python passes through the patch, of the older storages too, until it is undone."""
    sizes: list[int] = []

    def make(original: Any) -> Any:
        def resize_(storage: Any, size_bytes: int) -> Any:
            sizes.append(size_bytes)
            return original(storage, size_bytes)

        return resize_

    undo = _torch.patch_storage_resize(make)
    x = torch.ones(4)
    x.untyped_storage().resize_(0)
    x._typed_storage()._resize_(4)
    undo()
    x.untyped_storage().resize_(8)
    assert sizes == [0, 16]
    assert "resize_" not in vars(torch.UntypedStorage)


def test_autocast_around_a_dispatch_mode() -> None:
    """Inside a mode autocast looks off; what it is outside can be asked, and it can be made to act inside."""
    found: list[tuple[bool, bool, torch.dtype]] = []

    class Asks(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            del types
            if "relu" in str(func):
                with _torch.autocast_inside("cpu"):
                    dtype = torch.mm(args[0], args[0]).dtype
                found.append((torch.is_autocast_enabled("cpu"), _torch.is_autocast_outside("cpu"), dtype))
            return func(*args, **(kwargs or {}))

    x = torch.randn(3, 3)
    with torch.autocast("cpu", torch.bfloat16), Asks():
        torch.relu(x)
        with torch.autocast("cpu", enabled=False):
            torch.relu(x)
    with Asks():
        torch.relu(x)
    assert [outside for _, outside, _ in found] == [True, False, False]
    assert found[0] == (False, True, torch.bfloat16)


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


def test_numeric_environment_of_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """The switches that CUDA's kernels read are there in every build, are recorded, and can be set back."""
    monkeypatch.setattr(_torch_device, "reads_cuda_settings", True)
    before = _torch_device.numeric_environment()
    assert len(before) >= 5 + 1 + 5
    # Not through torch.backends: what tests of torch import freezes its flags for the whole process.
    torch._C._set_cudnn_benchmark(not torch._C._get_cudnn_benchmark())
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    changed = _torch_device.numeric_environment()
    assert changed != before
    _torch_device.set_numeric_environment(before)
    assert _torch_device.numeric_environment() == before
    _torch_device.set_numeric_environment(changed)
    assert _torch_device.numeric_environment() == changed
    _torch_device.set_numeric_environment(before)


def test_names_that_only_an_accelerator_can_run() -> None:
    """What is asked of accelerators exists by these names; the tests in accelerator/ call it."""
    assert callable(torch._C._accelerator_getDeviceStats)
    assert callable(torch._C._accelerator_resetPeakStats)
    assert not _torch_device.has_graph_trees() or "torch._inductor" in sys.modules
    assert _torch_device.default_generator_of(torch.device("cpu")) is torch.default_generator
    assert callable(torch.accelerator.current_stream)
    assert callable(torch.accelerator.set_stream)


def test_fake_mode_for_once() -> None:
    """It answers like any other, and torch remembers nothing of it."""
    before = len(_torch.FakeTensorMode.cache)
    with _torch.fake_mode_for_once():
        assert (torch.ones(17, 19) @ torch.ones(19, 23)).shape == (17, 23)
    assert len(_torch.FakeTensorMode.cache) == before
    with _torch.FakeTensorMode():
        torch.ones(17, 19) @ torch.ones(19, 23)
    assert len(_torch.FakeTensorMode.cache) > before


def test_current_node() -> None:
    """Within a backward it is the node that runs; outside of any there is none, or the last one."""
    seen: list[str] = []
    x = torch.ones(2, requires_grad=True)
    y = x.sin()
    y.register_hook(lambda _: seen.append(_torch.current_node()))
    y.sum().backward()
    assert seen == ["SinBackward0"]
    assert isinstance(_torch.current_node(), str)


def test_tensor_num_holders() -> None:
    """A second holder in C++ counts, a second Python name does not."""
    x = torch.zeros(2)
    alone = _torch.tensor_num_holders(x)
    same = x
    assert _torch.tensor_num_holders(same) == alone
    y = torch.ones(2, requires_grad=True) * x  # autograd keeps x itself
    assert _torch.tensor_num_holders(x) == alone + 1
    del y


def test_foreach_on_cpu() -> None:
    """Within it optimizers take the `_foreach_` ops on CPU; afterwards as before."""

    def names_of_a_step() -> list[str]:
        weight = torch.nn.Parameter(torch.ones(2))
        weight.grad = torch.ones(2)
        with Names() as names:
            torch.optim.SGD([weight], lr=0.1).step()
        return [name for name in names.seen if "_foreach_" in name]

    assert not names_of_a_step()
    with _torch_symbolic.foreach_on_cpu():
        assert names_of_a_step() == ["aten._foreach_add_.List"]
    assert not names_of_a_step()


def test_without_fake_mode() -> None:
    """Within it tensors are real, in the middle of a fake-tensor mode."""
    with _torch.FakeTensorMode():
        with _torch_symbolic.without_fake_mode():
            assert torch.ones(2).sum().item() == 2
        assert isinstance(torch.ones(2), _torch.FakeTensor)


def test_without_truncation() -> None:
    """Within it `trunc_normal_` needs no values; afterwards it keeps its bounds."""
    with _torch.FakeTensorMode(), _torch_symbolic.without_truncation():
        torch.nn.init.trunc_normal_(torch.nn.Parameter(torch.empty(4)), 0.0, 1.0, -0.5, 0.5)
    assert torch.nn.init.trunc_normal_(torch.empty(1000), 0.0, 1.0, -0.5, 0.5).abs().max() <= 0.5


def test_converting_fake_modules() -> None:
    """Within it fake modules change their dtype, and what is tied stays tied; afterwards all is as before."""
    before = torch.nn.Module._apply
    with _torch.FakeTensorMode(), _torch_symbolic.converting_fake_modules():
        model = torch.nn.Sequential(
            torch.nn.Embedding(4, 2), torch.nn.Linear(2, 4, bias=False), torch.nn.BatchNorm1d(4)
        )
        model[1].weight = model[0].weight
        model[0].weight.requires_grad_(requires_grad=False)
        model.to(torch.bfloat16).double()
        assert {p.dtype for p in (*model.parameters(), model[2].running_mean)} == {torch.float64}
        assert model[1].weight is model[0].weight
        assert [p.requires_grad for p in model.parameters()] == [False, True, True]
    assert torch.nn.Module._apply is before
