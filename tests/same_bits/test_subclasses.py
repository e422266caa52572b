"""Tensor subclasses of every kind: the same bits, counted bytes, and one line in the log for what is kept."""

from __future__ import annotations

import gc
import logging
import weakref
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.nested import nested_tensor_from_jagged
from torch.utils._pytree import tree_map_only

from tests.runtime.parts import running_session
from tests.same_bits.judge import DECISIONS, Scope, Step, assert_same_bits, differences, plain_outcome, run, state_of
from torchdelta import Config, MemoryBudget
from torchdelta._torch.storages import storage_address
from torchdelta.runtime.record.scan import scan_storages
from torchdelta.runtime.state.kinds import inner_tensors
from torchdelta.runtime.state.ledger import Ledger

if TYPE_CHECKING:
    from collections.abc import Callable


class Quantised(torch.Tensor):
    """An int8 weight with a scale a row, dequantised where it is used, as torchao's are."""

    @staticmethod
    def __new__(cls, content: torch.Tensor, scale: torch.Tensor) -> Any:
        """Make the hollow outer tensor."""
        return torch.Tensor._make_wrapper_subclass(cls, content.shape, dtype=scale.dtype)

    def __init__(self, content: torch.Tensor, scale: torch.Tensor) -> None:
        self.content = content
        self.scale = scale

    @classmethod
    def of(cls, weight: torch.Tensor) -> Quantised:
        """Quantise."""
        scale = weight.abs().amax(1, keepdim=True) / 127
        return cls((weight / scale).round().to(torch.int8), scale)

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        """Name what is inside."""
        return ["content", "scale"], None

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Dequantise for a product; move, copy and transpose as it is."""
        del types
        if func in (torch.ops.aten.detach.default, torch.ops.aten.clone.default, torch.ops.aten.t.default):
            first = args[0]
            scale = first.scale.t() if func is torch.ops.aten.t.default else func(first.scale)
            return cls(func(first.content), scale)
        dequantised = tree_map_only(
            Quantised, lambda weight: weight.content.to(weight.scale.dtype) * weight.scale, args
        )
        return func(*dequantised, **(kwargs or {}))


class Logged(torch.Tensor):
    """A wrapper that notes the ops which it passes on."""

    seen: list[str] = []  # noqa: RUF012 - a log

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Any:
        """Make the hollow outer tensor."""
        return torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, strides=inner.stride(), dtype=inner.dtype, requires_grad=inner.requires_grad
        )

    def __init__(self, inner: torch.Tensor) -> None:
        self.inner = inner.detach()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Note, unwrap, run, wrap."""
        del types
        Logged.seen.append(str(func))
        args, kwargs = tree_map_only(Logged, lambda tensor: tensor.inner, (args, kwargs or {}))
        return tree_map_only(torch.Tensor, Logged, func(*args, **kwargs))


class Named(torch.Tensor):
    """Another class, nothing more."""


class Annotated(torch.Tensor):
    """Carries attributes."""


class Counting(torch.Tensor):
    """Overrides `__torch_function__` alone."""

    num_calls = 0

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count, and go on."""
        Counting.num_calls += 1
        return super().__torch_function__(func, types, args, kwargs)


class Weight(nn.Parameter):
    """A parameter of another class."""


class Adapted(nn.Module):
    """A frozen quantised layer with a trained adapter beside it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(Quantised.of(torch.randn(width, width) / width**0.5), requires_grad=False)
        self.down, self.up = nn.Linear(width, 8, bias=False), nn.Linear(8, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Add the adapter's part."""
        return nn.functional.linear(x, self.weight) + self.up(self.down(x))


def adapters(scope: Scope) -> dict[str, Any]:
    """Train adapters beside quantised weights."""
    model = nn.Sequential(*(nn.Sequential(Adapted(64), nn.GELU(), nn.Dropout(0.1)) for _ in range(4)))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    x = torch.randn(256, 64)
    losses = []
    with scope():
        for _ in range(3):
            optimizer.zero_grad()
            loss = model(x).pow(2).mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
    return {"losses": losses, "trained": trained, "gradients": [parameter.grad for parameter in trained]}


def logged(scope: Scope) -> dict[str, Any]:
    """Train through a wrapper that wraps its results too."""
    model = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 32), nn.Dropout(0.2), nn.Linear(32, 1))
    x = torch.randn(64, 32)
    with scope():
        for _ in range(2):
            loss = model(Logged(x)).sin().sum()
            loss.backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    assert all(isinstance(gradient, Logged) for gradient in gradients)
    return {"gradients": [gradient.inner for gradient in gradients], "loss": loss.inner}


def dressed(dress: Callable[[torch.Tensor], torch.Tensor]) -> Step:
    """Make a step whose activations are all of another class."""

    def step(scope: Scope) -> dict[str, Any]:
        model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.LayerNorm(64), nn.Dropout(0.2), nn.Linear(64, 32))
        x = dress(torch.randn(64, 32))
        with scope():
            for _ in range(2):
                hidden = model(x)
                (hidden.exp() * hidden.sigmoid()).mean().as_subclass(torch.Tensor).backward()
        return {"gradients": [torch.Tensor(parameter.grad) for parameter in model.parameters()]}

    return step


