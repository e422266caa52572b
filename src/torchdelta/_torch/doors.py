"""The functions of torch that are replaced while a session runs. See `__init__.py` for the rules."""

# torch's stubs do not have all that is here.
# pyright: reportAttributeAccessIssue=false, reportPrivateImportUsage=false

from __future__ import annotations

import functools
import importlib.abc
import importlib.util
import sys
import weakref
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

# What `replace` made and could not take off: what it passes on to, and whether that was the owner's own.
_left_below: weakref.WeakKeyDictionary[Any, tuple[Any, bool]] = weakref.WeakKeyDictionary()


def replace(owner: Any, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Callable[[], None]:
    """Replace a function of a module or a class by `make(original)`; returns what undoes it.

    Where somebody else has replaced it since then, theirs stays: what was made here then only passes calls on to the
    original. The next replacement that finds it on top takes its place, so that such layers do not pile up.
    """
    original, is_own = getattr(owner, name), name in vars(owner)
    while original in _left_below:
        original, is_own = _left_below[original]
    made = make(original)
    is_on = True

    @functools.wraps(made)
    def replacement(*args: Any, **kwargs: Any) -> Any:
        return made(*args, **kwargs) if is_on else original(*args, **kwargs)

    setattr(owner, name, replacement)

    def undo() -> None:
        nonlocal is_on
        is_on = False
        if vars(owner).get(name) is not replacement:
            _left_below[replacement] = (original, is_own)
        elif is_own:
            setattr(owner, name, original)
        else:
            delattr(owner, name)  # it is inherited

    return undo


def together(undos: list[Callable[[], None]]) -> Callable[[], None]:
    """Return what undoes several replacements, the last one first."""

    def undo() -> None:
        for undo_one in reversed(undos):
            undo_one()

    return undo


class _Engine(torch._C._ImperativeEngine):
    """Is where Python finds torch's engine, and has its backwards run by a function. Mutable.

    What else it inherits acts on the one engine of the process.

    Args:
        below: What was there before.
        run: Runs backwards, until it is None: then `below` does.
    """

    def __init__(self, below: Any, run: Callable[..., Any]) -> None:
        super().__init__()
        self.below = below
        self.run: Callable[..., Any] | None = run

    def run_backward(
        self,
        tensors: Any,
        grad_tensors: Any,
        keep_graph: bool,
        create_graph: bool,
        inputs: Any = (),
        allow_unreachable: bool = False,
        accumulate_grad: bool = False,
    ) -> Any:
        """Run a backward. The signature is torch's; `run` gets the arguments as torch's own code gives them."""
        run = self.run or self.below.run_backward
        flags = {"allow_unreachable": allow_unreachable, "accumulate_grad": accumulate_grad}
        return run(tensors, grad_tensors, keep_graph, create_graph, inputs, **flags)


def patch_run_backward(make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Callable[[], None]:
    """Replace the one Python door to the autograd engine by `make(original)`; returns what undoes it.

    `Tensor.backward`, `autograd.backward`, `autograd.grad` and reentrant checkpointing all call the engine's method
    `run_backward`, and some programs do so themselves. As with `replace`, what somebody else puts there later stays.
    """
    variable: Any = torch.autograd.Variable
    below = variable._execution_engine
    while isinstance(below, _Engine) and below.run is None:
        below = below.below
    engine = variable._execution_engine = _Engine(below, make(below.run_backward))

    def undo() -> None:
        engine.run = None
        if variable._execution_engine is engine:
            variable._execution_engine = below

    return undo


def patch_functorch_guard(make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Callable[[], None]:
    """Replace the context in which `torch.func` transforms forbid saved-tensor hooks by `make(original)`.

    Returns what undoes it.
    """
    return replace(torch.autograd.graph, "disable_saved_tensors_hooks", make)


def patch_inference_mode(make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Callable[[], None]:
    """Replace the exit of `torch.inference_mode` by `make(original)`; returns what undoes it.

    A `with` block keeps the exit that it was entered with: what was made acts at the end of such a block also after
    it was undone. As with `replace`, what somebody else puts there later stays.
    """
    owner, original = torch.inference_mode, torch.inference_mode.__exit__
    made: Any = make(original)
    owner.__exit__ = made

    def undo() -> None:
        if owner.__exit__ is made:
            owner.__exit__ = original

    return undo


def patch_storage_resize(make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Callable[[], None]:
    """Replace `UntypedStorage.resize_`, by which FSDP frees and fills parameters, by `make(original)`.

    Returns what undoes it.
    """
    return replace(torch.UntypedStorage, "resize_", make)


def patch_storage_sharing(make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Callable[[], None]:
    """Replace what moves an `UntypedStorage` on CPU into shared memory, in place, by `make(original)`.

    Returns what undoes it.
    """
    undo = [replace(torch.UntypedStorage, name, make) for name in ("_share_fd_cpu_", "_share_filename_cpu_")]

    def undo_all() -> None:
        for each in undo:
            each()

    return undo_all


def patch_swap_tensors(make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Callable[[], None]:
    """Replace `torch.utils.swap_tensors`, which refuses tensors with weak references, by `make(original)`.

    Returns what undoes it.
    """
    return replace(torch.utils, "swap_tensors", make)


def patch_saving(make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Callable[[], None]:
    """Replace what `torch.save` calls before it opens its file by `make(original)`; returns what undoes it."""
    return replace(torch.serialization, "_check_save_filelike", make)


def patch_raw_writes(make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Callable[[], None]:
    """Replace what writes its first argument without an op by `make(original)`; returns what undoes it.

    The methods of storages run an op, but no function that a function mode sees.
    """
    sobol = ("_sobol_engine_ff_", "_sobol_engine_initialize_state_", "_sobol_engine_scramble_")
    return together(
        [replace(torch.Tensor, name, make) for name in ("apply_", "map_", "map2_")]
        + [replace(torch, name, make) for name in sobol]
        + [replace(torch.UntypedStorage, name, make) for name in ("copy_", "fill_", "byteswap", "__setitem__")]
    )


def patch_raw_results(make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Callable[[], None]:
    """Replace what writes its results without an op by `make(original)`; returns what undoes it."""
    return replace(torch, "_sobol_engine_draw", make)


def patch_deep_copies(make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Callable[[], None]:
    """Replace `Tensor.__deepcopy__(memo)`, which parameters do not use, by `make(original)`; returns what undoes it."""
    return replace(torch.Tensor, "__deepcopy__", make)


class _WhenImported(importlib.abc.MetaPathFinder):
    """Calls back right after a module was imported by somebody else."""

    def __init__(self, name: str, then: Callable[[Any], None]) -> None:
        self.name = name
        self.then = then

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:  # noqa: ARG002 - the import system's
        if fullname != self.name:
            return None
        sys.meta_path.remove(self)  # the others find it
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            execute(module)
            self.then(module)

        spec.loader.exec_module = exec_module
        return spec


def patch_when_imported(module_name: str, patch: Callable[[Any], Callable[[], None] | None]) -> Callable[[], None]:
    """Run `patch(module)` now if the module is there, else as soon as somebody imports it; returns what undoes it."""
    undos: list[Callable[[], None]] = []

    def run(module: Any) -> None:
        undo_one = patch(module)
        if undo_one is not None:
            undos.append(undo_one)

    waiting = _WhenImported(module_name, run)
    if module_name in sys.modules:
        run(sys.modules[module_name])
    else:
        sys.meta_path.insert(0, waiting)

    def undo() -> None:
        if waiting in sys.meta_path:
            sys.meta_path.remove(waiting)
        while undos:
            undos.pop()()

    return undo


_FSDP_GROUP = "torch.distributed.fsdp._fully_shard._fsdp_param_group"
FSDP_STEPS_OF_BACKWARD = ("pre_backward", "post_backward", "finalize_backward")


def patch_fsdp_backward(make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Callable[[], None]:
    """Replace what FSDP2 does between the nodes of a backward, to gather and to reduce, by `make(original)`.

    Returns what undoes it. FSDP is not imported for it.
    """

    def patch(module: Any) -> Callable[[], None] | None:
        kind = getattr(module, "FSDPParamGroup", None)
        names = [name for name in FSDP_STEPS_OF_BACKWARD if kind is not None and name in vars(kind)]
        return together([replace(kind, name, make) for name in names])

    return patch_when_imported(_FSDP_GROUP, patch)
