"""What `torch.nn.Module` keeps to itself. See `__init__.py` for the rules."""

# torch's stubs do not have all that is here.
# pyright: reportAttributeAccessIssue=false, reportPrivateImportUsage=false

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Collection

# The code of the frame in which a module runs its forward, hooks included; its local `self` is the module.
MODULE_CALL_CODE = torch.nn.Module._call_impl.__code__


def is_built(module: torch.nn.Module) -> bool:
    """Return whether `Module.__init__` has run on a module; before that it has no children to ask for."""
    return "_modules" in vars(module)


def children_of(module: torch.nn.Module) -> Collection[torch.nn.Module | None]:
    """Return the modules right under a built one, without comparing them as `Module.children` does."""
    return module._modules.values()


def own_parameters_of(module: torch.nn.Module) -> list[torch.nn.Parameter]:
    """Return the parameters of a module without those of its children; none of one that is not built yet."""
    parameters = vars(module).get("_parameters", {})
    return [parameter for parameter in list(parameters.values()) if isinstance(parameter, torch.nn.Parameter)]
