"""A scope opens whatever else is alive in the process; one that cannot open leaves nothing behind."""

from __future__ import annotations

import logging
import signal
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.optim.optimizer import _global_optimizer_pre_hooks

from tests.runtime.programs import UNLIMITED
from torchdelta import Config, MemoryBudget
from torchdelta.native.counting import counting_status
from torchdelta.runtime import optimizer_steps
from torchdelta.runtime.device import device as device_module
from torchdelta.runtime.observe import step_traces
from torchdelta.runtime.record import recorder as recorder_module
from torchdelta.runtime.record import scan
from torchdelta.runtime.record.resized import Resizes

if TYPE_CHECKING:
    from pathlib import Path


def gradient() -> torch.Tensor:
    """Train a leaf for one step and return its gradient."""
    x = torch.arange(3.0, requires_grad=True)
    (x * x).sum().backward()
    assert x.grad is not None
    return x.grad


def refused_view() -> object:
    """Return a view of which torch refuses to say whether it is a leaf."""
    base = torch.ones(4, requires_grad=True).clone()
    with torch.no_grad():
        view = base[:2]
    base.mul_(2)
    return view


def wrapper() -> object:
    """Return a tensor of `torch.func.grad` that outlives the transform."""
    kept: list[torch.Tensor] = []

    def f(x: torch.Tensor) -> torch.Tensor:
        kept.append(x)
        return (x * x).sum()

    torch.func.grad(f)(torch.ones(3))
    return kept


def batched() -> object:
    """Return a tensor of `torch.vmap` that outlives the transform."""
    kept: list[torch.Tensor] = []

    def f(x: torch.Tensor) -> torch.Tensor:
        kept.append(x)
        return x.sum()

    torch.vmap(f)(torch.ones(3, 2))
    return kept


class Refusing(torch.Tensor):
    """A tensor that answers no question."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Refuse, whatever is asked."""
        raise ValueError("ask me nothing")


class RefusingGradient(torch.nn.Parameter):
    """A parameter that does not show its gradient."""

    @property
    def grad(self) -> Any:
        """Refuse."""
        raise ValueError("no gradient for you")


STRANGERS: dict[str, Any] = {
    "refused view": refused_view,
    "wrapper": wrapper,
    "batched": batched,
    "refusing": lambda: torch.ones(2).as_subclass(Refusing),
    "refusing gradient": lambda: torch.ones(2, requires_grad=True).detach().as_subclass(RefusingGradient),
    "sparse": lambda: torch.eye(3).to_sparse(),
}


@pytest.mark.parametrize("name", STRANGERS)
def test_a_stranger_does_not_keep_a_scope_from_opening(name: str) -> None:
    """Whatever tensor is alive somewhere, every scope opens and trains as ever."""
    plain = gradient()
    stranger = STRANGERS[name]()
    for _ in range(2):
        with MemoryBudget(UNLIMITED):
            ours = gradient()
        assert torch.equal(ours, plain)
    assert stranger is not None


def test_gradients_of_others_are_counted_beside_one_that_refuses() -> None:
    """A class that does not show its gradient costs the others nothing."""
    stranger = torch.ones(2).as_subclass(RefusingGradient).requires_grad_()
    leaf = torch.zeros(50_000, requires_grad=True)
    leaf.sum().backward()
    with MemoryBudget(UNLIMITED) as budget:
        pass
    with_gradient_bytes = budget.summary().peak_bytes
    leaf.grad = None
    with MemoryBudget(UNLIMITED) as budget:
        pass
    assert with_gradient_bytes - budget.summary().peak_bytes >= 200_000 - 4096
    assert stranger.requires_grad


def test_each_kind_of_stranger_is_logged_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many there are, and however many scopes: one line for the kind."""
    monkeypatch.setattr(scan, "skipped_kinds", set())
    strangers = [wrapper(), wrapper()]
    with caplog.at_level(logging.INFO, logger="torchdelta"):
        for _ in range(2):
            with MemoryBudget(UNLIMITED):
                pass
    lines = [record.getMessage() for record in caplog.records if "skipped a tensor" in record.getMessage()]
    assert len([line for line in lines if "Cannot access storage of TensorWrapper" in line]) == 1
    assert len(strangers) == 2


class Running:
    """Counts how many counters at the allocator are on."""

    num = 0

    def __init__(self, counter: Any) -> None:
        self._counter = counter

    def __getattr__(self, name: str) -> Any:
        """Pass on, and note a start and a stop."""
        if name in {"start", "stop"}:
            Running.num += 1 if name == "start" else -1
        return getattr(self._counter, name)


@pytest.mark.parametrize("place", ["scan", "hooks", "resizes", "recorder"])
def test_a_scope_that_fails_to_open_leaves_nothing_behind(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever it fails, torch and the handlers are as they were, and the next scope opens and trains."""
    handler = signal.getsignal(signal.SIGINT)
    hooks = list(_global_optimizer_pre_hooks)

    def fail(*_: Any, **__: Any) -> Any:
        raise RuntimeError("it broke")

    with monkeypatch.context() as patched:
        if counting_status().is_on:
            new_counter = device_module.new_counter
            patched.setattr(device_module, "new_counter", lambda: Running(new_counter()))
        if place == "scan":
            patched.setattr(step_traces, "scan_storages", fail)
        elif place == "hooks":
            patched.setattr(optimizer_steps, "register_optimizer_step_post_hook", fail)
        elif place == "resizes":
            patched.setattr(Resizes, "start", fail)
        else:
            patched.setattr(recorder_module.Recorder, "__enter__", fail)
        with pytest.raises(RuntimeError, match="it broke"):
            MemoryBudget(UNLIMITED).start()
    assert Running.num == 0
    assert list(_global_optimizer_pre_hooks) == hooks
    assert "resize_" not in vars(torch.UntypedStorage)
    assert signal.getsignal(signal.SIGINT) is handler
    with MemoryBudget(UNLIMITED) as budget:
        gradient()
    assert budget.summary().steps


def test_a_relative_swap_directory_begins_where_the_budget_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even if the program is elsewhere when something is first swapped."""
    (tmp_path / "swap").mkdir()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TORCHDELTA_SWAP_DIR", "swap")
    with MemoryBudget(UNLIMITED, Config(decisions="swap")) as budget:
        monkeypatch.chdir("elsewhere")
        x = torch.ones(256, 256, requires_grad=True)
        (x * 2).exp().sum().backward()
    assert budget.summary().swapped_out_bytes > 0
