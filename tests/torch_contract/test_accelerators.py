"""The contract with torch: what only an accelerator can run, as far as that can be told without one.

A torch release that changes one fails here, by name.
"""

from __future__ import annotations

import contextlib
import functools
import random
import sys
from typing import TYPE_CHECKING

import pytest
import torch

from torchdelta._torch import device as torch_device

if TYPE_CHECKING:
    from collections.abc import Callable


def test_numeric_environment_of_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """The switches that CUDA's kernels read are there in every build, are recorded, and can be set back."""
    monkeypatch.setattr(torch_device, "reads_cuda_settings", True)
    before = torch_device.numeric_environment()
    assert len(before) >= 5 + 1 + 5
    # Not through torch.backends: what tests of torch import freezes its flags for the whole process.
    torch._C._set_cudnn_benchmark(not torch._C._get_cudnn_benchmark())
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    changed = torch_device.numeric_environment()
    assert changed != before
    torch_device.set_numeric_environment(before)
    assert torch_device.numeric_environment() == before
    torch_device.set_numeric_environment(changed)
    assert torch_device.numeric_environment() == changed
    torch_device.set_numeric_environment(before)


def test_deterministic_algorithms_may_only_warn() -> None:
    """Then kernels without a fixed order run all the same."""
    assert not torch_device.warns_only()
    try:
        torch.use_deterministic_algorithms(True, warn_only=True)
        assert torch_device.warns_only()
    finally:
        torch.use_deterministic_algorithms(False)
    assert not torch_device.warns_only()


def test_what_cuda_builds_read() -> None:
    """CUDA's settings are read where torch was built for it, and nothing is captured on any other device."""
    assert torch_device.reads_cuda_settings == torch.backends.cuda.is_built()
    assert not torch_device.capture_reader(torch.device("cpu"))()


def test_names_that_only_an_accelerator_can_run() -> None:
    """What is asked of accelerators exists by these names; the tests in accelerator/ call it."""
    assert callable(torch._C._accelerator_getDeviceStats)
    assert callable(torch._C._accelerator_resetPeakStats)
    assert not torch_device.has_graph_trees() or "torch._inductor" in sys.modules
    assert torch_device.default_generator_of(torch.device("cpu")) is torch.default_generator
    assert callable(torch.accelerator.current_stream)
    assert callable(torch.accelerator.set_stream)


def _settings(*, has_cuda: bool) -> list[Callable[[], object]]:
    """Return the ways to set the precision of float32, old and new."""
    backends = torch.backends
    places = [backends, backends.mkldnn, backends.mkldnn.matmul, backends.mkldnn.conv]
    if has_cuda:
        places += [backends.cudnn, backends.cuda.matmul, backends.cudnn.conv, backends.cudnn.rnn]
    found: list[Callable[[], object]] = [
        functools.partial(setattr, place, "fp32_precision", value) for place in places for value in ("ieee", "tf32")
    ]
    found += [functools.partial(torch.set_float32_matmul_precision, name) for name in ("highest", "high", "medium")]
    switches = (backends.cuda.matmul, backends.cudnn) if has_cuda else ()
    return found + [functools.partial(setattr, place, "allow_tf32", on) for place in switches for on in (True, False)]


def _seen(*, has_cuda: bool) -> list[object]:
    """Return what a program can read of them."""

    def answer(read: Callable[[], object]) -> object:
        try:
            return read()
        except RuntimeError:
            return "old and new settings are mixed"

    backends = torch.backends
    places = [backends, backends.mkldnn, backends.mkldnn.matmul, backends.mkldnn.conv]
    if not has_cuda:
        return [*(place.fp32_precision for place in places), answer(torch.get_float32_matmul_precision)]
    places += [backends.cudnn, backends.cuda.matmul, backends.cudnn.conv, backends.cudnn.rnn]
    return [
        *(place.fp32_precision for place in places),
        answer(torch.get_float32_matmul_precision),
        answer(lambda: backends.cuda.matmul.allow_tf32),
        answer(lambda: backends.cudnn.allow_tf32),
    ]


@pytest.mark.parametrize("has_cuda", [False, True])
@pytest.mark.filterwarnings("ignore")  # of torch, about old settings
def test_precisions_of_float32_are_put_back(monkeypatch: pytest.MonkeyPatch, *, has_cuda: bool) -> None:
    """Whatever a program has set, and by whichever switch: a replay's settings leave nothing behind."""
    if has_cuda or not torch_device.reads_cuda_settings:
        readers = torch_device._fp32_precisions(*(("mkldnn", "cuda") if has_cuda else ("mkldnn",)))
        monkeypatch.setattr(torch_device, "_fp32_readers", readers)
        monkeypatch.setattr(torch_device, "reads_cuda_settings", has_cuda)
    settings, start = _settings(has_cuda=has_cuda), torch_device.numeric_environment()
    num_consistent = 0
    try:
        for seed in range(2000):
            draw = random.Random(seed)

            def change(draw: random.Random = draw) -> None:
                with contextlib.suppress(RuntimeError):  # torch refuses some of them once they are mixed
                    draw.choice(settings)()

            for _ in range(draw.randrange(3)):
                change()
            wanted, seen = torch_device.numeric_environment(), _seen(has_cuda=has_cuda)
            for _ in range(draw.randrange(1, 3)):
                change()
            torch_device.set_numeric_environment(wanted)
            assert torch_device.numeric_environment()[5] == wanted[5]  # what kernels read
            if "old and new settings are mixed" not in seen:
                num_consistent += 1
                assert torch_device.numeric_environment() == wanted
                assert _seen(has_cuda=has_cuda) == seen
    finally:
        torch_device.set_numeric_environment(start)
    assert num_consistent > 100
