"""A step on fake tensors is the step as plain torch runs it, and what cannot be traced is one clear line."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from torchdelta.cli.allocator_peak import AllocatorPeak
from torchdelta.errors import TraceError
from torchdelta.notices import warn_once
from torchdelta.trace.model import BEFORE_STEP, counts, load_curve
from torchdelta.trace.symbolic import trace_step
from torchdelta.trace.validate import validate


def mlp(batch_size: int = 4) -> tuple[nn.Module, torch.Tensor]:
    """Two layers and a ReLU in place."""
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(inplace=True), nn.Linear(32, 8)), torch.randn(batch_size, 16)


def test_a_small_step_op_by_op():
    """Ops, phases, modules, lives and saved tensors of a network that is small enough to know them."""
    trace = trace_step(mlp, batch_size=4, device="cpu", optimizer="sgd")
    validate(trace)
    assert trace.header.batch_size == 4
    assert [(op.name, op.phase, op.module) for op in trace.ops[:4]] == [
        ("aten.addmm.default", "forward", "0"),
        ("aten.relu_.default", "forward", "1"),
        ("aten.addmm.default", "forward", "2"),
        ("aten.sum.default", "forward", ""),
    ]
    assert {op.phase for op in trace.ops} == {"forward", "backward", "optimizer"}
    kinds = {kind: size for kind, size in counts(trace).bytes_by_kind.items() if size}
    parameters = 4 * (16 * 32 + 32 + 32 * 8 + 8)
    assert kinds["parameter"] == kinds["gradient"] == parameters
    assert kinds["input"] == 4 * 4 * 16
    # Autograd saved what the ReLU made, which lies in the storage that the first product made.
    saved = [buffer for buffer in trace.buffers if buffer.saved and buffer.birth_op != BEFORE_STEP]
    assert [(buffer.size_bytes, buffer.birth_op) for buffer in saved] == [(4 * 4 * 32, 1)]
    assert trace.buffers[trace.ops[0].writes[0]].storage_id == saved[0].storage_id


def test_costs_of_a_product():
    """FLOPs are two for each multiply-add, bytes those of what is read and written."""
    op = trace_step(mlp, batch_size=4, device="cpu", optimizer="none").ops[0]
    assert op.flops == 2 * 4 * 16 * 32
    assert op.dtype == "float32"
    assert op.moved_bytes == 4 * (32 + 4 * 16 + 16 * 32 + 4 * 32)


def test_weights_that_are_drawn_until_they_fit():
    """`trunc_normal_` looks at what it drew; a model of any size that is initialised so can be built."""

    def function() -> tuple[nn.Module, torch.Tensor]:
        model = nn.Linear(512, 512)
        nn.init.trunc_normal_(model.weight, std=0.02)
        return model, torch.randn(4, 512)

    assert trace_step(function, device="cpu", optimizer="none").ops[0].name == "aten.addmm.default"


class Residual(nn.Module):
    """Gradients meet: of a residual, of a tensor used three times, and of a tied weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Use the weight twice, and what comes out of the first product four times."""
        y = x @ self.weight
        return ((y.sin() * y.cos() + y.exp() + y) @ self.weight).tanh().sum()


def real_peak_bytes(function: Any) -> int:
    """The peak of a real second step, optimizer left out, model and inputs included, at torch's allocator."""
    meter = AllocatorPeak()
    with meter:
        model, inputs = function()
    for _ in range(2):
        with meter:
            model(inputs).sum().backward()
            model.zero_grad(set_to_none=True)
    return meter.segments[-1].peak_bytes


def test_gradients_meet_in_place_as_in_plain():
    """The engine's additions make no storages of their own: the load is that of a real step's allocator."""
    trace = trace_step(residual, device="cpu", optimizer="none")
    accumulated = [op for op in trace.ops if op.name == "torchdelta.accumulate"]
    assert len(accumulated) == 4
    for op in accumulated:
        total = trace.buffers[op.writes[0]]
        assert total.storage_id in {trace.buffers[id_].storage_id for id_ in op.reads}
    assert max(load_curve(trace)) == pytest.approx(real_peak_bytes(residual), rel=0.01)


