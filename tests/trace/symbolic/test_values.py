"""Small values that hang on constants are known; what hangs on anything unknown is not."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from torchdelta._torch.fake import FakeTensor, FakeTensorMode
from torchdelta.errors import TraceError
from torchdelta.trace.symbolic.values import MAX_ELEMENTS, VALUES_WANTED, KnownValues, usual_methods


def value_of(function: Any) -> Any:
    """What a function returns on fake tensors."""
    with FakeTensorMode(allow_non_fake_inputs=True), KnownValues():
        return function()


def written_through_a_view() -> list[float]:
    """A view writes its base."""
    x = torch.zeros(4)
    x[1:3].add_(torch.arange(2)).mul_(2)
    x.view(2, 2)[0, 0] = 7
    return x.tolist()


def of_shapes_that_depend_on_values() -> tuple[int, list[int]]:
    """Fake tensors cannot have such shapes."""
    x = torch.tensor([3, -1, 5, -1])
    kept = x.masked_select(x > 0)
    return len(kept), kept.tolist() + x.nonzero().flatten().tolist()


KNOWN = {
    "a list of rates": (lambda: torch.linspace(0, 1, 3).tolist(), [0, 0.5, 1]),
    "a literal": (lambda: float(torch.tensor([1.0, 2.0]).sum() * 2), 6),
    "a branch": (lambda: bool((torch.ones(3, 3).cumsum(0) > 2).any()), True),
    "equal": (lambda: torch.equal(torch.ones(2), torch.full((2,), 1.0)), True),
    "written through a view": (written_through_a_view, [7, 0, 2, 0]),
    "shapes of values": (of_shapes_that_depend_on_values, (2, [3, 5, 0, 1, 2, 3])),
    "many tokens": (lambda: bool((torch.randint(1, 9, (64, 2048)) == 0).any()), False),
    "copied": (lambda: torch.empty(2).copy_(torch.tensor([1, 2])).to(torch.int64).tolist(), [1, 2]),
}


def experts_loads() -> list[int]:
    """How many of 6 tokens each of 4 experts gets, two a token."""
    scores = torch.nn.Linear(8, 4)(torch.randn(6, 8))
    return torch.bincount(scores.topk(2, dim=-1)[1].flatten(), minlength=4).tolist()


def tokens_per_expert() -> list[int]:
    """The same, counted in a one-hot mask of a batch as people train it: 2 million elements."""
    scores = torch.nn.Linear(8, 64)(torch.randn(4096, 8))
    mask = torch.nn.functional.one_hot(scores.topk(8, dim=-1)[1], num_classes=64)
    return [len(mask[:, :, int(expert)].nonzero()) for expert in mask.sum((0, 1)).nonzero().flatten()[:3]]


GRANTED = {
    "experts of a large batch": (tokens_per_expert, [512, 512, 512]),
    "no NaN": (lambda: bool(large().isnan().any()), False),
    "not unequal to itself": (lambda: bool((x := large()).ne(x).any()), False),
    "no infinity": (lambda: bool(large().isinf().any()), False),
    "experts that share": (experts_loads, [3, 3, 3, 3]),
}


@pytest.mark.parametrize("case", GRANTED)
def test_granted(case):
    """What is taken for granted of values that are not known."""
    function, expected = GRANTED[case]
    assert value_of(function) == expected


@pytest.mark.parametrize("case", KNOWN)
def test_known(case):
    """Constants, and all that is computed from them, views and writes in place included."""
    function, expected = KNOWN[case]
    assert value_of(function) == expected


def test_random_numbers_are_known():
    """A layer may be dropped by a random number."""
    assert 0 <= value_of(lambda: torch.rand([]).item()) < 1


def large() -> torch.Tensor:
    """A tensor whose value nobody keeps."""
    return torch.zeros(MAX_ELEMENTS + 1)


def written_from_unknown() -> Any:
    """A known tensor becomes unknown with all its views."""
    x = torch.zeros(4)
    view = x[1:]
    x.add_(large().sum())
    return view.tolist()


UNKNOWN = {
    "large": lambda: float(large()[0]),
    "from a large one": lambda: large().sum().item(),
    "written": written_from_unknown,
    "a parameter": lambda: torch.nn.Linear(2, 2).weight.sum().item(),
}


@pytest.mark.parametrize("case", UNKNOWN)
def test_unknown(case):
    """What depends on anything unknown stays so: fake tensors say that they have no value."""
    with pytest.raises(Exception) as caught:
        value_of(UNKNOWN[case])
    assert type(caught.value).__name__ in VALUES_WANTED


def test_a_copy_has_its_own_value():
    """Models are built of copies of layers; what is written into one is not in the other."""

    def values() -> list[list[float]]:
        module = torch.nn.BatchNorm1d(2)
        with usual_methods():
            other = copy.deepcopy(module)
        other.running_mean.add_(3)
        assert isinstance(other.weight, torch.nn.Parameter)
        return [module.running_mean.tolist(), other.running_mean.tolist()]

    assert value_of(values) == [[0, 0], [3, 3]]


def test_numpy_gets_what_is_known():
    """What is not known is one clear line."""

    def ask(tensor: torch.Tensor) -> Any:
        with usual_methods():
            return tensor.numpy().tolist()

    assert value_of(lambda: ask(torch.arange(3))) == [0, 1, 2]
    with pytest.raises(TraceError, match="the value of a tensor that is not known"):
        value_of(lambda: ask(large()))


def test_everything_stays_fake():
    """The values are beside the tensors: nothing real gets out."""
    out = value_of(lambda: [torch.ones(2), torch.ones(2)[1:], torch.tensor([1, 0]).nonzero(), torch.ones(2).add_(1)])
    assert all(isinstance(tensor, FakeTensor) for tensor in out)
