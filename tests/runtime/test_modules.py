"""The path of the module whose forward is running."""

from __future__ import annotations

import contextlib
import gc
import weakref

import torch
from torch import nn

from torchdelta.runtime.modules import ModuleTracker


class Spy(nn.Module):
    """Notes the path while it runs."""

    def __init__(self, tracker: ModuleTracker, seen: list[str], error: Exception | None = None) -> None:
        super().__init__()
        self.tracker = tracker
        self.seen = seen
        self.error = error

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Look."""
        self.seen.append(self.tracker.current)
        if self.error is not None:
            raise self.error
        return x


def test_paths_are_those_of_named_modules() -> None:
    """Nested modules have dotted paths, relative to the outermost one that was called."""
    tracker, seen = ModuleTracker(), list[str]()
    model = nn.Sequential(Spy(tracker, seen), nn.Sequential(nn.Identity(), Spy(tracker, seen)))
    tracker.start()
    model(torch.zeros(1))
    model[1](torch.zeros(1))
    tracker.stop()
    assert seen == ["0", "1.1", "1"]


def test_outermost_module_has_the_empty_path() -> None:
    """It is called by nobody."""
    tracker, seen = ModuleTracker(), list[str]()
    tracker.start()
    Spy(tracker, seen)(torch.zeros(1))
    tracker.stop()
    assert seen == [""]
    assert tracker.current == ""


def test_module_that_is_no_child_goes_by_its_type() -> None:
    """A module kept in a plain list has no path in its caller."""
    tracker, seen = ModuleTracker(), list[str]()
    hidden = [Spy(tracker, seen)]

    class Outer(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return hidden[0](x)

    tracker.start()
    Outer()(torch.zeros(1))
    tracker.stop()
    assert seen == ["Spy"]


def test_exception_in_a_forward_leaves_no_path() -> None:
    """After it the next module is outermost again."""
    tracker, seen = ModuleTracker(), list[str]()
    tracker.start()
    with contextlib.suppress(KeyError):
        nn.Sequential(nn.Sequential(Spy(tracker, seen, KeyError())))(torch.zeros(1))
    assert tracker.current == ""
    nn.Sequential(Spy(tracker, seen))(torch.zeros(1))
    tracker.stop()
    assert seen == ["0.0", "0"]


def test_nothing_is_followed_before_start_and_after_stop() -> None:
    """Hooks on every module call cost: they are on only where somebody asks."""
    tracker, seen = ModuleTracker(), list[str]()
    model = nn.Sequential(Spy(tracker, seen))
    model(torch.zeros(1))
    tracker.start()
    tracker.start()
    model(torch.zeros(1))
    tracker.stop()
    model(torch.zeros(1))
    assert seen == ["", "0", ""]


def test_tracker_keeps_no_module_alive() -> None:
    """Its names die with the model."""
    tracker = ModuleTracker()
    tracker.start()
    model = nn.Sequential(nn.Identity())
    model(torch.zeros(1))
    tracker.stop()
    reference = weakref.ref(model)
    del model
    gc.collect()
    assert reference() is None
