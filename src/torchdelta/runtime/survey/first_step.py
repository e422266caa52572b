"""What an optimizer will allocate in its first step, which creates its states, and what its largest op needs.

Knowing this in advance lets `BudgetError` be raised before the first parameter is updated, not halfway through.
"""

from __future__ import annotations

import inspect
import logging
import weakref
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch

from torchdelta._torch.device import default_to_foreach
from torchdelta._torch.modes import TorchDispatchMode
from torchdelta._torch.storages import address_of, storage_address
from torchdelta.notices import warn_once
from torchdelta.runtime.memory import candidates
from torchdelta.runtime.state.kinds import local_part, tensors_in
from torchdelta.runtime.survey.optimizer_copy import OptimizerCopy, inner_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable


FORESEEN: Final = "the first step of "
"""Start of the reason, with the optimizer's class behind it, of a request for all that its first step allocates."""


class FirstStep(NamedTuple):
    """What an optimizer's first step allocates."""

    state_bytes: int  # never freed
    temporary_bytes: int  # freed by the end of the step
    is_estimate: bool = False


class StepNeed(NamedTuple):
    """What an optimizer's step needs at once where parameters, gradients and states leave between ops.

    Attributes:
        op_bytes: What its largest op reads of what may leave, and all that the step has made by then; 0 if nothing is
            stepped.
        small_state_bytes: States that it still has to make, and that are too small to leave.
        takes_lists: Whether its ops take lists of tensors, which are cut into pieces.
        is_estimate: Whether the step may need less or more than this.
    """

    op_bytes: int = 0
    small_state_bytes: int = 0
    takes_lists: bool = False
    is_estimate: bool = False


def _requires_grad(parameter: torch.Tensor) -> bool:
    return parameter.requires_grad


def foresee_first_step(
    optimizer: torch.optim.Optimizer, is_stepped: Callable[[torch.Tensor], bool] = _requires_grad
) -> FirstStep:
    """Return what the first step of an optimizer will allocate.

    A copy of an optimizer of torch.optim steps on meta parameters with meta gradients: shapes without memory. For
    others, and where that fails (L-BFGS reads values), the result is an estimate: two states as large as each
    parameter, as in Adam, and temporaries twice as large as the largest parameter. An estimate is logged once. A
    wrapper gets what its inner optimizer needs, marked as an estimate and not logged. See [Note: whose steps are tried]
    in optimizer_copy.py.

    Args:
        optimizer: The optimizer, before its first step.
        is_stepped: Returns whether a parameter will have a gradient in that step.
    """
    inner = inner_of(optimizer)
    if inner is not None:
        return foresee_first_step(inner, is_stepped)._replace(is_estimate=True)
    try:
        state_bytes, temporary_bytes = _try_step(optimizer, is_stepped)
        is_fused = all(group.get("fused") for group in optimizer.param_groups)  # no temporaries
        return FirstStep(state_bytes, 0 if is_fused else temporary_bytes)
    except Exception:
        logging.getLogger("torchdelta").debug(
            "the first step of %s could not be tried on meta tensors", type(optimizer).__name__, exc_info=True
        )
    sizes_bytes = [local_part(p).nbytes for group in optimizer.param_groups for p in group["params"] if is_stepped(p)]
    warn_once(
        f"the memory for the first step of {type(optimizer).__name__} is an estimate, because its step is not one of "
        "torch.optim's or does not run on meta tensors: two states as large as each parameter, as in Adam"
    )
    return FirstStep(2 * sum(sizes_bytes), 2 * max(sizes_bytes, default=0), is_estimate=True)


