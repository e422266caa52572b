"""Small whole numbers that a survey computes for real, because programs read them.

[Note: small values in a survey]
If the tensors that exist at the start already exceed the budget, the survey begins at the first op. This is often an op
of a data loader that computes the order of rows (`randperm(...).tolist()`), a seed, or the number of labels in a batch.
A fake tensor has no values to read, so the survey would end there, before it has seen the step. Ops whose arguments are
all real, and whose results are whole numbers or booleans, are therefore run for real, up to a mebibyte in a survey.
Such results are not differentiable, so none belongs to an autograd graph. A tensor whose write the survey skipped is
out of date and is never read. When the survey ends, the states of generators are restored: in plain torch nothing would
have drawn from them after the error.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, Final

import torch

from torchdelta._torch.ops import execute
from torchdelta._torch.storages import storage_address
from torchdelta.aten.facts import Kind
from torchdelta.runtime.state.kinds import tensors_in
from torchdelta.runtime.state.tape import generator_of

if TYPE_CHECKING:
    from torchdelta.aten.facts import OpFacts

_MOST_BYTES: Final = 1 << 20
_PLAIN_TYPES: Final = (torch.Tensor, torch.nn.Parameter)


class SmallValues:
    """Which tensors of a survey have true values, and which are out of date. Mutable."""

    def __init__(self) -> None:
        self._left_bytes = _MOST_BYTES
        self._made: dict[int, weakref.ref[torch.Tensor]] = {}  # by id: computed here, so it may be written, too
        self._stale: set[int] = set()  # addresses of real storages that the survey did not write
        self._random_states: dict[torch.Generator, torch.Tensor] = {}  # before the survey drew from them

    def reads_true_values(self, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> bool:
        """Return whether all tensors among an op's arguments are real and up to date."""
        tensors = list(tensors_in((args, kwargs)))
        if not all(type(tensor) in _PLAIN_TYPES and not tensor.is_meta for tensor in tensors):
            return False
        return not any(storage_address(tensor) in self._stale for tensor in tensors)

    def has(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor was computed here."""
        reference = self._made.get(id(tensor))
        return reference is not None and reference() is tensor

    def may_write(self, targets: list[torch.Tensor]) -> bool:
        """Return whether all targets of an op were computed here. Others of the program are not changed."""
        return all(map(self.has, targets))

    def note_unwritten(self, targets: list[torch.Tensor]) -> None:
        """Remember that the program has written real tensors, and the survey has not."""
        self._stale.update(storage_address(target) for target in targets if type(target) in _PLAIN_TYPES)

    def execute(self, func: Any, facts: OpFacts, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
        """Run an op for real."""
        generator = generator_of(facts, args, kwargs)
        if generator is not None and generator not in self._random_states:
            self._random_states[generator] = generator.get_state()
        return execute(func, facts, args, kwargs)

    def restore(self) -> None:
        """Undo what was drawn from generators."""
        for generator, state in self._random_states.items():
            generator.set_state(state)
        self._random_states.clear()

    def run(self, func: Any, facts: OpFacts, args: tuple[Any, ...], kwargs: dict[str, Any] | None, fake: Any) -> Any:
        """Run an op that makes whole numbers, and return them; `fake`, its fake result, if it is none of these."""
        fakes = list(tensors_in(fake))
        size_bytes = sum(tensor.nbytes for tensor in fakes)
        is_whole = all(not tensor.is_floating_point() and not tensor.is_complex() for tensor in fakes)
        if facts.kind is not Kind.COMPUTE or not fakes or not is_whole or size_bytes > self._left_bytes:
            return fake
        self._left_bytes -= size_bytes
        out = self.execute(func, facts, args, kwargs)
        for tensor in tensors_in(out):
            self._made[id(tensor)] = weakref.ref(tensor)
        return out
