"""The traps of recording eager ops (1 to 14): one test a trap, judged from outside.

Each docstring names the trap by its number in the project's list.
"""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - its name everywhere
from torch import nn

from tests.same_bits.judge import (
    DECISIONS,
    Scope,
    assert_same_bits,
    assert_same_error,
    differences,
    inside_budget,
    plain_outcome,
    run,
    state_of,
)


def leaf(*shape: int) -> torch.Tensor:
    """Draw a leaf that wants a gradient."""
    return torch.randn(*(shape or (8, 8)), requires_grad=True)


def test_op_that_writes_what_was_just_saved() -> None:
    """Trap 1: rrelu fills its noise after autograd saved it, and batch norm its statistics."""

    def step(scope: Scope) -> dict[str, Any]:
        x, model = leaf(), nn.Sequential(nn.RReLU(), nn.BatchNorm1d(8), nn.RReLU(inplace=True))
        with scope():
            model(x * 2).pow(2).sum().backward()
        return state_of(model, grad=x.grad)

    assert_same_bits(step)


@pytest.mark.parametrize("write", ["add_", "relu_", "zero_", "copy_"])
def test_error_for_a_saved_tensor_written_in_place(write: str) -> None:
    """Trap 2: the version at saving decides, for evicted tensors as for kept ones."""

    def step(scope: Scope) -> dict[str, Any]:
        x = leaf()
        with scope():
            y = x * 2
            z = y.sin()
            getattr(y, write)(*([torch.ones(8, 8)] if write in {"add_", "copy_"} else []))
            z.sum().backward()
        return {"grad": x.grad}

    assert_same_error(step, RuntimeError)


def test_content_written_without_a_version_is_used() -> None:
    """Trap 2: a write through .data moves no version, so eager uses the new content."""

    def step(scope: Scope) -> dict[str, Any]:
        x = leaf()
        with scope():
            y = x * 2
            z = y.sin()
            y.data.mul_(0.5)
            z.sum().backward()
        return {"grad": x.grad}

    assert_same_bits(step)


def test_kernel_that_reads_the_grad_mode() -> None:
    """Trap 3: the fused LSTM gives a workspace only while gradients are on."""

    def step(scope: Scope) -> dict[str, Any]:
        model, x = nn.LSTM(8, 8, 2, dropout=0.2), torch.randn(5, 3, 8)
        with scope():
            output, (h, c) = model(x * 2)
            (output.sin().sum() + h.sum() * c.mean()).backward()
        return state_of(model)

    assert_same_bits(step)


def test_replay_inside_autocast() -> None:
    """Trap 4: backward runs inside autocast, and a replay must not cast again."""

    def step(scope: Scope) -> dict[str, Any]:
        model, x = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 8)), torch.randn(4, 8)
        with scope():
            hidden = model(x * 2)  # recorded outside autocast, replayed inside
            with torch.autocast("cpu", torch.bfloat16):
                (model(hidden.sin()).float() * hidden.exp()).sum().backward()
        return state_of(model)

    assert_same_bits(step)


def test_replay_under_other_settings() -> None:
    """The default dtype changes before backward: a replay has that of its first run, and gives the new one back."""

    def step(scope: Scope) -> dict[str, Any]:
        numbers, x = torch.arange(64), leaf(64)
        with scope():
            loss = (x * (numbers * 0.5)).sum()  # halves of whole numbers have the default dtype
            torch.set_default_dtype(torch.float64)
            try:
                loss.backward()
                after = torch.get_default_dtype()
            finally:
                torch.set_default_dtype(torch.float32)
        return {"grad": x.grad, "is restored": torch.tensor(after is torch.float64)}

    assert_same_bits(step)


def test_replay_of_an_op_whose_denormal_numbers_were_flushed() -> None:
    """Replays flush them where the forward did, and only there."""

    def step(scope: Scope) -> dict[str, Any]:
        x, w = torch.full((4096,), 1e-30), torch.ones(4096, requires_grad=True)
        with scope():
            torch.set_flush_denormal(True)
            try:
                flushed = x * 1e-10
            finally:
                torch.set_flush_denormal(False)
            kept = x * 1e-10
            loss = (flushed * w).sum() + (kept * w * 2).sum()
            del flushed, kept
            loss.backward()
        return {"w": w.grad}

    assert_same_bits(step)


def test_statistics_are_written_once() -> None:
    """Trap 5: batch norm writes its running statistics without saying so; a replay must not write them again."""

    def step(scope: Scope) -> dict[str, Any]:
        norm, x = nn.BatchNorm2d(4, momentum=0.3), leaf(3, 4, 5, 5)
        with scope():
            for training in (True, False, True):
                norm.train(training)(x * 2).exp().tanh().sum().backward()
        return state_of(norm, grad=x.grad)

    assert_same_bits(step)


def test_write_to_a_value_that_no_op_made() -> None:
    """Trap 6: constants written in place, partly and wholly, while replays need what they were."""

    def step(scope: Scope) -> dict[str, Any]:
        x, b, c = leaf(), torch.randn(8, 8), torch.randn(8, 8)
        with scope():
            y = x * (b + 1) * (c - 1)
            b[2:4].mul_(3)
            c.bernoulli_(0.5)
            z = (y * (b * 2) * (c * 3)).sin()
            b.zero_()
            c.fill_(2.0)
            z.sum().backward()
        return {"grad": x.grad, "b": b, "c": c}

    assert_same_bits(step)


