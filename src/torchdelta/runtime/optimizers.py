"""What an optimizer will allocate in its first step: its states do not exist before it, and after it they stay.

Known beforehand, an impossible budget is told before the first parameter is updated, and not when half of them are.
"""

from __future__ import annotations

import collections
import copy
import gc
import logging
import weakref
from typing import TYPE_CHECKING, Any

import torch

from torchdelta._torch import TorchDispatchMode, storage_address
from torchdelta._torch_device import default_to_foreach

if TYPE_CHECKING:
    from collections.abc import Iterable


def stateless_optimizers() -> list[torch.optim.Optimizer]:
    """Return the optimizers of this process that have not stepped yet."""
    return [thing for thing in gc.get_objects() if issubclass(type(thing), torch.optim.Optimizer) and not thing.state]


def first_step_bytes(optimizer: torch.optim.Optimizer) -> tuple[int, int]:
    """Return the bytes of the states that the first step will make, and of its temporaries. Zeros where it is unknown.

    A copy of the optimizer steps on meta parameters with meta gradients: shapes without memory. Parameter by parameter
    the temporaries are those of the largest; by lists (`foreach`, which is the default on accelerators) they are as
    large as all parameters together.
    """
    try:
        # Most first steps make a state for every parameter or for none: one parameter tells, in a hundredth of the
        # time.
        if not _try_step(optimizer, only_first=True)[0]:
            return 0, 0
        state_bytes, temporary_bytes = _try_step(optimizer, only_first=False)
    except Exception:
        logging.getLogger("torchdelta").debug(
            "the first step of %s could not be tried on meta tensors", type(optimizer).__name__, exc_info=True
        )
        return 0, 0
    sizes_bytes = [
        p.numel() * p.element_size() for group in optimizer.param_groups for p in group["params"] if p.requires_grad
    ]
    if all(_steps_by_lists(group) for group in optimizer.param_groups):
        return state_bytes, temporary_bytes
    return state_bytes, 2 * max(sizes_bytes, default=0)


def is_trial(optimizer: torch.optim.Optimizer) -> bool:
    """Say whether an optimizer is the copy on which a first step is tried.

    Its hooks are called where a subclass's `step` calls its base class's: to foresee that step too would never end.
    """
    return getattr(optimizer, "_torchdelta_trial", False)


class _Temporaries(TorchDispatchMode):
    """Adds up what ops on meta tensors would allocate, and what dies again."""

    def __init__(self, existing: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self.live_bytes = 0
        self.peak_bytes = 0
        self._known = {storage_address(tensor) for tensor in existing}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        out = func(*args, **(kwargs or {}))
        for item in out if isinstance(out, tuple | list) else (out,):
            if isinstance(item, torch.Tensor) and storage_address(item) not in self._known:
                storage = item.untyped_storage()
                self._known.add(storage._cdata)
                self.live_bytes += storage.nbytes()
                weakref.finalize(storage, self._died, storage._cdata, storage.nbytes())
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        return out

    def _died(self, address: int, size_bytes: int) -> None:
        self._known.discard(address)
        self.live_bytes -= size_bytes


def _steps_by_lists(group: dict[str, Any]) -> bool:
    """Say whether an optimizer steps on lists of tensors: told so, or by itself, as on accelerators."""
    if "foreach" not in group or group["foreach"] is not None or group.get("fused"):
        return bool(group.get("foreach"))
    return default_to_foreach(group["params"])


def _try_step(optimizer: torch.optim.Optimizer, *, only_first: bool) -> tuple[int, int]:
    """Step a copy of an optimizer once on meta tensors. Returns the bytes of its states, and of its temporaries."""
    groups: list[dict[str, Any]] = []
    for group in optimizer.param_groups:
        trainable = [parameter for parameter in group["params"] if parameter.requires_grad]
        fakes: list[torch.nn.Parameter] = []
        for parameter in trainable[:1] if only_first else trainable:
            fake = torch.nn.Parameter(torch.empty(parameter.shape, dtype=parameter.dtype, device="meta"))
            fake.grad = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
            fakes.append(fake)
        # The fused step has no kernel without memory; its states are those of the plain one.
        options = {name: False for name in ("fused", "capturable") if group.get(name)}
        if _steps_by_lists(group):
            options["foreach"] = True
        groups.append({**group, "params": fakes} | options)
    twin = copy.copy(optimizer)
    twin.param_groups = groups
    twin.state = collections.defaultdict(dict)
    twin._torchdelta_trial = True  # pyright: ignore[reportAttributeAccessIssue]
    step = type(optimizer).step
    existing = [tensor for group in groups for fake in group["params"] for tensor in (fake, fake.grad)]
    with _Temporaries(existing) as temporaries:
        getattr(step, "__wrapped__", step)(twin)
    state_bytes = sum(_tensor_bytes(state.values()) for state in twin.state.values())
    return state_bytes, max(0, temporaries.peak_bytes - state_bytes)


def _tensor_bytes(values: Iterable[Any]) -> int:
    return sum(value.numel() * value.element_size() for value in values if isinstance(value, torch.Tensor))
