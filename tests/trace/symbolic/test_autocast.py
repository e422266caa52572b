"""Autocast on fake tensors is autocast as it runs: on CPU against real steps, for CUDA against torch's own rules."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from torchdelta._torch.fake import FakeTensorMode
from torchdelta._torch.tensors import base_of
from torchdelta.errors import TraceError
from torchdelta.trace.symbolic import trace_step
from torchdelta.trace.symbolic.devices import acting_as

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Layers(nn.Module):
    """A convolution, attention, norms, a shared product whose weight is cast once, and a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv1d(16, 16, 3, padding=1)
        self.shared = nn.Linear(16, 16)
        self.norm = nn.LayerNorm(16)
        self.mixed = nn.Parameter(torch.randn(16, 16))
        self.head = nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Use `shared` three times and `mixed` twice."""
        x = self.convolution(x.transpose(1, 2)).transpose(1, 2)
        q, k, v = (self.shared(x).unflatten(-1, (2, 8)).transpose(1, 2) for _ in range(3))
        x = self.norm(x + functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        x = x + torch.einsum("btc,cd->btd", x, self.mixed) + torch.einsum("btc,cd->btd", x.relu(), self.mixed)
        x = functional.gelu(x) / x.pow(2).mean(-1, keepdim=True).add(1).rsqrt()
        y = self.head(x.softmax(-1) + x.exp().tanh())
        return functional.cross_entropy(y.flatten(0, 1), torch.arange(y.shape[0] * y.shape[1]) % 8)


def step_of(device: str, dtype: torch.dtype | None) -> Any:
    """A training step under autocast for a device."""

    def step(model: nn.Module, x: torch.Tensor) -> None:
        with torch.autocast(device, dtype=dtype):
            loss = model(x)
        loss.backward()
        model.zero_grad()

    return step


class Ops(TorchDispatchMode):
    """Notes the ops that run, and the dtypes of what they return."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.seen: list[tuple[str, tuple[str, ...]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run it and put it down; views and queries are left out."""
        output = func(*args, **(kwargs or {}))
        outputs = output if isinstance(output, list | tuple) else (output,)
        made = tuple(str(one.dtype) for one in outputs if isinstance(one, torch.Tensor))
        if made and not any(base_of(one) is not None for one in outputs if isinstance(one, torch.Tensor)):
            self.seen.append((str(func), made))
        return output


@pytest.mark.parametrize("name", DTYPES)
def test_a_step_on_cpu_is_the_step_that_runs(name):
    """Dtypes of the products, number of casts, and the bytes that autograd saves are those of an eager step."""

    def function() -> tuple[nn.Module, torch.Tensor, Any]:
        return Layers(), torch.randn(4, 6, 16), step_of("cpu", DTYPES[name])

    model, x, step = function()
    step(model, x)
    saved: dict[int, int] = {}
    kept: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        kept.append(tensor)  # so that no address is used again
        return tensor

    with Ops() as ops, torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        step(model, x)
    trace = trace_step(function, device="cpu")
    real = Counter(name for name, _ in ops.seen)
    traced = Counter(op.name for op in trace.ops)
    assert traced["aten._to_copy.default"] == real["aten._to_copy.default"] > 0
    for product in ("aten.mm.default", "aten.addmm.default", "aten.bmm.default", "aten.convolution.default"):
        assert traced[product] == real[product]
        dtypes = {made[0].removeprefix("torch.") for seen, made in ops.seen if seen == product}
        assert {op.dtype for op in trace.ops if op.name == product} == dtypes
    storages = {trace.buffers[one.buffer_id].storage_id: trace.buffers[one.buffer_id] for one in trace.saved_tensors}
    # On fake CPU tensors, torch says that a layer norm of halves by a float32 weight keeps its statistics in halves.
    statistics_bytes = 2 * (4 * 6) * 2
    assert sum(buffer.size_bytes for buffer in storages.values()) + statistics_bytes == sum(saved.values())


