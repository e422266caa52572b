"""Copies an optimizer of torch.optim onto meta parameters.

[Note: whose steps are tried]
A trial step on the copy must change nothing of the program. The steps of torch.optim write only what belongs to the
optimizer, which is copied. What the step of somebody else writes cannot be known: it may count steps in a global, cache
tensors in its module or in its class, advance the schedule of another object, draw random numbers, or step
another optimizer. So only steps whose whole code is torch's are tried. The others are estimated. A wrapper with
another optimizer of the same parameters in an attribute is assumed to need what that one needs.
"""

from __future__ import annotations

import collections
import inspect
from typing import TYPE_CHECKING, Any

import torch

from torchdelta.runtime.state.kinds import local_part

if TYPE_CHECKING:
    from collections.abc import Callable

_PLAIN = (int, float, str, type(None))  # immutable, so the copy may share them


def is_of_torch(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether all code of an optimizer's step is torch.optim's: a subclass has replaced no part of it."""
    # Torch's own decorators may stand around it, those of others may not.
    step = inspect.unwrap(type(optimizer).step, stop=lambda each: not _module_of(each).startswith("torch."))
    if not _is_optim(_module_of(step)):
        return False
    classes = type(optimizer).__mro__
    num_derived = classes.index(_class_of_torch(optimizer))
    methods = {name for each in classes[num_derived:] for name in vars(each)}
    replaced = {name for each in classes[:num_derived] for name in vars(each)} & methods
    return not any(name.startswith("_") and not name.startswith("__") for name in replaced)


def _module_of(function: Any) -> str:
    """Return the module of a function's code. A decorator may give its own code another `__module__`."""
    return str(getattr(function, "__globals__", {}).get("__name__"))


def _is_optim(module: str) -> bool:
    return module == "torch.optim" or module.startswith("torch.optim.")


def _class_of_torch(optimizer: torch.optim.Optimizer) -> type[torch.optim.Optimizer]:
    return next(each for each in type(optimizer).__mro__ if _is_optim(each.__module__))


def inner_of(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer | None:
    """Return the optimizer of torch.optim that a wrapper has in an attribute, with all of its parameters, or None."""
    if is_of_torch(optimizer):
        return None
    found = {id(value): value for value in vars(optimizer).values() if isinstance(value, torch.optim.Optimizer)}
    ids = _ids_of_parameters(optimizer)
    inner = [each for each in found.values() if is_of_torch(each) and ids <= _ids_of_parameters(each)]
    return inner[0] if ids and len(inner) == 1 else None


def _ids_of_parameters(optimizer: torch.optim.Optimizer) -> set[int]:
    return {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}


class OptimizerCopy:
    """A copy of an optimizer, without states, on meta parameters that have meta gradients."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        options_of: Callable[[dict[str, Any]], dict[str, Any]],
        is_stepped: Callable[[torch.Tensor], bool],
    ) -> None:
        """Copy an optimizer.

        Args:
            optimizer: The original, of torch.optim.
            options_of: Returns the options that replace those of a group.
            is_stepped: Returns whether a parameter will have a gradient. The others are left out.

        Raises:
            TypeError: Its step is not torch's.
        """
        if not is_of_torch(optimizer):
            raise TypeError(f"{type(optimizer).__qualname__} is not an optimizer of torch.optim")
        self.parameters: list[torch.nn.Parameter] = []
        self._options_of = options_of
        self._is_stepped = is_stepped
        # Of torch's class, not of a subclass, whose properties could return what is real.
        self.optimizer: torch.optim.Optimizer = object.__new__(_class_of_torch(optimizer))
        self.optimizer.__dict__.update(self._attributes_of(optimizer))

    def make_gradients(self) -> None:
        """Give each parameter a gradient."""
        for parameter in self.parameters:
            parameter.grad = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")

    def tensors(self) -> list[torch.Tensor]:
        """Return all tensors that exist before the step: parameters and gradients."""
        return [*self.parameters, *(parameter.grad for parameter in self.parameters if parameter.grad is not None)]

    def _attributes_of(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Return the attributes of the copy: no hooks, and only plain values of what a subclass has added."""
        attributes = {name: value for name, value in vars(optimizer).items() if isinstance(value, _PLAIN)}
        attributes |= {name: collections.OrderedDict() for name in vars(optimizer) if name.endswith("_hooks")}
        return attributes | {
            "defaults": dict(optimizer.defaults),
            "state": collections.defaultdict(dict),
            "param_groups": [self._copy_group(group) for group in optimizer.param_groups],
        }

    def _copy_group(self, group: dict[str, Any]) -> dict[str, Any]:
        fakes: list[torch.nn.Parameter] = []
        for parameter in filter(self._is_stepped, group["params"]):
            shape = local_part(parameter).shape
            fakes.append(torch.nn.Parameter(torch.empty(shape, dtype=parameter.dtype, device="meta")))
        self.parameters += fakes
        options = {name: _copy_option(value) for name, value in group.items() if name != "params"}
        return {**options, "params": fakes} | self._options_of(group)


def _copy_option(value: Any) -> Any:
    """Return an option of a group; on the meta device if it is a larger tensor. Learning rates are shared."""
    is_large = isinstance(value, torch.Tensor) and value.numel() > 1
    return torch.empty_like(value, device="meta") if is_large else value