def residual() -> tuple[nn.Module, torch.Tensor]:
    """The network above with a batch that is larger than its weight."""
    return Residual(), torch.randn(256, 16)


def test_states_of_the_optimizer_are_there_before_the_step():
    """The second step is traced: AdamW's states exist, are written in place and are as large as two models."""
    trace = trace_step(mlp, batch_size=4, device="cuda", optimizer="adamw")
    states = [buffer for buffer in trace.buffers if buffer.kind == "optimizer_state" and buffer.birth_op == BEFORE_STEP]
    parameters_bytes = sum(b.size_bytes for b in trace.buffers if b.kind == "parameter" and b.birth_op == BEFORE_STEP)
    assert sum(buffer.size_bytes for buffer in states if buffer.size_bytes > 4) == 2 * parameters_bytes
    assert any(op.name.startswith("aten._foreach_") for op in trace.ops)


def test_a_step_of_ones_own():
    """A step function runs as it is; backward and optimizer are found out."""

    def function() -> tuple[nn.Module, torch.Tensor, Any]:
        model, x = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

        def step(model: nn.Module, inputs: torch.Tensor) -> None:
            optimizer.zero_grad()
            loss = model(inputs).square().mean()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()

        return model, x, step

    trace = trace_step(function, device="cpu")
    phases = [op.phase for op in trace.ops]
    assert phases == sorted(phases, key=("forward", "backward", "optimizer").index)
    assert {buffer.kind for buffer in trace.buffers} >= {"parameter", "gradient", "optimizer_state", "input"}


def broken(batch_size: int) -> Any:
    """Raises."""
    del batch_size
    raise ZeroDivisionError("division\nby zero")


def looks_at_values() -> Any:
    """Asks for the value of a tensor."""
    model, x = mlp()

    def step(model: nn.Module, inputs: torch.Tensor) -> None:
        if model(inputs).sum().item() > 0:
            raise AssertionError

    return model, x, step


_REAL = mlp()


def indexes_by_a_list() -> Any:
    """C++ reads the numbers out of a list of tensors."""

    def step(model: nn.Module, x: torch.Tensor) -> None:
        chosen = model(x).argmax(-1)
        x[[chosen[0], chosen[1]], [chosen[1], chosen[0]]].sum().backward()

    return nn.Linear(8, 4), torch.randn(4, 8), step