def annotated(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor that carries an attribute."""
    tensor = tensor.as_subclass(Annotated)
    tensor.note = "mine"
    return tensor


def parameters_of_a_class(scope: Scope) -> dict[str, Any]:
    """Train a module whose parameters are of a class of their own."""
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32))
    for layer in (model[0], model[2]):
        layer.weight = Weight(layer.weight.detach())
        layer.bias = nn.Parameter(torch.Tensor._make_subclass(Named, layer.bias.detach()))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    x = torch.randn(64, 32)
    with scope():
        for _ in range(2):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
    return {name: torch.Tensor(parameter.detach()) for name, parameter in model.named_parameters()}


def jagged(scope: Scope) -> dict[str, Any]:
    """Train on rows of different lengths."""
    linear = nn.Linear(32, 64)
    values, offsets = torch.randn(60, 32), torch.tensor([0, 10, 35, 60])
    with scope():
        for _ in range(2):
            rows = nested_tensor_from_jagged(values, offsets)
            hidden = nn.functional.gelu(linear(rows)) * 2
            hidden.sin().values().sum().backward()
    return state_of(linear)


def nested(scope: Scope) -> dict[str, Any]:
    """Train on nested tensors of the older kind, which are a C++ matter."""
    linear = nn.Linear(32, 64)
    parts = [torch.randn(10, 32), torch.randn(20, 32)]
    with scope():
        for _ in range(2):
            rows = torch.nested.nested_tensor(parts, layout=torch.strided)
            hidden = torch.nested.to_padded_tensor(linear(rows).relu(), 0.0)
            (hidden * hidden.exp()).sum().backward()
    return state_of(linear)


def masked(scope: Scope) -> dict[str, Any]:
    """Train through a MaskedTensor."""
    from torch.masked import masked_tensor

    content, mask = torch.randn(64, 64), torch.rand(64, 64) > 0.5
    with scope():
        weight = masked_tensor(content, mask, requires_grad=True)
        for _ in range(2):
            (weight * weight).exp().sum().backward()
    return {"grad": weight.grad.get_data()}


STEPS: dict[str, Step] = {
    "adapters": adapters,
    "logged": logged,
    "named": dressed(lambda tensor: tensor.as_subclass(Named)),
    "make_subclass": dressed(lambda tensor: torch.Tensor._make_subclass(Named, tensor)),
    "annotated": dressed(annotated),
    "torch_function": dressed(lambda tensor: tensor.as_subclass(Counting)),
    "parameters": parameters_of_a_class,
    "jagged": jagged,
    "nested": nested,
    "masked": masked,
}


@pytest.mark.filterwarnings(
    "ignore:The PyTorch API of (nested tensors|MaskedTensors):UserWarning",
    "ignore:It is not recommended to create a MaskedTensor:UserWarning",
)
@pytest.mark.parametrize("name", STEPS)
def test_same_bits(name: str) -> None:
    """Whatever class its tensors have, a step gives the plain run's bits."""
    assert_same_bits(STEPS[name])


@pytest.mark.parametrize("name", ["adapters", "named", "torch_function"])
def test_same_bits_under_pressure(name: str) -> None:
    """A budget holds with subclasses in the model, and real evictions change no bit."""
    budgets: list[MemoryBudget] = []

    def opened(size: int | str) -> Scope:
        def scope() -> MemoryBudget:
            budgets.append(MemoryBudget(size, Config(tier="memory")))
            return budgets[-1]

        return scope

    step = STEPS[name]
    expected = plain_outcome(step)
    run(step, opened("1TiB"))
    peak_bytes = budgets[-1].summary().peak_bytes
    found = differences(expected, run(step, opened(int(peak_bytes * 0.85))))
    summary = budgets[-1].summary()
    assert not [difference for difference in found if "leaked" not in difference]
    assert summary.swapped_out_bytes + summary.recomputed_bytes > 0
    assert summary.peak_bytes <= summary.budget_bytes


def test_activations_of_another_class_leave() -> None:
    """A class without ops of its own is no reason to keep: what autograd saves of it leaves like any other."""
    budget = MemoryBudget("1TiB", Config(decisions="swap", tier="memory"))
    run(STEPS["named"], lambda: budget)
    plain = MemoryBudget("1TiB", Config(decisions="swap", tier="memory"))
    run(dressed(lambda tensor: tensor), lambda: plain)
    assert budget.summary().swapped_out_bytes == plain.summary().swapped_out_bytes > 0


@pytest.mark.parametrize("decisions", DECISIONS.values())
def test_class_and_attributes_come_back(decisions: Any) -> None:
    """A custom Function that saves tensors of a class finds them as they were."""
    found: list[Any] = []

    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x, annotated(torch.ones(8192)), torch.ones(8192).as_subclass(Named))
            return x.as_subclass(torch.Tensor) ** 2

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> Any:
            found.extend(ctx.saved_tensors)
            return gradient * 2 * ctx.saved_tensors[0].as_subclass(torch.Tensor)

    x = torch.ones(8192, requires_grad=True)
    with MemoryBudget("1TiB", Config(decisions=decisions, tier="memory")):
        Square.apply(x.as_subclass(Named) * 2).sum().backward()
    assert [type(tensor) for tensor in found] == [Named, Annotated, Named]
    assert found[1].note == "mine"


