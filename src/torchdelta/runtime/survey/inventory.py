"""What is on the device at the moment that sets the least budget: bytes by group, and the largest tensors by name.

Names cost nothing while a step fits: modules and optimizers are listed once, when a survey begins. The module that made
an activation is known from the trace of the first step, or recorded during the survey.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch

from torchdelta._torch.engine import graph_task_id
from torchdelta._torch.modules import children_of, is_built
from torchdelta._torch.storages import storage_address
from torchdelta.runtime.state.buffer import Stays
from torchdelta.runtime.state.instances import instances_of

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Mapping

    from torchdelta.modules import ModulePaths
    from torchdelta.runtime.state.buffer import StorageRecord
    from torchdelta.runtime.state.ledger import Ledger
    from torchdelta.runtime.state.observer import Observer

NUM_LARGEST_SHOWN: Final = 5

PARAMETERS: Final = "parameters"
GRADIENTS: Final = "gradients"
STATES: Final = "optimizer states"
MODULE_BUFFERS: Final = "buffers of modules"
ACTIVATIONS: Final = "activations that could not leave"
BACKWARD: Final = "gradients of activations"
HELD: Final = "held by your code"
INPUTS: Final = "inputs and other tensors"
OP: Final = "the op itself"
UNSEEN: Final = "workspace of ops and other allocations"
SMALL: Final = "small tensors between passes"
PASSED: Final = "the forward and backward before the optimizer"
TEMPORARIES: Final = "temporaries of the optimizer"
ONE_STEP: Final = "the largest op of the optimizer's step"
NO_SWAP_SPACE: Final = "what could not be swapped out"


class Inventory:
    """Names what the ledger counts. Created when a survey begins, and taken at each new maximum of the need."""

    def __init__(self, ledger: Ledger, paths: ModulePaths, observer: Observer) -> None:
        self._ledger = ledger
        self._paths = paths
        self._observer = observer
        self._made_by: dict[int, str] = {}  # address of a storage made in the survey -> path of the module
        self._named: dict[int, tuple[str, str]] = {}  # address of a storage -> its group and name
        self._parameter_names: dict[int, str] = {}  # id of a parameter -> its name
        self._name_all()

    def _name_all(self) -> None:
        modules = [module for module in instances_of(torch.nn.Module) if is_built(module)]
        children = {id(child) for module in modules for child in children_of(module)}
        modules.sort(key=lambda module: id(module) in children)  # the outermost first: theirs are the longest names
        for module in modules:
            if id(module) in children:
                break
            for name, parameter in module.named_parameters():
                self._parameter_names.setdefault(id(parameter), name)
                self._name(parameter, PARAMETERS, name)
            for name, tensor in module.named_buffers():
                self._name(tensor, MODULE_BUFFERS, name)
        for optimizer in instances_of(torch.optim.Optimizer):
            for parameter, state in getattr(optimizer, "state", {}).items():
                for key, value in state.items() if isinstance(state, dict) else ():
                    owner = self._parameter_names.get(id(parameter), "a parameter")
                    self._name(value, STATES, f"{key} of {owner}")

    def _name(self, tensor: Any, group: str, name: str) -> None:
        if isinstance(tensor, torch.Tensor):
            try:
                self._named.setdefault(storage_address(tensor), (group, name))
            except RuntimeError:
                return

    def note_outputs(self, out: Any, *, are_new: bool) -> None:
        """Record which module made the outputs of an op of the survey; new ones may have the address of an old one."""
        path = self._paths.current()
        for item in out if isinstance(out, tuple | list) else (out,):
            if (path or are_new) and isinstance(item, torch.Tensor):
                try:
                    self._made_by[storage_address(item)] = path
                except RuntimeError:
                    continue

    def module(self) -> str:
        """Return the path of the module whose forward is running, or an empty string."""
        return self._paths.current()

    def take(
        self, leaves: Mapping[int, torch.Tensor], op_bytes: int, absent: Container[int] = ()
    ) -> tuple[dict[str, int], list[tuple[str, int]]]:
        """Return the bytes of each group, including those of the op, and the largest tensors by name.

        Args:
            leaves: Leaves that have gradients, by their ids.
            op_bytes: What the running op allocates.
            absent: The ids of records that do not count.
        """
        gradients: dict[int, str] = {}
        for key, leaf in leaves.items():
            if leaf.grad is not None and leaf.grad.layout is torch.strided:  # sparse gradients have no storage
                name = self._parameter_names.get(key, "")
                gradients[storage_address(leaf.grad)] = f"gradient of {name or 'a parameter'}"
        groups: dict[str, int] = {}
        records = sorted(self._ledger.records.values(), key=lambda record: -record.size_bytes)
        largest: list[tuple[str, int]] = []
        for record in records:
            if not record.size_bytes:
                break
            if record.id in absent:
                continue
            gradient = gradients.get(record.address)
            group, name = (GRADIENTS, gradient) if gradient is not None else self._describe(record)
            groups[group] = groups.get(group, 0) + record.size_bytes
            if len(largest) < NUM_LARGEST_SHOWN:
                largest.append((name, record.size_bytes))
        return groups | {OP: op_bytes, UNSEEN: self._ledger.usage.unseen_bytes}, largest

    def _describe(self, record: StorageRecord) -> tuple[str, str]:
        named = self._named.get(record.address)
        if named is not None:
            return named[0], f"{named[1]} ({named[0].removesuffix('s')})" if named[0] == PARAMETERS else named[1]
        buffer = record.current
        if buffer is not None and buffer.stays & Stays.LEAF:
            return PARAMETERS, "a parameter"
        if buffer is None or not buffer.origin:
            is_of_backward = record.reference is None
            return (BACKWARD, "gradient of an activation") if is_of_backward else (INPUTS, "an input or other tensor")
        path = self._made_by.get(record.address) or self._observer.module_of(record)
        name = f"{path}: {buffer.origin}" if path else buffer.origin
        if buffer.num_saved or buffer.strong is not None:
            return ACTIVATIONS, name
        return (BACKWARD if graph_task_id() != -1 else HELD), name


def add_up(groups: Mapping[str, int], more: Iterable[tuple[str, int]]) -> dict[str, int]:
    """Return the groups with more bytes added to some of them, the largest group first."""
    total = dict(groups)
    for group, size_bytes in more:
        total[group] = total.get(group, 0) + size_bytes
    return {group: total[group] for group in sorted(total, key=lambda group: -total[group]) if total[group] > 0}
