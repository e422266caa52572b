"""Copies an optimizer onto meta parameters, together with all its attributes that refer to parameters.

A trial step on the copy must not change the real optimizer. Subclasses have further tensors and dicts keyed by
parameter in addition to `state`, wrappers contain another optimizer, and a step may advance an object such as a
schedule, so everything that a step may write is copied. Where that is impossible, there is no copy.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import enum
import functools
import logging
import pathlib
import re
import types
from typing import TYPE_CHECKING, Any, Final

import torch

from torchdelta.runtime.state.kinds import local_part

if TYPE_CHECKING:
    from collections.abc import Callable

_MOST_OBJECTS: Final = 100_000  # a step that reaches more, items of containers included, has hold of a whole program
# What no step changes, or what changes nothing of the training: the copy shares it.
_SHARED: Final = (
    int,
    float,
    complex,
    str,
    bytes,
    frozenset,
    range,
    slice,
    type,
    type(None),
    type(Ellipsis),
    enum.Enum,
    logging.Logger,
    torch.Size,
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
    torch.Generator,  # a trial does not draw from one
    pathlib.PurePath,
    re.Pattern,
    types.ModuleType,
)


class NoCopyError(Exception):
    """An optimizer refers to something that cannot be copied."""


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
            optimizer: The original.
            options_of: Returns the options that replace those of a group.
            is_stepped: Returns whether a parameter will have a gradient. The others are left out.

        Raises:
            NoCopyError: It refers to an object that cannot be copied.
        """
        self.parameters: list[torch.nn.Parameter] = []
        self._options_of = options_of
        self._is_stepped = is_stepped
        self._copies: dict[int, Any] = {}
        self._originals: list[Any] = []  # kept alive, so that their ids are not reused
        self._num_objects = 0
        self.optimizer = self._copy(optimizer)

    def make_gradients(self) -> None:
        """Give each parameter a gradient."""
        for parameter in self.parameters:
            parameter.grad = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")

    def tensors(self) -> list[torch.Tensor]:
        """Return all tensors that exist before the step: parameters, gradients, and attributes of the optimizer."""
        copies = [value for value in self._copies.values() if isinstance(value, torch.Tensor)]
        return copies + [parameter.grad for parameter in self.parameters if parameter.grad is not None]

    def _copy(self, value: Any) -> Any:
        known = self._copies.get(id(value))
        if known is not None:
            return known
        self._num_objects += 1
        if self._num_objects > _MOST_OBJECTS:
            raise NoCopyError(f"it reaches more than {_MOST_OBJECTS} objects")
        if isinstance(value, torch.optim.Optimizer):
            return self._copy_optimizer(value)
        if isinstance(value, torch.Tensor):
            return self._note(value, _without_memory(value))
        if isinstance(value, dict):
            made = self._note(value, copy.copy(value))
            made.clear()
            made.update({self._copy(key): self._copy(item) for key, item in value.items()})
            return made
        if value.__class__ in (list, set, collections.deque):
            made = self._note(value, copy.copy(value))
            made.clear()
            (made.update if isinstance(made, set) else made.extend)([self._copy(item) for item in value])
            return made
        if value.__class__ is tuple:
            return tuple(self._copy(item) for item in value)
        if isinstance(value, _SHARED):
            return value
        if isinstance(value, types.FunctionType):
            return self._copy_function(value)
        if isinstance(value, types.BuiltinFunctionType):  # `a_list.append` changes the list
            owner: Any = value.__self__
            return value if owner is None else getattr(self._copy(owner), value.__name__)
        if isinstance(value, types.MethodType):
            return types.MethodType(self._copy(value.__func__), self._copy(value.__self__))
        if value.__class__ is functools.partial:
            keywords = {name: self._copy(item) for name, item in value.keywords.items()}
            return functools.partial(self._copy(value.func), *map(self._copy, value.args), **keywords)
        return self._copy_object(value)

    def _copy_function(self, value: types.FunctionType) -> types.FunctionType:
        """Copy a function with the variables and defaults that it has hold of: one may be another optimizer."""
        if value.__closure__ is None and not value.__defaults__ and not value.__kwdefaults__:
            return value
        closure = value.__closure__ or ()
        cells = tuple(types.CellType() for _ in closure)
        made = types.FunctionType(value.__code__, value.__globals__, value.__name__, None, cells or None)
        self._note(value, made)
        made.__defaults__ = self._copy(value.__defaults__)
        made.__kwdefaults__ = self._copy(value.__kwdefaults__)
        for cell, copied in zip(closure, cells, strict=True):
            with contextlib.suppress(ValueError):  # it is empty
                copied.cell_contents = self._copy(cell.cell_contents)
        made.__dict__.update({name: self._copy(item) for name, item in vars(value).items()})
        return made

    def _copy_object(self, value: Any) -> Any:
        """Copy an object of a class of Python, with its attributes. One with a destructor would end what they share."""
        if not hasattr(value, "__dict__") or hasattr(value, "__del__"):
            raise NoCopyError(type(value).__qualname__)
        try:
            made = object.__new__(type(value))
        except TypeError as error:
            raise NoCopyError(type(value).__qualname__) from error
        self._note(value, made)
        made.__dict__.update({name: self._copy(item) for name, item in vars(value).items()})
        return made

    def _note(self, value: Any, made: Any) -> Any:
        self._copies[id(value)] = made
        self._originals.append(value)
        return made

    def _copy_optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        copied = self._note(optimizer, copy.copy(optimizer))
        copied.__dict__ = dict(vars(optimizer))
        copied.__dict__.pop("step", None)  # set by learning-rate schedulers: it would step the real optimizer
        copied._torchdelta_trial = True
        for name in vars(copied):
            if name.startswith("_optimizer_") and name.endswith("_hooks"):  # none runs in a trial
                copied.__dict__[name] = collections.OrderedDict()
        groups = optimizer.param_groups
        if id(groups) not in self._copies:
            self._note(groups, [self._copy_group(group) for group in groups])
        self._note(optimizer.state, collections.defaultdict(dict))
        for name, value in vars(copied).items():
            copied.__dict__[name] = self._copy(value)
        return copied

    def _copy_group(self, group: dict[str, Any]) -> dict[str, Any]:
        if id(group) in self._copies:
            return self._copies[id(group)]
        fakes: list[torch.nn.Parameter] = []
        for parameter in filter(self._is_stepped, group["params"]):
            shape = local_part(parameter).shape
            fake = torch.nn.Parameter(torch.empty(shape, dtype=parameter.dtype, device="meta"))
            self.parameters.append(self._note(parameter, fake))
            fakes.append(fake)
        return self._note(group, {**group, "params": fakes} | self._options_of(group))


def _without_memory(tensor: torch.Tensor) -> torch.Tensor:
    """Return a meta tensor of the same shape. A CPU scalar keeps its value, because steps may read it."""
    with torch.no_grad():
        if tensor.dim() == 0 and tensor.device.type == "cpu":
            return tensor.detach().clone()
        return torch.empty_like(local_part(tensor), device="meta")