def test_in_place_op_that_reads_its_target_twice() -> None:
    """Trap 7: every argument that is the old value must be the same copy, and never the resident one."""

    def step(scope: Scope) -> dict[str, Any]:
        x = leaf()
        with scope():
            y = x * 2
            before = (y + 0).cos()
            y.addmm_(y.clone(), y.detach().t().contiguous()).addcmul_(y.detach(), y.detach())
            y[:, 1:4].add_(y.detach()[:, 4:7])
            (y.tanh() * before).sum().backward()
        return {"grad": x.grad}

    assert_same_bits(step)


def test_views_without_alias_annotation() -> None:
    """Trap 8: outputs that share storage although their schema does not say so."""

    def step(scope: Scope) -> dict[str, Any]:
        x = leaf(4, 6, 8)
        with scope():
            y = (x * 2).reshape(24, 8).view(4, 48)
            parts = torch.split(y, [16, 32], 1)
            flat = torch.flatten(y.t().contiguous().t(), 0)
            (parts[0].sin() @ parts[1][:, :16].t()).exp().tanh().sum().backward(retain_graph=True)
            (torch.einsum("ij,kj->ik", y, y).cos().sum() + flat.exp().tanh().sum()).backward()
        return {"grad": x.grad}

    assert_same_bits(step)


def test_random_ops_of_several_generators() -> None:
    """Trap 9: each generator is rewound for a replay and left where it was."""

    def step(scope: Scope) -> dict[str, Any]:
        x, generator = leaf(), torch.Generator().manual_seed(3)
        with scope():
            y = F.dropout(x * 2, 0.4) * torch.rand(8, 8, generator=generator)
            with torch.random.fork_rng():
                torch.manual_seed(1)
                y = F.dropout(y.sin(), 0.4)
            generator.manual_seed(9)
            z = y.exp() * torch.randn(8, 8, generator=generator)
            drawn = torch.rand(2)
            z.sum().backward()
        return {"grad": x.grad, "generator": generator.get_state(), "drawn": drawn, "after": torch.rand(2)}

    assert_same_bits(step)


def test_parameter_that_changes_its_storage() -> None:
    """Trap 10: `p.data = new` changes what the object means, not what the recorded op read."""

    def step(scope: Scope) -> dict[str, Any]:
        model, x = nn.Linear(8, 8), torch.randn(4, 8)
        with scope():
            hidden = model(x).sin()
            model.bias.data = torch.zeros(8)
            model(hidden).cos().sum().backward()
        return state_of(model)

    assert_same_bits(step)


@pytest.mark.parametrize("inside", [True, False], ids=["inside", "outside"])
def test_write_between_forward_and_backward(*, inside: bool) -> None:
    """Trap 11: a bias is not saved, so eager accepts the write; a replay uses the old bias or refuses."""

    def step(scope: Scope) -> dict[str, Any]:
        model, x = nn.Linear(8, 8), torch.randn(4, 8)
        with contextlib.ExitStack() as stack:
            stack.enter_context(scope())
            total = model(x).sin().sum()
            if not inside:
                stack.close()
            with torch.no_grad():
                model.bias.add_(3)
            total.backward()
        return state_of(model)

    plain = plain_outcome(step)
    for name, decisions in DECISIONS.items():
        ours = run(step, inside_budget(decisions))
        refused = not inside and ours.raised is not None and issubclass(ours.raised, RuntimeError)
        assert refused or differences(plain, ours) == [], name


def test_functional_gradient_inside_the_scope() -> None:
    """Trap 12: torch.func.grad refuses saved-tensor hooks, so that region is left plain."""

    def step(scope: Scope) -> dict[str, Any]:
        w, x = leaf(), torch.randn(5, 8)
        with scope():
            inner = torch.func.grad(lambda row: (row @ w).sin().sum())(x[0])
            ((inner * 2).exp().sum() + (x @ w).tanh().sum()).backward()
        return {"grad": w.grad, "inner": inner}

    assert_same_bits(step)


def test_numpy_write_before_the_first_save() -> None:
    """Trap 13: a write through numpy is invisible; swapping takes the content at saving, which is right."""

    def step(scope: Scope) -> dict[str, Any]:
        x = leaf()
        with scope():
            y = x * 2
            y.detach().numpy()[0] = 7
            (y.sin() * y).sum().backward()
        return {"grad": x.grad}

    assert_same_bits(step, "swap")


class NumpyExp(torch.autograd.Function):
    """An exponential that numpy computes."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        """Compute outside torch."""
        result = torch.from_numpy(np.exp(x.detach().numpy()))
        ctx.save_for_backward(result)
        return result

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        """Use the saved result."""
        return grads[0] * ctx.saved_tensors[0]


def test_values_that_no_recorded_op_made() -> None:
    """Trap 14: tensors from numpy have no op to replay; they are held or swapped."""

    def step(scope: Scope) -> dict[str, Any]:
        x = leaf()
        with scope():
            y = NumpyExp.apply((x * 0.5).sin())
            outside = torch.from_numpy(np.linspace(0, 1, 64, dtype=np.float32).reshape(8, 8)) * 2
            (NumpyExp.apply(y.cos() * outside) * (y + 1)).sum().backward()
        return {"grad": x.grad}

    assert_same_bits(step)