def test_said_once_a_class(caplog: pytest.LogCaptureFixture) -> None:
    """One line for each class that is kept, in each scope; none for a class that is handled like a plain tensor."""
    for _ in range(2):
        caplog.clear()
        with caplog.at_level(logging.INFO, "torchdelta"):
            run(logged, lambda: MemoryBudget("1TiB"))
            run(STEPS["named"], lambda: MemoryBudget("1TiB"))
            run(STEPS["annotated"], lambda: MemoryBudget("1TiB"))
        lines = [record.getMessage() for record in caplog.records if "subclass" in record.getMessage()]
        assert lines == [
            "tensor subclass Logged runs its own ops: its saved tensors stay on the device",
            "tensor subclass Annotated carries attributes: its saved tensors stay on the device",
        ]


def test_a_changed_subclass_is_an_error() -> None:
    """A saved wrapper that was written in place raises what eager raises; hooks switch autograd's own check off."""

    def step(scope: Scope) -> dict[str, Any]:
        x = Logged(torch.ones(64).requires_grad_())
        with scope():
            y = x.exp()
            z = (y * y).sum()
            with torch.no_grad():
                y.add_(1)
            z.backward()
        return {}

    expected = plain_outcome(step)
    assert expected.raised is RuntimeError
    for decisions in DECISIONS.values():
        ours = run(step, lambda decisions=decisions: MemoryBudget("1TiB", Config(decisions=decisions, tier="memory")))
        assert ours.raised is RuntimeError
        assert "modified by an inplace operation" in ours.message


def test_a_graph_that_is_never_run_backward_dies() -> None:
    """A node that saves its own output of a class must not hold its own graph."""
    for dress in (Logged, lambda tensor: tensor.as_subclass(Named), annotated):
        with MemoryBudget("1TiB", Config(decisions="keep", tier="memory")):
            x = dress(torch.ones(64)).requires_grad_()
            y = x.exp()
            inner = weakref.ref(next(inner_tensors(y)).untyped_storage())
            del y
            gc.collect()
            assert inner() is None


def test_bytes_inside_a_wrapper_are_counted() -> None:
    """The plain tensors inside count, the hollow outer storage does not, and both are gone when they die."""
    gc.collect()
    with MemoryBudget("1TiB"):
        ledger = running_session().ledger
        before_bytes = ledger.usage.live_bytes
        x = Logged(torch.ones(1000).requires_grad_())
        y = x * 2
        assert ledger.usage.live_bytes - before_bytes == 2 * 4000
        y.sum().backward()
        del y
        assert ledger.usage.live_bytes - before_bytes == 2 * 4000  # x and its gradient
        del x
        gc.collect()
        assert ledger.usage.live_bytes == before_bytes


def test_bytes_inside_a_wrapper_are_found() -> None:
    """The scan of a scope that opens finds what a wrapper and its gradient hold, also where the collector does not."""
    x = Logged(torch.ones(1000).requires_grad_())
    (x * 2).sum().backward()
    gc.collect()
    gc.freeze()
    outer = Logged(x.inner)
    outer.grad = x.grad
    ledger = Ledger("cpu")
    assert scan_storages(ledger) == 4000
    gc.unfreeze()
    fresh = Ledger("cpu")
    scan_storages(fresh)
    assert {storage_address(x.inner), storage_address(x.grad.inner)} <= fresh.records.keys()
    del outer


def test_shapes_alone_take_no_room() -> None:
    """Ops on fake tensors of somebody else (a sharding propagation, say) are neither counted nor given room."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with MemoryBudget("1GiB"):
        with FakeTensorMode():
            huge = torch.empty(2**32)
            (huge * 2).sum()
        assert running_session().ledger.usage.peak_bytes < 2**30
        small = torch.empty(64) * 2
    assert small.shape == (64,)


def test_modes_below_still_see_a_subclass() -> None:
    """A mode that a user has put on before the scope sees each op on a subclass, as without it."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Names(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[str] = []

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.seen += [str(func)] if types else []
            return func(*args, **(kwargs or {}))

    def names(scope: Scope) -> list[str]:
        x = Logged(torch.ones(64))
        with Names() as mode, scope():
            x.sin().exp()
        return mode.seen

    plain = names(lambda: MemoryBudget("1TiB", Config(decisions="keep")))
    assert plain == ["aten.sin.default", "aten.exp.default"]
