"""Which ops may add in another order when they run again on an accelerator."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest
import torch

from torchdelta.aten.facts import facts_of
from torchdelta.aten.order import is_fixed_here, order_varies
from torchdelta.aten.recomputable import RECOMPUTABLE
from torchdelta.runtime.device.device import Device

if TYPE_CHECKING:
    from collections.abc import Iterator

aten = torch.ops.aten
# What torch's list says of these is about their backward, which makes other ops, or about sparse tensors. Convolutions
# and matrix products are fixed in forward: see order.py.
OF_THE_BACKWARD_ONLY = {
    "Conv1d", "Conv2d", "Conv3d", "ConvTranspose1d", "ConvTranspose2d", "ConvTranspose3d", "ReplicationPad1d",
    "ReplicationPad2d", "ReplicationPad3d", "bmm", "__getitem__", "gather", "index_select", "MaxPool3d", "AvgPool3d",
    "AdaptiveAvgPool2d", "AdaptiveAvgPool3d", "AdaptiveMaxPool2d", "FractionalMaxPool2d", "FractionalMaxPool3d",
    "interpolate", "ReflectionPad1d", "ReflectionPad2d", "ReflectionPad3d", "CTCLoss", "EmbeddingBag", "grid_sample",
    "resize_", "Embedding",
}  # fmt: skip
NAMES_IN_ATEN = {
    "MaxUnpool1d": "max_unpool2d",
    "MaxUnpool2d": "max_unpool2d",
    "MaxUnpool3d": "max_unpool3d",
    "NLLLoss": "nll_loss2d_forward",
}


@pytest.fixture
def deterministic() -> Iterator[None]:
    """Switch deterministic mode on for a test."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def test_torchs_own_list_is_covered() -> None:
    """Every op that torch's documentation says to be nondeterministic in forward is in the list."""
    text = torch.use_deterministic_algorithms.__doc__ or ""
    text = text[text.index("The following normally-nondeterministic") : text.index("In addition, several operations")]
    named = {name.rsplit(".", 1)[-1] for name in re.findall(r"\* :(?:class|func):`([^`]+)`", text)}
    assert len(named) > 25
    missing = {
        name for name in named - OF_THE_BACKWARD_ONLY if not order_varies(NAMES_IN_ATEN.get(name, name), "default")
    }
    assert not missing


def test_backward_formulas_are_not_trusted() -> None:
    """A double backward records them; on an accelerator many add by atomics."""
    backward = {name for name in RECOMPUTABLE if "backward" in name}
    assert "convolution_backward" in backward
    assert all(order_varies(name, "") for name in backward if not name.endswith("for_cpu_backward"))


@pytest.mark.parametrize("name", ["addmm", "mm", "convolution", "native_layer_norm", "gelu", "index_select", "sum"])
def test_the_ops_of_ordinary_models_are_fixed(name: str) -> None:
    """What models are made of can be recomputed without deterministic mode."""
    assert not order_varies(name, "default")


def test_numbers_decide() -> None:
    """Sums of integers have no order, nor have counts without weights, nor one value for every index."""
    ints, floats = torch.ones(3, dtype=torch.int64), torch.ones(3)

    def is_fixed(op: Any, *args: Any, **kwargs: Any) -> bool:
        facts = facts_of(op)
        return not facts.order_varies or is_fixed_here(facts.base_name, args, kwargs)

    assert is_fixed(aten.cumsum.default, ints, 0)
    assert not is_fixed(aten.cumsum.default, floats, 0)
    assert not is_fixed(aten.cumsum.default, ints, 0, dtype=torch.float32)
    assert is_fixed(aten.bincount.default, ints)
    assert not is_fixed(aten.bincount.default, ints, floats)
    assert is_fixed(aten.scatter.value, floats, 0, ints, 1.0)
    assert not is_fixed(aten.scatter.src, floats, 0, ints, floats)
    assert not is_fixed(aten.index_add.default, floats, 0, ints, floats)


@pytest.mark.usefixtures("deterministic")
def test_deterministic_mode_fixes_everything() -> None:
    """There every kernel is fixed, or refuses; with warnings only it may run all the same, and is not trusted."""
    assert is_fixed_here("index_add", (), None)
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert not is_fixed_here("index_add", (), None)


@pytest.fixture
def two_threads() -> Iterator[None]:
    """Let kernels run on two threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


MANY = 40_000
INTS = torch.zeros(MANY, dtype=torch.int64)
FLOATS = torch.ones(MANY)
FEW = torch.zeros(10, dtype=torch.int64)
TARGET = torch.zeros(4, 5)
MASKED_PUT = getattr(aten, "_unsafe_masked_index_put_accumulate").default  # noqa: B009 - a private name


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize(
    ("op", "args", "races"),
    [
        (aten.put.default, (TARGET, INTS, FLOATS, True), True),
        (aten.put.default, (TARGET, INTS, FLOATS), True),
        (aten.put.default, (TARGET, FEW, torch.ones(10), True), False),
        (aten.put.default, (TARGET.long(), INTS, INTS, True), False),
        (aten.put.default, (TARGET.long(), INTS, INTS), True),
        (aten.index_copy.default, (torch.zeros(4), 0, INTS, FLOATS), True),
        (aten.index_put.default, (TARGET, [INTS, INTS], FLOATS, True), True),
        (aten.index_put.default, (TARGET, [INTS, INTS], torch.ones(1)), False),
        (aten.index_put.default, (TARGET, [INTS, INTS], torch.ones(1), True), True),
        (aten.index_put.default, (TARGET, [FEW, FEW], torch.ones(10), True), False),
        (aten.index_put.default, (torch.zeros(4, MANY), [FEW], torch.ones(10, MANY), True), True),
        (aten.index_put.default, (torch.zeros(MANY, 4), [None, FEW], torch.ones(MANY, 10), True), True),
        (aten.index_put.default, (TARGET, [INTS[:200, None], INTS[:200]], torch.ones(200, 200), True), True),
        (aten.index_put.default, (FLOATS, [FLOATS > 0], FLOATS, True), False),
        (MASKED_PUT, (TARGET, FLOATS > 0, [INTS, INTS], FLOATS), True),
    ],
)
def test_threads_of_a_cpu_may_write_one_place(op: Any, args: tuple[Any, ...], races: bool) -> None:
    """Then the op is not replayed there; with few elements, with one thread and in deterministic mode it is."""
    facts, device = facts_of(op), Device(torch.device("cpu"))
    assert device.may_replay(facts, args, None) is not races
    torch.set_num_threads(1)
    assert device.may_replay(facts, args, None)
