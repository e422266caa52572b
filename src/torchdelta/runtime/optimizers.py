"""What an optimizer will allocate in its first step: its states do not exist before it, and after it they stay.

Known beforehand, an impossible budget is told before the first parameter is updated, and not when half of them are.
"""

from __future__ import annotations

import collections
import copy
import gc
import logging
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable


def stateless_optimizers() -> list[torch.optim.Optimizer]:
    """Return the optimizers of this process that have not stepped yet."""
    return [thing for thing in gc.get_objects() if issubclass(type(thing), torch.optim.Optimizer) and not thing.state]


def first_step_bytes(optimizer: torch.optim.Optimizer) -> tuple[int, int]:
    """Return the bytes of the states that the first step will make, and of the temporaries of its largest parameter.

    Zeros where it cannot be known.

    A copy of the optimizer steps on meta parameters with meta gradients: shapes without memory.
    """
    try:
        # Most first steps make a state for every parameter or for none: one parameter tells, in a hundredth of the
        # time.
        if not _states_after_trial(optimizer, only_first=True):
            return 0, 0
        state_bytes = _states_after_trial(optimizer, only_first=False)
    except Exception:
        logging.getLogger("torchdelta").debug(
            "the first step of %s could not be tried on meta tensors", type(optimizer).__name__, exc_info=True
        )
        return 0, 0
    sizes_bytes = [
        p.numel() * p.element_size() for group in optimizer.param_groups for p in group["params"] if p.requires_grad
    ]
    return state_bytes, 2 * max(sizes_bytes, default=0)


def is_trial(optimizer: torch.optim.Optimizer) -> bool:
    """Say whether an optimizer is the copy on which a first step is tried.

    Its hooks are called where a subclass's `step` calls its base class's: to foresee that step too would never end.
    """
    return getattr(optimizer, "_torchdelta_trial", False)


def _states_after_trial(optimizer: torch.optim.Optimizer, *, only_first: bool) -> int:
    """Step a copy of an optimizer once on meta tensors and return the bytes of its states."""
    groups: list[dict[str, Any]] = []
    for group in optimizer.param_groups:
        trainable = [parameter for parameter in group["params"] if parameter.requires_grad]
        fakes: list[torch.nn.Parameter] = []
        for parameter in trainable[:1] if only_first else trainable:
            fake = torch.nn.Parameter(torch.empty(parameter.shape, dtype=parameter.dtype, device="meta"))
            fake.grad = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
            fakes.append(fake)
        # The fused step has no kernel without memory; its states are those of the plain one.
        groups.append({**group, "params": fakes} | {name: False for name in ("fused", "capturable") if group.get(name)})
    twin = copy.copy(optimizer)
    twin.param_groups = groups
    twin.state = collections.defaultdict(dict)
    twin._torchdelta_trial = True  # pyright: ignore[reportAttributeAccessIssue]
    step = type(optimizer).step
    getattr(step, "__wrapped__", step)(twin)
    return sum(_tensor_bytes(state.values()) for state in twin.state.values())


def _tensor_bytes(values: Iterable[Any]) -> int:
    return sum(value.numel() * value.element_size() for value in values if isinstance(value, torch.Tensor))
