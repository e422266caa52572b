"""The contract with torch: private attributes of tensors, storages, modules and ops.

A torch release that changes one fails here, by name.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.torch_contract.names import Names
from torchdelta._torch.modes import TorchDispatchMode
from torchdelta._torch.modules import MODULE_CALL_CODE, children_of, is_built
from torchdelta._torch.ops import decompose, execute, is_composite, overload_of, returns_tensors, schema_of
from torchdelta._torch.storages import address_of, storage_address
from torchdelta._torch.tensors import (
    base_of,
    counted_version_of,
    is_zerotensor,
    post_accumulate_hooks_of,
    tensor_hooks_of,
    version_of,
)


def test_address_of_a_storage_object() -> None:
    """A storage object tells the address by which its tensors know the storage."""
    x = torch.zeros(4)
    assert address_of(x.untyped_storage()) == storage_address(x) == storage_address(x[2:])


def test_is_zerotensor() -> None:
    """Zeros that have no memory are told from zeros that have some."""
    assert is_zerotensor(torch._efficientzerotensor(3))
    assert not is_zerotensor(torch.zeros(3))


def test_base_of() -> None:
    """The base of a view of a view is no view; a tensor that is no view has none."""
    x = torch.zeros(4, 4)
    assert base_of(x[1:][1:]) is x
    assert base_of(x) is None


def test_counted_version_of() -> None:
    """A write in place counts one; an inference tensor does not count, and raises."""
    x = torch.zeros(2)
    before = counted_version_of(x)
    x.add_(1)
    assert counted_version_of(x) == version_of(x) == before + 1
    with torch.inference_mode(), pytest.raises(RuntimeError):
        counted_version_of(torch.zeros(2))


def test_post_accumulate_hooks_of() -> None:
    """A leaf has nothing until a hook is set on it."""
    x = torch.zeros(2, requires_grad=True)
    assert not post_accumulate_hooks_of(x)
    handle = x.register_post_accumulate_grad_hook(lambda _: None)
    hooks = post_accumulate_hooks_of(x)
    assert hooks is not None
    assert len(hooks) == 1
    handle.remove()
    assert not post_accumulate_hooks_of(x)


def test_tensor_hooks_of() -> None:
    """They run before prehooks of the node that accumulates, which see what they returned."""
    x, order = torch.zeros(2, requires_grad=True), []
    assert not tensor_hooks_of(x)
    node = torch.autograd.graph.get_gradient_edge(x).node
    node.register_prehook(lambda gradients: order.append(gradients[0].sum().item()))
    handle = x.register_hook(lambda gradient: gradient * 3)
    hooks = tensor_hooks_of(x)
    assert hooks is not None
    assert len(hooks) == 1
    x.sum().backward()
    assert order == [6.0]
    handle.remove()
    assert not tensor_hooks_of(x)


def test_children_of_modules() -> None:
    """A module tells whether it is built and which modules are right under it, empty places included."""
    inner = torch.nn.Linear(1, 1)
    outer = torch.nn.Sequential(inner)
    outer.register_module("nothing", None)
    assert list(children_of(outer)) == [inner, None]
    assert is_built(outer)
    assert not is_built(torch.nn.Linear.__new__(torch.nn.Linear))
    assert MODULE_CALL_CODE.co_varnames[0] == "self"


def test_schema_of() -> None:
    """A schema tells an op's name and what it writes."""
    schema = schema_of(torch.ops.aten.add_.Tensor)
    assert schema.name == "aten::add_"
    assert schema.is_mutable
    assert schema.arguments[0].alias_info.is_write


def test_overload_of() -> None:
    """The names in a schema lead to the overload; the default one has an empty name there."""
    for overload in (torch.ops.aten.add.Tensor, torch.ops.aten.exp.default):
        schema = schema_of(overload)
        assert overload_of(schema.name, schema.overload_name) is overload


def test_returns_tensors() -> None:
    """All that an op returns are tensors, and not lists of them or numbers."""
    aten = torch.ops.aten
    assert returns_tensors(aten.add.Tensor)
    assert returns_tensors(aten.native_batch_norm.default)
    assert not returns_tensors(aten.split.Tensor)
    assert not returns_tensors(aten._local_scalar_dense.default)


@pytest.mark.parametrize("inside", ["", "casts_inside", "conjugates_inside"])
def test_execute(inside: str) -> None:
    """From inside a mode an op runs for real, with its keywords, whatever has to act inside it."""
    facts: Any = SimpleNamespace(casts_inside=inside == "casts_inside", conjugates_inside=inside == "conjugates_inside")
    seen: list[str] = []

    class Runs(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            del types
            seen.append(str(func))
            return execute(func, facts, args, kwargs)

    x = torch.ones(2)
    with Runs():
        assert torch.add(x, x, alpha=2).tolist() == [3, 3]
        assert x.neg().tolist() == [-1, -1]
    assert seen.count("aten.add.Tensor") == seen.count("aten.neg.default") == 1


def test_modes_see_which_arguments_require_gradients() -> None:
    """A dispatch mode gets the tensors themselves, leaves and others, also inside of lists."""
    seen: list[tuple[str, list[bool]]] = []

    class Sees(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            del types
            flat = [item for argument in args for item in (argument if isinstance(argument, list) else [argument])]
            seen.append((str(func), [item.requires_grad for item in flat if isinstance(item, torch.Tensor)]))
            return func(*args, **(kwargs or {}))

    leaf, plain = torch.ones(2, requires_grad=True), torch.ones(2)
    with Sees():
        torch.cat([leaf * plain, plain]).sin()
    assert seen == [
        ("aten.mul.Tensor", [True, False]),
        ("aten.cat.default", [True, False]),
        ("aten.sin.default", [True]),
    ]


def test_composites() -> None:
    """A composite op runs as its parts, which the mode sees; an op with a kernel of its own is none."""
    aten = torch.ops.aten
    assert is_composite(aten.reshape.default)
    assert is_composite(aten.contiguous.default)
    assert not is_composite(aten.mul.Tensor)
    x, mode = torch.arange(6.0).reshape(2, 3).t(), Names()
    with torch.inference_mode():
        out = decompose(aten.reshape.default, mode, (x, [6]), None)
    assert torch.equal(out, x.reshape(6))
    assert "aten.clone.default" in mode.seen
    assert torch._C._len_torch_dispatch_stack() == 0
