"""The contract with torch: modes and hooks: their stacks, and who sees which op.

A torch release that changes one fails here, by name.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from tests.torch_contract.names import Names
from torchdelta._torch.modes import (
    BelowAutograd,
    Quietly,
    autocast_inside,
    enter_lowest,
    is_autocast_outside,
    is_in_kernel,
    is_packing_by_others,
    leave_stack,
    mode_stack,
    num_modes,
    outside_inference_mode,
    pop_mode,
    push_mode,
    remove_ended_modes,
    remove_mode,
    remove_saved_hooks,
    resolving_views,
    top_mode,
    without_mode,
    without_saved_hooks,
)
from torchdelta._torch.ops import HigherOrderOperator, OpOverload, let_higher_order_pass


def test_stack_of_modes() -> None:
    """Push, pop, count and look: the same stack that `with mode` uses."""
    outer, inner = Names(), Names()
    with outer:
        assert num_modes() == 1
        assert top_mode() is outer
        push_mode(inner)
        assert mode_stack() == [outer, inner]
        assert top_mode() is inner
        torch.zeros(2)
        assert pop_mode() is inner
        assert mode_stack() == [outer]
    assert inner.seen == ["aten.zeros.default"]
    assert outer.seen == ["aten.zeros.default"]
    assert num_modes() == 0
    assert top_mode() is None


@pytest.mark.parametrize("position", [0, 1, 2])
def test_without_mode(position: int) -> None:
    """One mode is taken out of the stack, wherever it is, and put back in its place, after an exception too."""
    modes = [Names(), Names(), Names()]
    with modes[0], modes[1], modes[2]:
        with pytest.raises(KeyError), without_mode(modes[position]) as found:  # noqa: PT012
            assert found
            assert mode_stack() == [mode for mode in modes if mode is not modes[position]]
            raise KeyError
        assert mode_stack() == modes
        with without_mode(Names()) as found:
            assert not found
            assert mode_stack() == modes
        with without_mode(modes[position]):
            modes[position].is_over = True
        left = [mode for mode in modes if mode is not modes[position]]
        assert mode_stack() == left
        push_mode(modes[position])  # `with` takes off what it has put on
        remove_ended_modes()
        assert mode_stack() == left
        push_mode(modes[position])


@pytest.mark.parametrize("position", [0, 1, 2])
def test_remove_mode(position: int) -> None:
    """One mode is gone for good, and the others keep their order; one that is not there changes nothing."""
    modes = [Names(), Names(), Names()]
    for mode in modes:
        push_mode(mode)
    remove_mode(modes[position])
    left = [mode for mode in modes if mode is not modes[position]]
    assert mode_stack() == left
    remove_mode(modes[position])
    assert mode_stack() == left
    while num_modes():
        pop_mode()


def test_enter_lowest_and_leave_stack() -> None:
    """A mode is entered below those that are on, and sees the ops that they make; it ends from wherever it stands."""

    class Doubles(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            del types
            return func(*args, **(kwargs or {})) * 2

    lowest, above = Names(), Doubles()
    with above:
        enter_lowest(lowest)
        assert mode_stack() == [lowest, above]
        torch.ones(2)
        leave_stack(lowest)
        assert mode_stack() == [above]
        leave_stack(lowest)
        assert mode_stack() == [above]
    assert lowest.seen == ["aten.ones.default", "aten.mul.Tensor"]
    assert mode_stack() == []


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
    remove_saved_hooks(*pairs[position])
    x = torch.ones(2, requires_grad=True)
    x.sin()
    remove_saved_hooks(*pairs[1 - position])
    x.sin()
    remove_saved_hooks(*pairs[0])
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
        with without_saved_hooks():
            x.sin()
        assert calls == []
        x.sin()
    assert calls == ["inner"]
    x.sin()
    assert calls == ["inner"]


def test_op_overloads() -> None:
    """An op has a schema with aliases, tags, a namespace, a fast call, and room for an attribute."""
    func = torch.ops.aten.add_.Tensor
    assert isinstance(func, OpOverload)
    assert func._schema.arguments[0].alias_info is not None
    assert func._schema.arguments[0].alias_info.is_write
    assert func.namespace == "aten"
    assert func._op(torch.ones(1), 1).item() == 2
    assert torch.Tag.nondeterministic_seeded in torch.ops.aten.bernoulli.default.tags
    func._torchdelta_contract = 1  # pyright: ignore[reportAttributeAccessIssue]
    assert torch.ops.aten.add_.Tensor._torchdelta_contract == 1
    del func._torchdelta_contract


def test_dispatch_modes_have_the_hooks_for_compilation() -> None:
    """The two class methods that the recorder overrides exist in torch under these names."""
    assert inspect.ismethod(TorchDispatchMode.ignore_compile_internals)
    assert inspect.ismethod(TorchDispatchMode._should_skip_dynamo)


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


def test_autocast_around_a_dispatch_mode() -> None:
    """Inside a mode autocast looks off; what it is outside can be asked, and it can be made to act inside."""
    found: list[tuple[bool, bool, torch.dtype]] = []

    class Asks(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            del types
            if "relu" in str(func):
                with autocast_inside("cpu"):
                    dtype = torch.mm(args[0], args[0]).dtype
                found.append((torch.is_autocast_enabled("cpu"), is_autocast_outside("cpu"), dtype))
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


def test_resolving_views() -> None:
    """Inside a mode the bits of conjugate and negative views are not looked at, unless the context says so."""
    found: dict[str, bool] = {}
    x = torch.randn(3, 3, dtype=torch.complex64)
    expected = -x.imag

    class Asks(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            del types
            if "relu" in str(func):
                negative = x.conj().imag
                assert negative.is_neg()
                found["without"] = torch.equal(negative * 1, expected)
                with resolving_views():
                    found["within"] = torch.equal(negative * 1, expected)
                    found["conjugate"] = torch.equal((x.conj() * 1).imag, expected)
            return func(*args, **(kwargs or {}))

    with Asks():
        torch.relu(torch.ones(1))
    assert found == {"without": False, "within": True, "conjugate": True}


def test_is_in_kernel() -> None:
    """Below autograd, as kernels run; not in the Python of a dispatch mode, nor in the program's own code."""
    found: list[bool] = []

    class Asks(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            del types
            found.append(is_in_kernel())
            return func(*args, **(kwargs or {}))

    x = torch.ones(2, requires_grad=True)
    with Asks():
        x.exp()
    assert found
    assert not any(found)
    for context in (torch.no_grad(), torch.inference_mode(), torch.autocast("cpu")):
        with context:
            assert not is_in_kernel()
    with BelowAutograd():
        assert is_in_kernel()
    assert not is_in_kernel()


def test_is_packing_by_others() -> None:
    """While an op calls a pack hook that was put over ours: a function, a method, a partial or an object."""
    found: list[bool] = []

    def ours(tensor: torch.Tensor) -> torch.Tensor:
        found.append(is_packing_by_others(ours))
        return tensor

    class Theirs:
        def pack(self, tensor: torch.Tensor) -> torch.Tensor:
            found.append(is_packing_by_others(ours))
            return tensor

        __call__ = pack

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    x = torch.ones(2, requires_grad=True)
    theirs = Theirs()
    with saved_tensors_hooks(ours, keep):
        x.exp()
        assert not is_packing_by_others(ours)
        for pack in (theirs, theirs.pack, functools.partial(theirs.pack), functools.partial(Theirs.pack, theirs)):
            with saved_tensors_hooks(pack, keep):
                assert not is_packing_by_others(ours)
                x.exp()
    assert found == [False, True, True, True, True]
    assert not is_packing_by_others(ours)


def test_outside_inference_mode() -> None:
    """Tensors that are made there have versions; elsewhere the context does nothing."""
    with torch.inference_mode():
        with outside_inference_mode():
            assert not torch.is_inference_mode_enabled()
            assert not torch.ones(2).is_inference()
        assert torch.is_inference_mode_enabled()
    with torch.no_grad(), outside_inference_mode():
        assert not torch.is_grad_enabled()


def test_quietly_in_inference_mode() -> None:
    """Modes see what follows it, in inference mode too, and the keys are those from before."""
    is_excluded = torch._C._dispatch_tls_is_dispatch_key_excluded
    keys = [torch._C.DispatchKey.Python, torch._C.DispatchKey.PythonTLSSnapshot, torch._C.DispatchKey.AutocastCPU]
    seen = Names()
    with torch.autocast("cpu"), seen, torch.inference_mode():
        before = [is_excluded(key) for key in keys]
        with Quietly():
            assert not torch.is_inference_mode_enabled()
            torch.zeros(2)
        assert [is_excluded(key) for key in keys] == before
        assert torch.is_inference_mode_enabled()
        torch.ones(2)
    assert seen.seen == ["aten.ones.default"]


def test_quietly_in_a_transform() -> None:
    """A random op runs there, whatever a transform allows, and the transform goes on afterwards."""
    state = torch.get_rng_state()

    def body(x: torch.Tensor) -> torch.Tensor:
        with Quietly():
            drawn.append(torch.rand(3))
        return x * 2

    drawn: list[torch.Tensor] = []
    x = torch.arange(4.0)
    assert torch.equal(torch.func.vmap(body)(x), x * 2)
    torch.set_rng_state(state)
    assert torch.equal(drawn[0], torch.rand(3))


def test_higher_order_ops_pass_a_dispatch_key() -> None:
    """Those that exist and those that are made later; without it, torch has no kernel for them there."""
    let_higher_order_pass("Fake")
    let_higher_order_pass("Fake")

    class Called(HigherOrderOperator):  # type: ignore[misc, valid-type]
        def __call__(self, *args: Any) -> Any:
            return super().__call__(*args)

    assert issubclass(type(torch.ops.higher_order.cond), HigherOrderOperator)
    key = torch._C._parse_dispatch_key("Fake")
    assert not Called("torchdelta_called").non_fallthrough_keys.has(key)
    assert not torch.ops.higher_order.cond.non_fallthrough_keys.has(key)
    assert torch.ops.higher_order.cond.non_fallthrough_keys.has(torch._C.DispatchKey.CPU)
