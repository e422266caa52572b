"""Finds the persistent tensors of a session: parameters, their gradients, and the states of their optimizers.

A process may train other models on other threads, whose tensors must stay. So a model, which is a module in no other
one, belongs to the session once an op of its thread reads one of its parameters, and so does an optimizer.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch

from torchdelta._torch.modules import children_of, is_built, own_parameters_of
from torchdelta._torch.storages import storage_address, storage_behind
from torchdelta.runtime.state.instances import instances_of, living_optimizers
from torchdelta.runtime.state.kinds import tensors_in
from torchdelta.runtime.state.persistent import Persistent

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from torchdelta.runtime.state.ledger import Ledger

__all__ = ["Owners"]

_PLAIN = (torch.Tensor, torch.nn.Parameter)


class Owners:
    """The parameters and optimizers that were found so far."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._was_searched = False
        # Not of parameters: `torch.utils.swap_tensors` refuses tensors with weak references.
        self._models: list[list[weakref.ref[torch.nn.Module]]] = []  # the modules of each
        self._optimizers: dict[int, weakref.ref[torch.optim.Optimizer]] = {}  # by id

    def find(self, is_thorough: bool, in_use: set[int]) -> list[Persistent]:
        """Return the persistent tensors that this session uses.

        Args:
            is_thorough: Look for new owners first.
            in_use: The addresses of what the running op reads. It may be the first that reads a parameter.
        """
        if is_thorough or not self._was_searched:
            self._search()
        found: list[Persistent] = []
        seen: set[int] = set()
        optimizers = [optimizer for reference in self._optimizers.values() if (optimizer := reference()) is not None]
        used = [each for each in optimizers if any(self._is_used(p, in_use) for p in _parameters_of(each))]
        parameters: dict[int, torch.Tensor] = {}
        owned: list[Sequence[torch.Tensor]] = [_parameters_of(optimizer) for optimizer in used]
        for model in self._models:
            modules = [module for reference in model if (module := reference()) is not None]
            own = [parameter for module in modules for parameter in own_parameters_of(module)]
            if any(self._is_used(parameter, in_use) for parameter in own):
                owned.append(own)
        for each in owned:
            parameters.update((id(parameter), parameter) for parameter in each)
        for parameter in parameters.values():
            self._add(found, seen, parameter)
        for parameter in parameters.values():
            gradient = parameter.grad
            if gradient is not None:
                self._add(found, seen, gradient, -id(parameter), is_gradient=True)
        for optimizer in used:
            for state in tensors_in(_states_of(optimizer)):
                self._add(found, seen, state, is_state=True)
        return found

    def knows(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether a search has found this optimizer."""
        reference = self._optimizers.get(id(optimizer))
        return reference is not None and reference() is optimizer

    def _search(self) -> None:
        self._was_searched = True
        self._models = [
            [weakref.ref(module) for module in model] for model in _models_of(instances_of(torch.nn.Module))
        ]
        self._optimizers = {id(optimizer): weakref.ref(optimizer) for optimizer in living_optimizers()}

    def _is_used(self, parameter: torch.Tensor, in_use: set[int]) -> bool:
        try:
            record = self._ledger.records.get(storage_address(parameter))
        except RuntimeError:
            return False
        if record is None:
            return False
        return record.current is not None or record.emptied is not None or record.address in in_use

    def _add(
        self,
        found: list[Persistent],
        seen: set[int],
        tensor: torch.Tensor,
        key: int = 0,
        *,
        is_gradient: bool = False,
        is_state: bool = False,
    ) -> None:
        if type(tensor) not in _PLAIN or tensor.layout is not torch.strided or tensor.device != self._ledger.device:
            return
        record = self._ledger.records.get(storage_address(tensor))
        # No op has read it since the scope began, or an op in backward has made it. The storage object of a gradient is
        # not made here: see [Note: storages are known by address] in _torch/storages.py.
        if not is_gradient and (record is None or record.reference is None):
            record = self._ledger.know(storage_behind(tensor))
        if record is not None and record.reference is not None and record.id not in seen:
            seen.add(record.id)
            found.append(Persistent(record, key or record.id, is_gradient, is_state))


def _models_of(modules: Iterable[torch.nn.Module]) -> Iterator[list[torch.nn.Module]]:
    """Yield the modules of each model. One that is in several models is yielded with each of them."""
    built = {id(module): module for module in modules if is_built(module)}
    inner = {id(child) for module in built.values() for child in children_of(module)}
    reached: set[int] = set()
    # Modules that contain each other are in no outermost one: they come last.
    for outermost in sorted(built.values(), key=lambda module: id(module) in inner):
        if id(outermost) in reached:
            continue
        found: dict[int, torch.nn.Module] = {}
        waiting = [outermost]
        while waiting:
            module = waiting.pop()
            if id(module) not in found and is_built(module):
                found[id(module)] = module
                waiting += [child for child in children_of(module) if child is not None]
        reached.update(found)
        yield list(found.values())


def _parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return [parameter for parameter in parameters if isinstance(parameter, torch.Tensor)]


def _states_of(optimizer: torch.optim.Optimizer) -> list[Any]:
    states = getattr(optimizer, "state", {})
    return list(states.values()) if isinstance(states, dict) else []