def ops_under(device: str, run: Any) -> list[tuple[str, tuple[str, ...]]]:
    """The ops of a function without gradients, on fake tensors of a device: for "acting", of the CPU as CUDA."""
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad(), Ops() as ops:
        if device == "acting":
            with acting_as("cuda"):
                run("cpu")
        else:
            run(device)
    return [(name.replace("cuda", "cpu"), made) for name, made in ops.seen if "empty" not in name]


def with_autocast(device: str, dtype: torch.dtype, call: Any) -> None:
    """Call under autocast for CUDA; on fake CUDA tensors it is turned on by hand, there may be no device."""
    if device == "cpu":
        with torch.autocast("cuda", dtype=dtype):
            call(device)
        return
    torch.set_autocast_dtype("cuda", dtype)
    torch.set_autocast_enabled("cuda", True)
    try:
        call(device)
    finally:
        torch.set_autocast_enabled("cuda", False)
        torch.clear_autocast_cache()


CALLS = {
    "layer_norm": lambda a, _b: functional.layer_norm(a, (8,)),
    "rms_norm": lambda a, _b: functional.rms_norm(a, (8,)),
    "group_norm": lambda a, _b: functional.group_norm(a, 2),
    "softmax": lambda a, _b: a.softmax(-1),
    "softmax of a dtype": lambda a, _b: a.softmax(-1, dtype=a.dtype),
    "log_softmax": lambda a, _b: a.log_softmax(-1),
    "sum": lambda a, _b: a.sum() + a.sum(0, keepdim=True),
    "prod": lambda a, _b: a.prod() + a.prod(0),
    "cumsum": lambda a, _b: a.cumsum(0),
    "exp": lambda a, _b: a.exp() + a.log() + a.rsqrt() + a.reciprocal(),
    "pow": lambda a, b: a.pow(2) + a.pow(b) + 2**a,
    "norm": lambda a, _b: a.norm() + torch.norm(a, dim=0) + torch.linalg.vector_norm(a),
    "losses": lambda a, b: (
        functional.mse_loss(a, b) + functional.l1_loss(a, b) + functional.binary_cross_entropy_with_logits(a, b)
    ),
    "cross entropy": lambda a, _b: functional.cross_entropy(a, torch.zeros(8, dtype=torch.long, device=a.device)),
    "products": lambda a, b: (torch.addmm(a, a, b), a @ b, torch.mv(a, b.select(0, 0))),
    "outer product": lambda a, b: torch.addr(a, b.select(0, 0), a.select(0, 0)),
    "dot": lambda a, b: torch.dot(a.select(0, 0), b.select(0, 0).float()) + torch.addcmul(a, b, b.float()).sum(),
    "einsum": lambda a, b: torch.einsum("ij,jk->ik", a, b.float()),
    "cat": lambda a, b: torch.cat([a, b.float()]) + torch.stack([a, b.float()]).flatten(0, 1),
    "padding": lambda a, _b: functional.pad(a.view(1, 8, 8), (1, 1), mode="reflect"),
    "pooling": lambda a, _b: functional.max_pool3d(a.view(1, 1, 1, 8, 8), (1, 2, 2)),
    "interpolation": lambda a, _b: functional.interpolate(a.view(1, 1, 8, 8), scale_factor=2, mode="bilinear"),
    "convolution": lambda a, b: functional.conv1d(a, b.float().unsqueeze(-1), padding="same"),
    "activations": lambda a, _b: functional.softplus(a) + functional.gelu(a) + functional.silu(a),
    "inverse": lambda a, _b: torch.fft.fft(a.float()).real + a,
}


HAS_SAME_RMS_NORM = torch.__version__.startswith("2.13.")


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("case", CALLS)
def test_the_casts_of_cuda(case, name):
    """Op by op, the same ops with the same dtypes as torch runs on fake CUDA tensors."""
    if case == "rms_norm" and not HAS_SAME_RMS_NORM:
        pytest.skip("this torch runs rms_norm on CUDA tensors as another op than on those of the CPU")

    def run(device: str) -> None:
        a, b = (torch.empty(8, 8, device=device, dtype=dtype) for dtype in (DTYPES[name], DTYPES[name]))
        wide = torch.empty(8, 8, device=device)
        with_autocast(device, DTYPES[name], lambda _: (CALLS[case](a, b), CALLS[case](wide, b)))

    assert ops_under("acting", run) == ops_under("cuda", run)


