"""Same bits under `torch.func` transforms, on torch's own samples of every differentiable operator."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.func import grad, jacrev, jvp, vjp, vmap
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from tests.same_bits.judge import UNLIMITED, bits_of, seed_everything
from tests.same_bits.op_database import (
    NOT_REPRODUCIBLE,
    differentiable_operators,
    operator_calls,
    uneven_gradient,
)
from tests.sampling import sample
from torchdelta import MemoryBudget

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

# The samples provoke torch's own warnings on purpose.
pytestmark = pytest.mark.filterwarnings("ignore")

NUM_CHUNKS = 32
NUM_SAMPLES = 1  # two of each passed as well, at twice the time
_MAX_JACOBIAN_INPUT = 64


def transformed(operator: Callable[..., Any], arguments: Any) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield calls of an operator under each transform, by name, on copies of its differentiable arguments."""
    leaves, tree = tree_flatten(arguments)
    places = [
        place
        for place, leaf in enumerate(leaves)
        if type(leaf) is torch.Tensor and leaf.layout is torch.strided and leaf.requires_grad
    ]
    if not places:
        return
    inputs = [leaves[place].detach().clone() for place in places]
    batches = [torch.stack([tensor, tensor * 0.5]) for tensor in inputs]
    fixed = [leaf.detach() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    positions = tuple(range(len(inputs)))

    def call(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        values = list(fixed)
        for place, tensor in zip(places, tensors, strict=True):
            values[place] = tensor.clone()
        first, args, kwargs = tree_unflatten(values, tree)
        outputs = tree_leaves(operator(first, *args, **kwargs))
        return tuple(out for out in outputs if isinstance(out, torch.Tensor) and out.is_floating_point())

    def total(*tensors: torch.Tensor) -> Any:
        return sum((out * out).sum() for out in call(*tensors))

    def pulled_back() -> Any:
        outputs, pull = vjp(call, *inputs)  # pyright: ignore[reportAssignmentType]
        return outputs, pull(tuple(uneven_gradient(out) for out in outputs))

    yield "grad", lambda: grad(total, argnums=positions)(*inputs)
    yield "vjp", pulled_back
    yield "jvp", lambda: jvp(call, tuple(inputs), tuple(torch.ones_like(tensor) for tensor in inputs))
    yield "vmap", lambda: vmap(call, randomness="different")(*batches)
    yield "vmap grad", lambda: vmap(grad(total, argnums=positions), randomness="different")(*batches)
    if sum(tensor.numel() for tensor in inputs) <= _MAX_JACOBIAN_INPUT:
        yield "jacrev", lambda: jacrev(call, argnums=positions)(*inputs)


def outcome(run: Callable[[], Any]) -> Any:
    """Return the bits of what a call gives and of the random state after it, or the error that it raises."""
    seed_everything()
    try:
        result = run()
    except Exception as error:  # noqa: BLE001 - operators without a rule for a transform: ours has to raise the same
        return type(error).__name__, str(error)
    return bits_of((result, torch.get_rng_state()))


@pytest.mark.parametrize("chunk", sample(range(NUM_CHUNKS), 1, 4))
def test_every_operator_gives_the_same_bits_under_transforms(chunk: int) -> None:
    """Results and random state inside a budget equal the plain run's, for each transform of each operator."""
    runs = [
        (f"{name} {kind}", run)
        for op in differentiable_operators()[chunk::NUM_CHUNKS]
        for name, operator, arguments in itertools.islice(operator_calls(op), NUM_SAMPLES)
        if name not in NOT_REPRODUCIBLE
        for kind, run in transformed(operator, arguments)
    ]
    expected = [outcome(run) for _, run in runs]
    again = [outcome(run) for _, run in runs]
    with MemoryBudget(UNLIMITED):
        actual = [outcome(run) for _, run in runs]
    same_twice = [index for index in range(len(runs)) if expected[index] == again[index]]
    assert [runs[index][0] for index in same_twice if actual[index] != expected[index]] == []
    assert len(same_twice) >= 40