REFUSED = {
    "two arguments": (lambda a, b: (a, b), 4, "has 2 required arguments"),
    "no batch size": (residual, 4, "takes no batch size"),
    "batch size needed": (broken, None, "needs a batch size"),
    "batch size 0": (mlp, 0, "batch size 0 is no batch"),
    "raises": (broken, 4, "cannot be called: ZeroDivisionError: division by zero"),
    "one thing": (lambda: mlp()[0], None, r"returned Sequential: it must return \(model, inputs\)"),
    "four things": (lambda: (*mlp(), 1, 2), None, "returned a tuple of 4"),
    "no model": (lambda: (1, 2), None, "returned int as the model"),
    "no step": (lambda: (*mlp(), 3), None, "returned int as the step"),
    "no inputs": (lambda: (mlp()[0], 3), None, "returned int as the inputs"),
    "real": (lambda: _REAL, None, "0.weight is a real tensor: build model and inputs inside"),
    "no parameters": (lambda: (nn.ReLU(), torch.ones(2)), None, "ReLU has no parameters that require gradients"),
    "no loss": (lambda: (nn.Embedding(4, 2).requires_grad_(requires_grad=True), {}), None, "TypeError"),
    "reads memory": (indexes_by_a_list, None, "it asks for the value of a tensor"),
    "asks for a value": (looks_at_values, None, "it asks for the value of a tensor"),
    "wrong shapes": (
        lambda: (nn.Linear(3, 3), torch.ones(2, 4)),
        None,
        "the step of .* cannot be traced: RuntimeError",
    ),
    "idle step": (lambda: (*mlp(), lambda *_: None), None, "ran no op"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_traced(case):
    """Each is one line that names the function and what to change."""
    function, batch_size, message = REFUSED[case]
    with pytest.raises(TraceError, match=message) as caught:
        trace_step(function, batch_size=batch_size, device="cpu")
    assert "\n" not in str(caught.value)


def test_unknown_device_and_optimizer():
    """What there is stands in the message."""
    with pytest.raises(TraceError, match="unknown device 'tpu'"):
        trace_step(mlp, device="tpu")
    with pytest.raises(TraceError, match="unknown optimizer 'lion'"):
        trace_step(mlp, optimizer="lion")  # type: ignore[arg-type]


class Taught(nn.Module):
    """A student that learns from a teacher, whose ops run in a mode without gradients."""

    def __init__(self, mode: Any) -> None:
        super().__init__()
        self.teacher, self.student = nn.Linear(16, 16).bfloat16(), nn.Linear(16, 16)
        self.teacher.requires_grad_(False)
        self.mode = mode

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the distance."""
        with self.mode():
            wanted = self.teacher(x.bfloat16()).float().t().reshape(-1)
        return (self.student(x).reshape(-1) - wanted.clone()).square().mean()


def test_ops_in_inference_mode_are_those_without_gradients():
    """Composite ops arrive whole there: a reshape that copies is no view, and a linear layer has FLOPs."""
    plain, inference = (
        trace_step(lambda mode=mode: (Taught(mode), torch.randn(32, 16)), device="cpu")
        for mode in (torch.no_grad, torch.inference_mode)
    )
    assert [op.name for op in inference.ops] == [op.name for op in plain.ops]
    assert [op.flops for op in inference.ops] == [op.flops for op in plain.ops]
    assert load_curve(inference) == load_curve(plain)


@pytest.mark.parametrize("how", ["closure", "two losses"])
def test_a_forward_after_a_backward_or_in_a_closure_is_one(how: str):
    """What it saves may leave; the update belongs to the optimizer."""

    def function() -> tuple[nn.Module, torch.Tensor, Any]:
        model = nn.Linear(64, 64)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def loss(x: torch.Tensor) -> torch.Tensor:
            return torch.tanh(x @ model.weight).exp().square().mean()  # outside of the module

        def step(_: nn.Module, x: torch.Tensor) -> None:
            def closure() -> torch.Tensor:
                optimizer.zero_grad()
                value = loss(x)
                value.backward()
                return value

            if how == "closure":
                optimizer.step(closure)
                return
            closure()
            loss(x).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()

        return model, torch.randn(64, 64), step

    trace = trace_step(function, device="cpu")
    num = 1 if how == "closure" else 2
    for name in ("aten.tanh.default", "aten.exp.default", "aten.mean.default"):
        assert [op.phase for op in trace.ops if op.name == name] == ["forward"] * num
    assert trace.ops[-1].phase == "optimizer"
    saved = [buffer for buffer in trace.buffers if buffer.saved and buffer.birth_op != BEFORE_STEP]
    assert {trace.ops[buffer.birth_op].phase for buffer in saved} == {"forward"}


def test_an_own_optimizer_takes_the_ops_of_the_device():
    """As the default one does: on CUDA those on lists of tensors, and one norm for all gradients."""

    def function() -> tuple[nn.Module, torch.Tensor, Any]:
        model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
        optimizer = torch.optim.AdamW(model.parameters())

        def step(model: nn.Module, x: torch.Tensor) -> None:
            model(x).sum().backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

        return model, torch.randn(4, 16), step

    names = {device: {op.name for op in trace_step(function, device=device).ops} for device in ("cpu", "cuda")}
    assert "aten._foreach_norm.Scalar" in names["cpu"] & names["cuda"]
    assert "aten._foreach_addcdiv_.ScalarList" in names["cuda"] - names["cpu"]


class Filled(nn.Module):
    """Writes one part of a tensor after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Fill two halves."""
        with torch.no_grad():
            filled = torch.empty(2, *x.shape)
            for half in filled:
                half.copy_(x)
        return (self.layer(x) * filled).exp().sum()


def test_a_write_of_a_part_reads_the_rest():
    """A replay of it alone cannot make the content."""
    trace = trace_step(lambda: (Filled(), torch.randn(8, 16)), device="cpu")
    copies = [op for op in trace.ops if op.name == "aten.copy_.default"]
    assert len(copies) == 2
    assert copies[0].writes[0] in copies[1].reads
    assert {op.moved_bytes for op in copies} == {2 * 8 * 16 * 4}  # what it copies, read and written


class Grown(nn.Module):
    """Writes into a tensor without elements, which the op lets grow."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Double, and multiply."""
        doubled = torch.mul(x, 2, out=torch.empty(0))
        return (self.layer(x) * doubled).sum()


def test_an_output_that_is_given_may_grow():
    """Its bytes count, and it can be saved."""
    trace = trace_step(lambda: (Grown(), torch.randn(8, 16)), device="cpu")
    (op,) = (op for op in trace.ops if op.name == "aten.mul.out")
    assert trace.buffers[op.writes[0]].size_bytes == 8 * 16 * 4


def test_sparse_gradients_are_told(caplog: pytest.LogCaptureFixture):
    """How many entries they have depends on data."""
    warn_once.cache_clear()

    def function() -> tuple[nn.Module, torch.Tensor]:
        return nn.Sequential(nn.Embedding(50, 8, sparse=True), nn.Linear(8, 1)), torch.zeros(4, dtype=torch.long)

    trace_step(function, device="cpu", optimizer="sgd")
    assert [record.message for record in caplog.records if "sparse gradients" in record.message]


def test_what_an_optimizer_updates_is_a_parameter():
    """Also where the step alone holds it: the second model of a pair."""

    def function() -> tuple[nn.Module, torch.Tensor, Any]:
        first, second = nn.Linear(16, 16), nn.Linear(16, 24)
        optimizer = torch.optim.Adam([*first.parameters(), *second.parameters()])

        def step(model: nn.Module, x: torch.Tensor) -> None:
            second(model(x)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

        return first, torch.randn(4, 16), step

    kinds = counts(trace_step(function, device="cpu")).bytes_by_kind
    assert kinds["parameter"] == kinds["gradient"] == 4 * (16 * 16 + 16 + 16 * 24 + 24)


class OnData(torch.optim.Optimizer):
    """Updates `.data` with gradients on, as many published optimizers do."""

    def step(self, closure: Any = None) -> None:
        """Call the closure, and update."""
        with torch.enable_grad():
            if closure is not None:
                closure()
            for parameter in self.param_groups[0]["params"]:
                parameter.data.add_(parameter.grad.data.cos(), alpha=-0.1)


@pytest.mark.parametrize("has_closure", [True, False])
def test_an_update_with_gradients_on_belongs_to_the_optimizer(has_closure: bool):
    """And what a closure does without gradients to its forward."""

    def function() -> tuple[nn.Module, torch.Tensor, Any]:
        model = nn.Linear(16, 16)
        optimizer = OnData(model.parameters(), {})

        def step(model: nn.Module, x: torch.Tensor) -> None:
            def closure() -> None:
                with torch.no_grad():
                    wanted = x.sin()
                (model(x) - wanted).square().sum().backward()

            if has_closure:
                optimizer.step(closure)
            else:
                closure()
                optimizer.step()
            optimizer.zero_grad()

        return model, torch.randn(4, 16), step

    phases = {op.name: op.phase for op in trace_step(function, device="cpu").ops}
    assert phases["aten.sin.default"] == phases["aten.sub.Tensor"] == "forward"
    assert phases["aten.cos.default"] == "optimizer"


def test_a_sparse_gradient_may_be_set_to_zero():
    """It has no storage to be overwritten as a whole."""

    def function() -> tuple[nn.Module, torch.Tensor, Any]:
        model = nn.Embedding(50, 8, sparse=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(model: nn.Module, x: torch.Tensor) -> None:
            model(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)

        return model, torch.zeros(4, dtype=torch.long), step

    assert trace_step(function, device="cpu").ops