def test_the_widest_dtype_of_a_sampled_grid():
    """What the CPU casts to float32, CUDA casts to the widest dtype (torch cannot run it on fake CUDA)."""
    dtypes: list[torch.dtype] = []

    def call(_: str) -> None:
        image, grid = torch.empty(1, 1, 8, 8), torch.empty(1, 8, 4, 2)
        for x, y in ((image.half(), grid.half()), (image.half(), grid)):
            dtypes.append(functional.grid_sample(x, y, align_corners=False).dtype)

    ops_under("acting", lambda device: with_autocast(device, torch.float16, call))
    assert dtypes == [torch.float16, torch.float32]


def test_what_cuda_refuses():
    """A loss that CUDA's autocast refuses is refused, and by which one to use."""

    def function() -> tuple[nn.Module, torch.Tensor, Any]:
        def step(model: nn.Module, x: torch.Tensor) -> None:
            with torch.autocast("cuda"):
                functional.binary_cross_entropy(model(x).sigmoid(), x).backward()

        return nn.Linear(8, 8), torch.rand(4, 8), step

    with pytest.raises(TraceError, match="unsafe to autocast: use binary_cross_entropy_with_logits"):
        trace_step(function, device="cuda")


@pytest.mark.parametrize("name", DTYPES)
def test_a_step_for_cuda(name):
    """Products are in the lower precision, each weight is cast once, and what CUDA keeps in float32 is."""

    def function() -> tuple[nn.Module, torch.Tensor, Any]:
        return Layers(), torch.randn(4, 6, 16), step_of("cuda", DTYPES[name])

    trace = trace_step(function, device="cuda")
    lower = str(DTYPES[name]).removeprefix("torch.")
    assert {op.dtype for op in trace.ops if op.dtype} == {lower}
    assert any("flash_attention" in op.name for op in trace.ops)
    # convolution 2, shared 2, mixed 1, head 2: weights and biases.
    weights = {b.id: b for b in trace.buffers if b.kind == "parameter" and b.birth_op == -1}
    casts = Counter(op.reads[0] for op in trace.ops if op.name == "aten._to_copy.default" and op.phase == "forward")
    assert sorted(casts[id_] for id_ in weights if id_ in casts) == [1] * 7
    norm = next(op for op in trace.ops if op.name == "aten.native_layer_norm.default")
    assert trace.buffers[norm.writes[0]].size_bytes == 4 * (4 * 6 * 16)


def test_a_context_for_cuda_leaves_nothing_behind():
    """After tracing, autocast on CPU casts what it did before, and nothing is on."""
    norm, x = nn.LayerNorm(16), torch.randn(4, 16)

    def dtypes() -> list[torch.dtype]:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = x @ x.T
            return [y.dtype, norm(y @ x).dtype, y.softmax(-1).dtype, y.exp().dtype, torch.cat([y, y.float()]).dtype]

    before = dtypes()
    test_a_step_for_cuda("bf16")
    assert dtypes() == before
    assert not torch.is_autocast_enabled("cpu")
    assert not torch.is_autocast_enabled("cuda")
    assert torch.get_autocast_dtype("cuda") == torch.float16


def test_what_a_model_asks():
    """The state of CUDA's autocast, its dtype by default, and a context that is switched off."""
    seen: list[Any] = []

    def function() -> tuple[nn.Module, torch.Tensor, Any]:
        def step(model: nn.Module, x: torch.Tensor) -> None:
            with torch.autocast("cuda"):
                seen.append((torch.is_autocast_enabled(), torch.get_autocast_dtype("cuda"), model(x).dtype))
                with torch.autocast(x.device.type, enabled=False):
                    seen.append((torch.is_autocast_enabled("cuda"), model(x).dtype))
                loss = model(x).sum()
            loss.backward()

        return nn.Linear(8, 8), torch.randn(4, 8), step

    trace_step(function, device="cuda")
    assert seen[:2] == [(True, torch.float16, torch.float16), (False, torch.float32)]
