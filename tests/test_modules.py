"""The path of the module whose forward is running."""

from __future__ import annotations

import torch
from torch import nn

from torchdelta.modules import ModulePaths


class Spy(nn.Module):
    """Notes the path while it runs."""

    def __init__(self, paths: ModulePaths, seen: list[str]) -> None:
        super().__init__()
        self.paths = paths
        self.seen = seen

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Look."""
        self.seen.append(self.paths.current())
        return x


class Caller(nn.Module):
    """Runs a module that is not registered on it."""

    def __init__(self, other: nn.Module) -> None:
        super().__init__()
        self.others = [other]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run it."""
        return self.others[0](x)


def test_paths_are_those_of_named_modules() -> None:
    """Nested modules have dotted paths, relative to the outermost one that was called; outside of all there is none."""
    paths, seen = ModulePaths(), list[str]()
    nn.Sequential(Spy(paths, seen), nn.Sequential(nn.Identity(), Spy(paths, seen)))(torch.zeros(1))
    assert seen == ["0", "1.1"]
    assert paths.current() == ""


def test_a_module_that_is_not_registered_has_its_class_name() -> None:
    """A parent may call what it does not own."""
    paths, seen = ModulePaths(), list[str]()
    Caller(Spy(paths, seen))(torch.zeros(1))
    assert seen == ["Spy"]


def test_outermost_modules_are_told() -> None:
    """Whoever asks hears of each root once, and is not kept alive by it."""

    class Listener:
        def __init__(self) -> None:
            self.roots: list[nn.Module] = []

        def hear(self, root: nn.Module) -> None:
            self.roots.append(root)

    listener, seen = Listener(), list[str]()
    paths = ModulePaths(listener.hear)
    model = nn.Sequential(Spy(paths, seen))
    model(torch.zeros(1))
    model(torch.zeros(1))
    assert listener.roots == [model]
    assert seen == ["0", "0"]
