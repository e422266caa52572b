"""torch's own databases of operators and modules as training steps.

`torch.testing._internal` lists every differentiable operator (`op_db`) and module (`module_db`) with sample inputs: the
cheapest wide judge there is. Every sample becomes a forward and a backward whose inputs are results of an op inside the
scope, because an engine may treat leaves differently.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from tests.same_bits.judge import Scope, Step, seed_everything, state_of

Operator = Callable[..., Any]

MAX_SAMPLES = 4
NUM_CHUNKS = 16
# Plain does not equal itself on these (one run in some dozens differs): there is nothing to compare with.
NOT_REPRODUCIBLE = frozenset({"linalg.lstsq[3]", "linalg.lstsq.grad_oriented[3]"})


@functools.cache
def differentiable_operators() -> tuple[Any, ...]:
    """List every operator with a float32 derivative on the CPU."""
    from torch.testing._internal.common_methods_invocations import op_db

    return tuple(op for op in op_db if op.supports_autograd and op.supports_dtype(torch.float32, "cpu"))


@functools.cache
def module_infos() -> tuple[Any, ...]:
    """List every module that torch ships with samples for."""
    from torch.testing._internal.common_modules import module_db

    return tuple(info for info in module_db if torch.float32 in info.dtypes)


def full_name(op: Any) -> str:
    """Name an operator with its variant."""
    return f"{op.name}.{op.variant_test_name}" if op.variant_test_name else op.name


def operator_calls(op: Any) -> Iterator[tuple[str, Operator, Any]]:
    """Give a name, the operator and its arguments, for each of its first samples and, where there is one, in place."""
    seed_everything()
    samples = itertools.islice(op.sample_inputs("cpu", torch.float32, requires_grad=True), MAX_SAMPLES)
    for index, sample in enumerate(samples):
        arguments = (sample.input, sample.args, sample.kwargs)
        yield f"{full_name(op)}[{index}]", op.op, arguments
        if op.inplace_variant is not None and not sample.broadcasts_input:
            yield f"{full_name(op)}_[{index}]", op.inplace_variant, arguments


def call_operator(operator: Operator, arguments: Any) -> tuple[Any, list[torch.Tensor]]:
    """Call an operator on intermediate results: copies of its arguments' fresh leaves.

    Returns:
        What it returned, and the leaves whose gradients tell whether it was right.
    """
    leaves: list[torch.Tensor] = []

    def intermediate(value: Any) -> Any:
        if type(value) is not torch.Tensor or value.layout is not torch.strided:
            return value
        leaf = value.detach().clone()
        if value.requires_grad:
            leaves.append(leaf.requires_grad_())
        return leaf.clone()

    first, args, kwargs = tree_map(intermediate, arguments)
    return operator(first, *args, **kwargs), leaves


def backward(outputs: Any) -> list[torch.Tensor]:
    """Send an uneven gradient back through every differentiable output.

    Returns:
        The outputs that had a gradient; empty where nothing is differentiable.
    """
    tensors = [value for value in tree_leaves(outputs) if isinstance(value, torch.Tensor) and value.requires_grad]
    tensors = [tensor for tensor in tensors if tensor.is_floating_point() or tensor.is_complex()]
    if tensors:
        torch.autograd.backward(tensors, [uneven_gradient(tensor) for tensor in tensors])
    return tensors


def uneven_gradient(output: torch.Tensor) -> torch.Tensor:
    """Draw a gradient whose entries differ, so that a permuted part or another order of summation is seen."""
    generator = torch.Generator().manual_seed(11)
    return torch.randn(output.shape, generator=generator, dtype=output.dtype)


def operator_step(operator: Operator, arguments: Any) -> Step:
    """Make a training step of one operator call."""

    def step(scope: Scope) -> dict[str, Any]:
        with scope():
            outputs, leaves = call_operator(operator, arguments)
            differentiated = backward(outputs)
        return {"outputs": differentiated, "grads": [leaf.grad for leaf in leaves]}

    return step


def module_calls(info: Any, *, training: bool, autocast: bool = False) -> Iterator[Step]:
    """Make a training step of each of a module's first samples."""
    seed_everything()
    samples = info.module_inputs_func(info, "cpu", torch.float32, requires_grad=True, training=training)
    for sample in itertools.islice(samples, MAX_SAMPLES):
        if sample.forward_input is not None:
            build, call = sample.constructor_input, sample.forward_input
            make = functools.partial(info.module_cls, *build.args, **build.kwargs)
            yield module_step(make, call.args, call.kwargs, training=training, autocast=autocast)


def module_step(
    make: Callable[[], torch.nn.Module],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    training: bool,
    autocast: bool = False,
) -> Step:
    """Make a training step of one module with one input; under autocast only its forward is."""

    def step(scope: Scope) -> dict[str, Any]:
        module = make().train(training)

        def call(args: Any, kwargs: Any) -> Any:
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                return module(*args, **kwargs)

        with scope():
            outputs, leaves = call_operator(call, (tuple(args), (dict(kwargs),), {}))
            differentiated = backward(outputs)
        return state_of(module, outputs=differentiated, grads=[leaf.grad for leaf in leaves])

    return step
