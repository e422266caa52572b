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

from torchdelta import _torch

if TYPE_CHECKING:
    from collections.abc import Iterable


def stateless_optimizers() -> list[torch.optim.Optimizer]:
    """Return the optimizers of this process that have not stepped yet."""
    return [thing for thing in gc.get_objects() if issubclass(type(thing), torch.optim.Optimizer) and not thing.state]


def first_step_bytes(optimizer: torch.optim.Optimizer) -> tuple[int, int]:
    """Return the bytes of the states that the first step will make, and of the temporaries of its largest parameter; zeros where it cannot be known.

    A copy of the optimizer steps on fake parameters with fake gradients.
    """
    largest_bytes = 0
    try:
        with _torch.FakeTensorMode() as mode:
            del mode
            groups: list[dict[str, Any]] = []
            for group in optimizer.param_groups:
                fakes: list[torch.nn.Parameter] = []
                for parameter in group["params"]:
                    if not parameter.requires_grad:
                        continue
                    fake = torch.nn.Parameter(torch.empty(parameter.shape, dtype=parameter.dtype))
                    fake.grad = torch.empty(parameter.shape, dtype=parameter.dtype)
                    fakes.append(fake)
                    largest_bytes = max(largest_bytes, parameter.numel() * parameter.element_size())
                groups.append({**group, "params": fakes})
            twin = copy.copy(optimizer)
            twin.param_groups = groups
            twin.state = collections.defaultdict(dict)
            step = type(optimizer).step
            getattr(step, "__wrapped__", step)(twin)
            state_bytes = sum(_tensor_bytes(state.values()) for state in twin.state.values())
    except Exception:  # noqa: BLE001 - an optimizer that cannot be tried this way is met by the checks before each of its ops
        logging.getLogger("torchdelta").debug("the first step of %s could not be tried on fake tensors", type(optimizer).__name__, exc_info=True)
        return 0, 0
    return state_bytes, 2 * largest_bytes


def _tensor_bytes(values: Iterable[Any]) -> int:
    return sum(value.numel() * value.element_size() for value in values if isinstance(value, torch.Tensor))
