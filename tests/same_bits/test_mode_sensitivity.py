"""Which backward nodes give other bits while any Python dispatch mode is active around them.

Some derivative formulas ask whether a dispatch mode is on and then take another path. The engine must never have one on
around those nodes. The list is derived here from torch's own database of operators, so that a new version of torch
that grows it fails this test and not a user's training run.
"""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.same_bits.judge import assert_same_bits, bits_of, seed_everything
from tests.same_bits.op_database import (
    NOT_REPRODUCIBLE,
    NUM_CHUNKS,
    Operator,
    backward,
    call_operator,
    differentiable_operators,
    full_name,
    operator_calls,
    operator_step,
)
from tests.sampling import sample
from torchdelta import Config, MemoryBudget

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module", autouse=True)
def _imported() -> None:
    """Import the database before the collector is told to leave imports out."""
    differentiable_operators()


class PassThrough(TorchDispatchMode):
    """A dispatch mode that does nothing but be there."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call the op as it came."""
        return func(*args, **(kwargs or {}))


def graph_nodes(outputs: Any) -> list[Any]:
    """List the nodes behind outputs, gradient accumulation left out."""
    pending = [t.grad_fn for t in tree_leaves(outputs) if isinstance(t, torch.Tensor)]
    nodes: dict[Any, None] = {}
    while pending:
        node = pending.pop()
        if node is None or node in nodes or node.name() == "torch::autograd::AccumulateGrad":
            continue
        nodes[node] = None
        pending += [following for following, _ in node.next_functions]
    return list(nodes)


def gradients(
    operator: Operator, arguments: Any, sensitive_name: str | None = None, *, everywhere: bool = False
) -> Any:
    """Run forward and backward, the latter with a mode around everything or around the nodes of one name.

    Returns:
        The bits of all gradients and the names of the nodes, or the type of what was raised.
    """
    seed_everything()
    names: set[str] = set()
    mode = PassThrough()
    open_modes = contextlib.ExitStack()
    try:
        outputs, leaves = call_operator(operator, arguments)
        for node in graph_nodes(outputs):
            names.add(node.name())
            if node.name() == sensitive_name:
                node.register_prehook(lambda _grads: open_modes.enter_context(mode) and None)
                node.register_hook(lambda _inputs, _outputs: open_modes.pop_all().close())
        with mode if everywhere else contextlib.nullcontext():
            backward(outputs)
    except Exception as error:  # noqa: BLE001 - samples that fail in plain are skipped by the caller
        return type(error), names
    finally:
        open_modes.close()
    return bits_of([leaf.grad for leaf in leaves]), names


def sensitive_nodes(operator: Operator, arguments: Any) -> set[str]:
    """Name the nodes of one sample's graph that give other bits under a mode."""
    plain, names = gradients(operator, arguments)
    if isinstance(plain, type) or gradients(operator, arguments, everywhere=True)[0] == plain:
        return set()
    found = {name for name in names if gradients(operator, arguments, name)[0] != plain}
    # A difference that no single kind of node explains is one between them; it must not be lost.
    return found or {f"between {sorted(names)}"}


@pytest.mark.parametrize("chunk", sample(range(NUM_CHUNKS), 1, 0))
def test_every_node_that_a_mode_changes_is_known(chunk: int) -> None:
    """Each node whose bits change under a mode is on the engine's list."""
    from torchdelta.runtime.record.mode_sensitive import MODE_SENSITIVE_NODES

    found: dict[str, str] = {}
    for op in differentiable_operators()[chunk::NUM_CHUNKS]:
        for sample_name, operator, arguments in operator_calls(op):
            found |= dict.fromkeys(sensitive_nodes(operator, arguments), sample_name)
    unknown = {name: sample for name, sample in found.items() if not name.startswith(tuple(MODE_SENSITIVE_NODES))}
    assert unknown == {}


def test_the_derivation_finds_a_known_one() -> None:
    """The derivative of a product along an axis is one of them, so an empty derivation would be blind."""
    operator, x = torch.prod, torch.randn(7, 9, generator=torch.Generator().manual_seed(1), requires_grad=True)
    assert sensitive_nodes(operator, (x, (0,), {})) == {"ProdBackward1"}


