"""The functions of `torch.optim` that update a list of parameters at once. See `__init__.py` for the rules."""

from __future__ import annotations

import functools
import sys
from typing import TYPE_CHECKING, Any, Final

import torch

from torchdelta._torch.compiled import note_compiled_calls
from torchdelta._torch.doors import replace, together

if TYPE_CHECKING:
    import types
    from collections.abc import Callable

__all__ = ["is_list_op", "list_functions", "patch_list_functions", "patch_state_lists"]

_PREFIXES: Final = ("_multi_tensor_", "_fused_")
_OTHER_OPS: Final = {f"aten::_fused_{name}_" for name in ("adagrad", "adam", "adamw", "sgd")} | {
    "aten::_amp_foreach_non_finite_check_and_unscale_"
}


def list_functions() -> list[tuple[types.ModuleType, str]]:
    """Return the modules and names of the functions behind `foreach=True` and `fused=True`.

    The first arguments of each are lists: parameters, gradients, and states, in the same order. Optimizers look these
    functions up in their module whenever they step.
    """
    found: list[tuple[types.ModuleType, str]] = []
    for module_name, module in sorted(sys.modules.items()):
        if module_name.startswith(f"{torch.optim.__name__}."):
            for name, value in sorted(vars(module).items()):
                if name.startswith(_PREFIXES) and callable(value):
                    found.append((module, name))
    return found


def patch_list_functions(make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Callable[[], None]:
    """Replace these functions by `make(original)`; returns what undoes it.

    While a compiled function is called, the originals are in place: Dynamo may be compiling an optimizer's step.
    """
    found = list_functions()
    originals = [vars(module)[name] for module, name in found]
    undos = [replace(module, name, make) for module, name in found]
    replacements = [vars(module)[name] for module, name in found]
    num_calls, is_on = 0, True

    def begin_call(_function: Any, _inputs: Any) -> Callable[[], None]:
        count(1)
        return functools.partial(count, -1)

    def count(change: int) -> None:
        nonlocal num_calls
        was_called, num_calls = num_calls > 0, num_calls + change
        if is_on and was_called != (num_calls > 0):
            before, after = (originals, replacements) if was_called else (replacements, originals)
            for (module, name), old, new in zip(found, before, after, strict=True):
                if vars(module)[name] is old:
                    setattr(module, name, new)

    def switch_off() -> None:
        nonlocal is_on
        is_on = False

    return together([*undos, note_compiled_calls(begin_call), switch_off])


def patch_state_lists(note: Callable[[list[Any]], object]) -> Callable[[], None]:
    """Call `note(states)` with each list in which an optimizer collects new states; returns what undoes it.

    `SGD` makes all momentum buffers of a group, and stores them when it has updated all parameters of that group. The
    other optimizers of torch store their states before they update.
    """

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def init_group(self: Any, group: Any, params: Any, grads: Any, states: list[Any]) -> Any:
            found = original(self, group, params, grads, states)
            note(states)
            return found

        return init_group

    return replace(torch.optim.SGD, "_init_group", make)


def is_list_op(func: Any) -> bool:
    """Return whether an overload does the same to each place of its lists, and returns a list of results or None."""
    name = func._schema.name
    return name.startswith("aten::_foreach_") or name in _OTHER_OPS
