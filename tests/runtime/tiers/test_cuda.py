"""How host memory is registered with CUDA: which calls are made, and what a refusal becomes. No device is needed."""

from __future__ import annotations

import contextlib

import pytest
import torch

from torchdelta.runtime.tiers.cuda import CudaEngine


class Runtime:
    """Stands in for `torch.cuda.cudart()`."""

    def __init__(self, status: int) -> None:
        self.status = status
        self.calls: list[tuple[int, ...]] = []

    def cudaHostRegister(self, address: int, size_bytes: int, flags: int) -> int:  # noqa: N802 - CUDA's name
        """Note the call."""
        self.calls.append((address, size_bytes, flags))
        return self.status

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        """Note the call."""
        self.calls.append((address,))
        return self.status

    def cudaGetErrorString(self, status: int) -> str:  # noqa: N802
        """Say what a status means."""
        return f"error {status}"


def engine_with(monkeypatch: pytest.MonkeyPatch, runtime: Runtime) -> tuple[CudaEngine, list[str]]:
    """Return an engine without streams, and a list that grows whenever the runtime's last error is cleared."""
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
    cleared: list[str] = []
    monkeypatch.setattr(CudaEngine, "forget_error", lambda _: cleared.append("cleared"))
    engine = CudaEngine.__new__(CudaEngine)
    engine.device = torch.device("cuda", 0)
    return engine, cleared


def test_memory_is_registered_for_every_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """As it is, by address and size, with the flag that makes it pinned for all devices; and given back by address."""
    runtime = Runtime(0)
    engine, cleared = engine_with(monkeypatch, runtime)
    engine.pin(4096, 8192)
    engine.unpin(4096)
    assert runtime.calls == [(4096, 8192, 1), (4096,)]
    assert cleared == []


def test_a_refusal_is_an_oserror_and_leaves_no_error_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA keeps its last error, and torch would report it from the next kernel launch."""
    engine, cleared = engine_with(monkeypatch, Runtime(2))
    with pytest.raises(OSError, match="cudaHostRegister of 8192 bytes: error 2"):
        engine.pin(4096, 8192)
    engine.unpin(4096)
    assert cleared == ["cleared"] * 2
