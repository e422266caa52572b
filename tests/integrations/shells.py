"""Shells of notebooks, with the extension and a small training."""

from __future__ import annotations

import atexit
import contextlib
import sys
from typing import TYPE_CHECKING

from IPython.core.interactiveshell import InteractiveShell

from torchdelta import MemoryBudget

if TYPE_CHECKING:
    from collections.abc import Iterator

SETUP = """\
import signal, torch
from torch import nn
from torchdelta import Config, MemoryBudget
config = Config(tier="memory")
def make():
    torch.manual_seed(0)
    layers = [layer for _ in range(8) for layer in (nn.Linear(64, 64), nn.Tanh())]
    model = nn.Sequential(*layers)
    return model, torch.optim.Adam(model.parameters(), lr=1e-2)
def train(model, optimizer, hook=None):
    losses = []
    for step in range(3):
        hidden = model[:8](torch.randn(2048, 64))
        if hook is not None:
            hook(step)
        loss = model[8:](hidden).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item().hex())
    return losses
"""


@contextlib.contextmanager
def notebook_shell() -> Iterator[InteractiveShell]:
    """Return a shell with the extension and the functions above; at the end, nothing that its cells made is left."""
    main = sys.modules["__main__"]
    shell = InteractiveShell()  # becomes `__main__`, without a `__spec__`: no test after it could start a process
    shell.history_manager.enabled = False
    shell.run_line_magic("colors", "nocolor")
    for cell in ("%load_ext torchdelta", SETUP):
        assert shell.run_cell(cell).success
    try:
        yield shell
    finally:
        sys.modules["__main__"] = main
    assert shell.run_cell("%unload_ext torchdelta").success
    assert MemoryBudget.current() is None
    shell.history_manager.end_session()
    # The process keeps each shell to its end (`atexit`), and the shell keeps what its cells made.
    shell.reset(new_session=False)
    atexit.unregister(shell.atexit_operations)
    for name in ("last_exc", "last_type", "last_value", "last_traceback"):
        if hasattr(sys, name):
            delattr(sys, name)
