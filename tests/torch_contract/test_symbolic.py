"""The contract with torch: fake tensors, for steps that are traced without memory.

A torch release that changes one fails here, by name.
"""

from __future__ import annotations

import logging
import pickle
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.torch_contract.names import Names
from torchdelta._torch import autocast as own
from torchdelta._torch import symbolic as torch_symbolic
from torchdelta._torch.autocast import cuda_autocast_on_cpu
from torchdelta._torch.device import default_to_foreach, is_mkldnn_enabled
from torchdelta._torch.fake import FakeModeForOnce, FakeTensor, FakeTensorMode, fake_mode, fake_view
from torchdelta._torch.modes import num_modes


def test_fake_tensors() -> None:
    """A meta tensor becomes a fake one that says it is on the device, and costs nothing."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    fake = fake_view(mode, torch.empty(4, 4, device="meta"), "cpu")
    assert isinstance(fake, FakeTensor)
    assert fake.device.type == "cpu"
    with mode:
        made = fake @ torch.ones(4, 2)
    assert isinstance(made, FakeTensor)
    assert made.shape == (4, 2)
    assert made.untyped_storage().device.type == "meta"


def test_fake_mode() -> None:
    """The fake-tensor mode that is on is found, also below a mode that asks from inside an op."""
    found: list[Any] = []

    class Asks(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            del types
            found.append((fake_mode(), num_modes()))
            return func(*args, **(kwargs or {}))

    assert fake_mode() is None
    with Asks():
        torch.ones(1)
        with FakeTensorMode() as mode:
            torch.ones(1)
    assert found == [(None, 0), (mode, 1)]


def test_fake_mode_for_once() -> None:
    """It answers like any other, torch remembers nothing of it, and once ended its tensors refuse everything."""
    before = len(FakeTensorMode.cache)
    with FakeModeForOnce() as mode:
        fake = torch.ones(17, 19) @ torch.ones(19, 23)
    assert fake.shape == (17, 23)
    mode.end("no content")
    for use in (lambda: fake + 1, lambda: torch.ones(23) * fake, fake.tolist, lambda: pickle.dumps(fake)):
        with pytest.raises(RuntimeError, match="no content"):
            use()
    assert len(FakeTensorMode.cache) == before
    with FakeTensorMode():
        torch.ones(17, 19) @ torch.ones(19, 23)
    assert len(FakeTensorMode.cache) > before


def test_an_op_that_fails_on_fake_tensors_is_not_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its caller handles the error. Torch's own mode logs it with a traceback: the negative control."""
    logged: list[str] = []
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    monkeypatch.setattr(logger, "handle", lambda record: logged.append(record.msg))
    real = torch.ones(4).untyped_storage()

    def load(mode: Any) -> None:
        with mode, pytest.raises(RuntimeError):
            torch.empty(0).set_(real)  # pyright: ignore[reportArgumentType]

    load(FakeModeForOnce())
    assert logged == []
    assert not logger.disabled
    load(FakeTensorMode(allow_non_fake_inputs=True))
    assert logged


def test_foreach_on_cpu() -> None:
    """Within it optimizers take the `_foreach_` ops on CPU; afterwards as before."""

    def names_of_a_step() -> list[str]:
        weight = torch.nn.Parameter(torch.ones(2))
        weight.grad = torch.ones(2)
        with Names() as names:
            torch.optim.SGD([weight], lr=0.1).step()
        return [name for name in names.seen if "_foreach_" in name]

    parameters = [torch.nn.Parameter(torch.ones(2))]
    assert not names_of_a_step()
    assert not default_to_foreach(parameters)
    with torch_symbolic.foreach_on_cpu():
        assert default_to_foreach(parameters)
        assert names_of_a_step() == ["aten._foreach_add_.List"]
    assert not names_of_a_step()


def test_foreach_on_fake() -> None:
    """Within it optimizers take for fake tensors the ops that they take for others; afterwards as before."""

    def default() -> bool:
        with FakeTensorMode():
            return default_to_foreach([torch.nn.Parameter(torch.ones(2))])

    with torch_symbolic.foreach_on_cpu():
        assert not default()
        with torch_symbolic.foreach_on_fake():
            assert default()
        assert not default()
    with torch_symbolic.foreach_on_fake():
        assert not default()


def test_without_fake_mode() -> None:
    """Within it tensors are real, in the middle of a fake-tensor mode."""
    with FakeTensorMode():
        with torch_symbolic.without_fake_mode():
            assert torch.ones(2).sum().item() == 2
        assert isinstance(torch.ones(2), FakeTensor)


def test_without_onednn() -> None:
    """Within it an LSTM is products and gates, outside oneDNN's one op, which says nothing of what it computes."""

    def has_onednn_op() -> bool:
        with FakeTensorMode(), Names() as names:
            torch.nn.LSTM(2, 2)(torch.ones(3, 4, 2))
        return any("mkldnn_rnn_layer" in name for name in names.seen)

    assert has_onednn_op() == is_mkldnn_enabled() == torch.backends.mkldnn.enabled
    with torch_symbolic.without_onednn():
        assert not has_onednn_op()
        assert not is_mkldnn_enabled()
    assert has_onednn_op() == torch.backends.mkldnn.enabled


def test_without_truncation() -> None:
    """Within it `trunc_normal_` needs no values; afterwards it keeps its bounds."""
    with FakeTensorMode(), torch_symbolic.without_truncation():
        torch.nn.init.trunc_normal_(torch.nn.Parameter(torch.empty(4)), 0.0, 1.0, -0.5, 0.5)
    assert torch.nn.init.trunc_normal_(torch.empty(1000), 0.0, 1.0, -0.5, 0.5).abs().max() <= 0.5


def test_converting_fake_modules() -> None:
    """Within it fake modules change their dtype, and what is tied stays tied; afterwards all is as before."""
    before = torch.nn.Module._apply
    with FakeTensorMode(), torch_symbolic.converting_fake_modules():
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


def test_cuda_autocast_on_cpu() -> None:
    """CPU tensors are cast as CUDA's are, and as before afterwards; op by op: tests/trace/symbolic/test_autocast.py."""

    def dtypes(device_type: str) -> list[torch.dtype]:
        x = torch.randn(4, 4)
        with torch.autocast(device_type, dtype=torch.bfloat16):
            return [(x @ x).dtype, (x @ x).exp().dtype, (x @ x).softmax(-1).dtype]

    before = dtypes("cpu")
    assert before == [torch.bfloat16] * 3
    with cuda_autocast_on_cpu():
        assert dtypes("cuda") == [torch.bfloat16, torch.float32, torch.float32]
    assert dtypes("cpu") == before


def test_every_op_of_cuda_autocast_is_known() -> None:
    """Each op that CUDA's autocast treats is treated here as well, or as the CPU's does."""
    cuda = {name.removeprefix("aten::") for name in own._registered("AutocastCUDA")}
    cuda = {name for name in cuda if "imname" not in name and ".names_" not in name}  # those of named dimensions
    cpu = {name.removeprefix("aten::") for name in own._registered("AutocastCPU")}
    elsewhere = {
        name for name in cuda if name.startswith(("cudnn_", "_cudnn_", "_thnn_fused_"))
    }  # on real CUDA tensors only
    assert cuda - cpu - elsewhere == (own._OWN - cpu) & cuda
    assert cuda >= own._OWN