def foresee_step(optimizer: torch.optim.Optimizer, stepped: list[torch.Tensor]) -> StepNeed:
    """Return what a step of an optimizer needs at once if as much as possible leaves between its ops.

    Optimizers step one parameter after the other, or pieces of lists. So the largest parameter decides. L-BFGS flattens
    all of its parameters. Where the step is not tried, two states and two temporaries of that parameter are assumed.

    Args:
        optimizer: The optimizer, before its first step or a later one.
        stepped: Its parameters that will have gradients in that step.
    """
    if not stepped:
        return StepNeed()
    inner = inner_of(optimizer)
    if inner is not None:
        return foresee_step(inner, stepped)._replace(is_estimate=True)
    takes_lists = any(steps_by_lists(group) or group.get("fused") for group in optimizer.param_groups)
    is_flat = isinstance(optimizer, torch.optim.LBFGS)
    ids = set(map(id, stepped)) if is_flat else {id(max(stepped, key=_local_bytes))}
    is_estimate = is_flat or any(p.grad is not None and p.grad.layout is not torch.strided for p in stepped)
    try:
        op_bytes, num_states = _try_two_steps(optimizer, lambda parameter: id(parameter) in ids)
    except Exception:  # noqa: BLE001 - logged where the first step is tried
        step = foresee_first_step(optimizer, lambda parameter: id(parameter) in ids)
        op_bytes = sum(2 * _local_bytes(p) for p in stepped if id(p) in ids) + step.state_bytes + step.temporary_bytes
        num_states, is_estimate = 2, True
    small_bytes = sum(num_states * size_bytes for p in stepped if (size_bytes := _new_small_bytes(optimizer, p)))
    return StepNeed(op_bytes, small_bytes, takes_lists, is_estimate)


