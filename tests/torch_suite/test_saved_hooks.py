"""Saved-tensor hooks of the user's, inside budgets that put hooks of their own."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.torch_suite.budgets import assert_same, assert_same_failure

if TYPE_CHECKING:
    from pathlib import Path

    from tests.same_bits.judge import Scope


def leaf(*shape: int) -> torch.Tensor:
    """Draw a leaf that wants a gradient, large enough to be worth evicting."""
    return torch.randn(*(shape or (64, 64)), requires_grad=True)


SAVED_ON_DISK = """
import sys, pathlib, uuid, torch
from torchdelta import Config, MemoryBudget

folder = pathlib.Path(sys.argv[1])

def pack(tensor):
    path = folder / uuid.uuid4().hex
    torch.save(tensor, path)
    return path

def unpack(path):
    return torch.load(path)

def step():
    torch.manual_seed(0)
    x = torch.randn(64, 64, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        square = x * x
        assert torch.equal(square.grad_fn._saved_self, x)
        hidden = square.sin() * 2
        hidden.exp().sum().backward()
    return x.grad

expected = step()
for decisions in (None, "recompute", "swap"):
    for _ in range(3):
        with MemoryBudget("8GiB", Config(decisions=decisions, tier="memory")):
            actual = step()
        assert torch.equal(actual, expected)
print("equal")
"""


@pytest.mark.rest
def test_saved_tensors_that_the_user_writes_to_files(tmp_path: Path) -> None:
    """Hooks as in torch's tutorial, which save to a file and load it back, in a process of their own."""
    done = subprocess.run(
        [sys.executable, "-c", SAVED_ON_DISK, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, "equal\n"), done.stderr[-2000:]


def test_saved_tensors_that_the_user_turns_into_bytes() -> None:
    """Hooks that keep bytes in place of tensors and rebuild them from a buffer."""

    def pack(tensor: torch.Tensor) -> tuple[bytes, torch.dtype, torch.Size]:
        return tensor.detach().contiguous().numpy().tobytes(), tensor.dtype, tensor.shape

    def unpack(packed: tuple[bytes, torch.dtype, torch.Size]) -> torch.Tensor:
        content, dtype, shape = packed
        return torch.frombuffer(bytearray(content), dtype=dtype).reshape(shape)

    def step(scope: Scope) -> dict[str, Any]:
        x = leaf()
        with scope():
            before = (x * 2).tanh()
            with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
                inside = (before * before).sin()
            inside.exp().sum().backward()
        return {"grad": x.grad}

    assert_same(step)


def test_nested_saved_tensor_hooks() -> None:
    """The innermost of two pairs of hooks wins, and the scope's come back after both."""

    def step(scope: Scope) -> dict[str, Any]:
        x, seen = leaf(), []
        double = torch.autograd.graph.saved_tensors_hooks(lambda t: t.double(), lambda t: t.float())
        count = torch.autograd.graph.saved_tensors_hooks(lambda t: seen.append(tuple(t.shape)) or t, lambda t: t)
        with scope():
            with count:
                hidden = (x * 2).sin()
                with double:
                    hidden = hidden.cos()
                hidden = hidden.exp()
            hidden.tanh().sum().backward()
        return {"grad": x.grad, "seen": seen}

    assert_same(step)


def test_saved_tensor_hooks_on_a_single_node() -> None:
    """Raw saved tensors take hooks of their own: here one that doubles what is unpacked."""

    def step(scope: Scope) -> dict[str, Any]:
        x = leaf()
        with scope():
            hidden = x.exp()
            hidden.sum().backward()
        with torch.autograd.graph.disable_saved_tensors_hooks("none here"):
            y = x.detach().clone().requires_grad_()
            z = y * y
            z.grad_fn._raw_saved_self.register_hooks(lambda t: t * 2, lambda t: t)
            z.sum().backward()
        return {"grad": x.grad, "second": y.grad}

    assert_same(step)


def test_saved_tensor_hooks_that_raise_when_packing() -> None:
    """An error of the user's pack hook reaches the user as it is."""

    def refuse(_tensor: torch.Tensor) -> Any:
        raise KeyError("refused")

    def step(scope: Scope) -> dict[str, Any]:
        x = leaf()
        with scope(), torch.autograd.graph.saved_tensors_hooks(refuse, lambda t: t):
            (x * 2).sin().sum().backward()
        return {}

    assert_same_failure(step, KeyError)