# On tensors without gradients, any mode changes their bits, and so does a budget: [Note: modes inside an op] in
# torchdelta/aten/facts.py.
CHANGED_BY_MODES = {
    "linalg.cond": torch.linalg.cond,
    "linalg.eigvalsh": torch.linalg.eigvalsh,
    "linalg.matrix_norm": lambda x: torch.linalg.matrix_norm(x, 2),
    "linalg.norm": lambda x: torch.linalg.norm(x, "nuc"),
    "linalg.svdvals": torch.linalg.svdvals,
    "norm.nuc": lambda x: torch.norm(x, "nuc"),
}


def outputs_without_gradients(operator: Operator, arguments: Any, scope: Any) -> Any:
    """Run one sample's forward on tensors that want no gradient.

    Returns:
        The bits of its outputs, or the type of what was raised.
    """
    seed_everything()
    try:
        with torch.no_grad(), scope:
            outputs, _ = call_operator(operator, arguments)
    except Exception as error:  # noqa: BLE001 - samples that fail in plain are skipped by the caller
        return type(error)
    return bits_of(outputs)


@pytest.mark.parametrize("chunk", sample(range(NUM_CHUNKS), 0, 1))
def test_every_op_that_a_mode_changes_without_gradients_is_known(chunk: int) -> None:
    """Where no gradient is wanted, a mode changes the outputs of no other op than those of the note."""
    found: set[str] = set()
    for op in differentiable_operators()[chunk::NUM_CHUNKS]:
        for sample_name, operator, arguments in operator_calls(op):
            if sample_name in NOT_REPRODUCIBLE:
                continue
            plain = outputs_without_gradients(operator, arguments, contextlib.nullcontext())
            if outputs_without_gradients(operator, arguments, PassThrough()) != plain:
                found.add(full_name(op))
    assert found <= set(CHANGED_BY_MODES)


def test_a_budget_changes_them_as_any_mode_does() -> None:
    """Without gradients they have the bits that a mode which does nothing gives; with gradients, those of plain."""
    x = torch.randn(8, 8, generator=torch.Generator().manual_seed(1))
    changed: list[str] = []
    for name, operator in CHANGED_BY_MODES.items():
        plain, moded, ours = (
            outputs_without_gradients(operator, (x, (), {}), scope)
            for scope in (contextlib.nullcontext(), PassThrough(), MemoryBudget("1TiB", Config(tier="memory")))
        )
        assert ours == moded, name
        if moded != plain:
            changed.append(name)
        assert_same_bits(operator_step(operator, (x.clone().requires_grad_(), (), {})))
    assert changed  # else the test above would be blind


def outputs_under_autocast(operator: Operator, arguments: Any, mode: Any) -> Any:
    """Run one sample's forward under autocast.

    Returns:
        The bits of its outputs, or the type of what was raised.
    """
    seed_everything()
    try:
        with torch.autocast("cpu", torch.bfloat16), mode:
            outputs, _ = call_operator(operator, arguments)
    except Exception as error:  # noqa: BLE001 - samples that fail in plain are skipped by the caller
        return type(error)
    return bits_of(outputs)


@pytest.mark.parametrize("chunk", sample(range(NUM_CHUNKS), 0, 1))
def test_every_op_that_autocast_changes_inside_is_known(chunk: int) -> None:
    """Under autocast the recorder gives the bits of plain; an unknown op that casts inside itself would not."""
    found: list[str] = []
    for op in differentiable_operators()[chunk::NUM_CHUNKS]:
        if op.name == "linalg.pinv":
            continue  # the one that cannot be told apart: see [Note: autocast inside an op]
        for sample_name, operator, arguments in operator_calls(op):
            if sample_name in NOT_REPRODUCIBLE:
                continue
            plain = outputs_under_autocast(operator, arguments, contextlib.nullcontext())
            if isinstance(plain, type) or plain != outputs_under_autocast(
                operator, arguments, contextlib.nullcontext()
            ):
                continue
            if outputs_under_autocast(operator, arguments, MemoryBudget("1TiB", Config(tier="memory"))) != plain:
                found.append(sample_name)
    assert found == []