def states_of(optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> list[torch.Tensor]:
    """Return the tensors that an optimizer keeps for a parameter."""
    states = getattr(optimizer, "state", None)
    return list(tensors_in([states.get(parameter)])) if isinstance(states, dict) else []


def _new_small_bytes(optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> int:
    """Return the size of a parameter that is too small to leave if it has no states yet, else 0."""
    size_bytes = _local_bytes(parameter)
    return size_bytes if size_bytes < candidates.LEAST_BYTES and not states_of(optimizer, parameter) else 0


def first_step_bytes(optimizer: torch.optim.Optimizer, *, makes_gradients: bool) -> int:
    """Return what the first step of an optimizer will allocate; 0 where that is only an estimate.

    An estimate must not refuse a step that fits.

    Args:
        optimizer: The optimizer.
        makes_gradients: Whether its step makes gradients, so that parameters without one are stepped, too.
    """
    step = foresee_first_step(optimizer, lambda p: p.requires_grad and (makes_gradients or p.grad is not None))
    return 0 if step.is_estimate or not step.state_bytes else step.state_bytes + step.temporary_bytes


class _Temporaries(TorchDispatchMode):
    """Counts the bytes that ops on meta tensors would allocate and free, and what the largest op needs."""

    def __init__(self, existing: Iterable[torch.Tensor], may_leave: Iterable[torch.Tensor] = ()) -> None:
        super().__init__()
        self.live_bytes = 0
        self.peak_bytes = 0
        self.op_bytes = 0  # the most that an op reads of `may_leave`, with all that was made and lives then
        self._known = {storage_address(tensor) for tensor in existing}
        self._large = {
            storage_address(tensor): tensor.untyped_storage().nbytes()
            for tensor in may_leave
            if tensor.untyped_storage().nbytes() >= candidates.LEAST_BYTES
        }

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        for item in out if isinstance(out, tuple | list) else (out,):
            if isinstance(item, torch.Tensor) and storage_address(item) not in self._known:
                storage = item.untyped_storage()
                self._known.add(address_of(storage))
                self.live_bytes += storage.nbytes()
                weakref.finalize(storage, self._died, address_of(storage), storage.nbytes())
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        self.op_bytes = max(self.op_bytes, self._read_bytes((*args, *kwargs.values())) + self.live_bytes)
        return out

    def _read_bytes(self, arguments: tuple[Any, ...]) -> int:
        """Return what an op reads of what may leave. Of lists, which are cut in a run, one place counts."""
        lists = [argument for argument in arguments if isinstance(argument, list | tuple)]
        single = [argument for argument in arguments if isinstance(argument, torch.Tensor)]
        places = [
            [values[place] for values in lists if place < len(values)]
            for place in range(max(map(len, lists), default=0))
        ]
        return self._large_bytes(single) + max(map(self._large_bytes, places), default=0)

    def _large_bytes(self, values: list[Any]) -> int:
        addresses = {storage_address(value) for value in values if isinstance(value, torch.Tensor)}
        return sum(self._large.get(address, 0) for address in addresses)

    def _died(self, address: int, size_bytes: int) -> None:
        self._known.discard(address)
        self.live_bytes -= size_bytes


def steps_by_lists(group: dict[str, Any]) -> bool:
    """Return whether an optimizer steps on lists of tensors, by its `foreach` option or by torch's default."""
    if "foreach" not in group or group["foreach"] is not None or group.get("fused"):
        return bool(group.get("foreach"))
    return default_to_foreach(group["params"])


def _try_step(optimizer: torch.optim.Optimizer, is_stepped: Callable[[torch.Tensor], bool]) -> tuple[int, int]:
    """Step a copy of an optimizer once on meta tensors. Return the bytes of its states, and of its temporaries."""
    trial = OptimizerCopy(optimizer, _options_of, is_stepped)
    trial.make_gradients()
    temporaries = _Temporaries(trial.tensors())
    _step(trial, temporaries)
    state_bytes = sum(_tensor_bytes(state.values()) for state in trial.optimizer.state.values())
    state_bytes = max(state_bytes, temporaries.live_bytes)  # states in lists live, too
    return state_bytes, max(0, temporaries.peak_bytes - state_bytes)


def _try_two_steps(optimizer: torch.optim.Optimizer, is_stepped: Callable[[torch.Tensor], bool]) -> tuple[int, int]:
    """Step a copy of an optimizer twice.

    Return the bytes of the largest op of the second step, in which states can be told from temporaries, and how many
    states as large as the parameter each has.
    """
    trial = OptimizerCopy(optimizer, _options_of, is_stepped)
    trial.make_gradients()
    _step(trial, _Temporaries(trial.tensors()))
    trial.make_gradients()
    states = {id(p): states_of(trial.optimizer, p) for p in trial.parameters}
    gradients = [p.grad for p in trial.parameters if p.grad is not None]
    may_leave = [*trial.parameters, *gradients, *(state for each in states.values() for state in each)]
    temporaries = _Temporaries([*trial.tensors(), *may_leave], may_leave)
    _step(trial, temporaries)
    # A fused kernel reads all that belongs to a parameter at once. The copies are not fused.
    groups = zip(optimizer.param_groups, trial.optimizer.param_groups, strict=True)
    fused = [parameter for group, copied in groups if group.get("fused") for parameter in copied["params"]]
    of_fused = [2 * p.nbytes + sum(map(_local_bytes, states[id(p)])) for p in fused]
    num_states = max(sum(state.shape == p.shape for state in states[id(p)]) for p in trial.parameters)
    return max([temporaries.op_bytes, *of_fused]), num_states


def _step(trial: OptimizerCopy, temporaries: _Temporaries) -> None:
    """Step a copy of an optimizer once."""
    step: Any = inspect.unwrap(type(trial.optimizer).step)  # without the hooks, which are for real steps
    with torch.no_grad(), temporaries:
        step(trial.optimizer)


def _options_of(group: dict[str, Any]) -> dict[str, Any]:
    """Return the options of a group that a trial replaces.

    The fused step has no meta kernel; the other implementations create the same states.
    """
    options = {name: False for name in ("fused", "capturable") if group.get(name)}
    if steps_by_lists(group):
        options["foreach"] = True
    elif group.get("fused"):
        options["foreach"] = False
    return options


def _tensor_bytes(values: Iterable[Any]) -> int:
    return sum(value.numel() * value.element_size() for value in values if isinstance(value, torch.Tensor))


def _local_bytes(tensor: torch.Tensor) -> int:
    return local_part(tensor).nbytes if tensor.layout is torch.strided else 0
