"""Finds the living objects of a class and of its subclasses.

`gc.get_objects()` also returns objects that other threads are still building. While a tuple that is being filled has a
second reference, its thread cannot resize it and gets a SystemError (CPython issue 59313). So the references to other
objects are dropped a few instructions after the call, and nothing in between runs finalizers. A switch to another
thread within these instructions is possible but unlikely. Where that is too much, see [Note: objects of other threads]
in record/scan.py.
"""

from __future__ import annotations

import gc
from itertools import compress
from typing import TypeVar

import torch

_T = TypeVar("_T")

__all__ = ["instances_of", "living_optimizers", "subclasses_of"]


def subclasses_of(base: type) -> set[type]:
    """Return a class and all classes below it."""
    kinds: set[type] = {base}
    new = [base]
    while new:
        new = [kind for parent in new for kind in type.__subclasses__(parent) if kind not in kinds]
        kinds.update(new)
    return kinds


def instances_of(*bases: type[_T]) -> list[_T]:
    """Return the living objects of some classes and of their subclasses, so far as the garbage collector tracks them.

    Takes up to a second in a process with many objects. Compares `type(o)`, because `isinstance` would run the
    `__class__` properties of lazy objects.
    """
    is_wanted = set().union(*map(subclasses_of, bases)).__contains__
    is_collecting = gc.isenabled()
    gc.disable()  # a finalizer would let other threads run in between
    try:
        objects = gc.get_objects()
        found = list(compress(objects, map(is_wanted, map(type, objects))))
        objects.clear()
    finally:
        if is_collecting:
            gc.enable()
    return found


def living_optimizers() -> list[torch.optim.Optimizer]:
    """Return the optimizers of this process that are built to the end. Takes as long as `instances_of`."""
    return [optimizer for optimizer in instances_of(torch.optim.Optimizer) if hasattr(optimizer, "param_groups")]
