"""Runs one training step of any model on fake tensors and returns its trace.

No memory is taken and no kernel runs, so a step of any size is traced in seconds on any machine.
"""

from __future__ import annotations

import contextlib
import gc
import inspect
import logging
import random
import sys
from typing import TYPE_CHECKING, Any, Final, Literal

import msgspec
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from torchdelta._torch.fake import FakeTensor, FakeTensorMode
from torchdelta._torch.symbolic import converting_fake_modules, without_truncation
from torchdelta.errors import TraceError
from torchdelta.names import unknown_name
from torchdelta.trace.draft import created_by
from torchdelta.trace.model import Header, Trace
from torchdelta.trace.symbolic.devices import acting_as
from torchdelta.trace.symbolic.live import LiveStorages
from torchdelta.trace.symbolic.mode import StepMode
from torchdelta.trace.symbolic.values import VALUES_WANTED, KnownValues, usual_methods, values_shown
from torchdelta.trace.validate import validate

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Iterator

OptimizerName = Literal["none", "sgd", "sgd-momentum", "adamw"]
OPTIMIZERS: Final[tuple[OptimizerName, ...]] = ("none", "sgd", "sgd-momentum", "adamw")
DEVICES: Final = ("cpu", "cuda")
_NO_DATA: Final = "its data is not allocated yet"  # where C++ reads a tensor's memory: a list of tensors as an index


class TracedStep(msgspec.Struct, frozen=True, kw_only=True):
    """A step, and what it leaves behind.

    Attributes:
        trace: The step.
        shapes: For each op, the shapes of the tensors among its arguments.
        growth_bytes: Bytes that each further step leaves in memory beside what it found there: 0 in a sound loop.
    """

    trace: Trace
    growth_bytes: int
    shapes: tuple[tuple[tuple[int, ...], ...], ...] = ()


def trace_step(
    function: Callable[..., Any],
    *,
    batch_size: int | None = None,
    device: str = "cuda",
    optimizer: OptimizerName = "adamw",
    comment: str = "",
) -> Trace:
    """Trace one training step of what a function builds, on fake tensors.

    The function is called once, under a fake-tensor mode, and returns `(model, inputs)` or `(model, inputs, step)`.
    `inputs` is what the model is called with: a tensor, a tuple or list of arguments, or a dict of keyword arguments.
    Without `step` the step is `loss = ...; loss.backward(); optimizer.step(); optimizer.zero_grad()`, where the loss is
    the output's `.loss` (or its item "loss"), else the first tensor of the output, summed if it is no scalar. `step` is
    called as `step(model, inputs)` and does all of it, with its own optimizer.

    The second step is traced: the first one makes the optimizer's states.

    Args:
        function: Builds model and inputs on CPU.
        batch_size: What the function is called with, as its first argument or `batch_size`; None: it is called without.
        device: What the step would run on: see [Note: corrected device differences] in devices.py.
        optimizer: What updates the parameters where the function returns no step.
        comment: Goes into the trace's header.

    Raises:
        TraceError: The function cannot be called so, returns something else, or its step fails on fake tensors, for
            example because it asks for the value of a tensor that is not known ([Note: values in a step without
            values] in values.py). One line.
    """
    return traced_step(
        function, batch_size=batch_size, device=device, optimizer=optimizer, comment=comment, with_growth=False
    ).trace


def traced_step(
    function: Callable[..., Any],
    *,
    batch_size: int | None = None,
    device: str = "cuda",
    optimizer: OptimizerName = "adamw",
    comment: str = "",
    with_growth: bool = True,
) -> TracedStep:
    """Trace one training step as `trace_step` does, and measure what is left of it when it ends.

    Without `with_growth` the growth is 0. A step that has some is run a third time, because what appears once (a
    table that is made late) is none.

    Raises:
        TraceError: As `trace_step`.
    """
    if device not in DEVICES:
        raise TraceError(unknown_name("device", device, DEVICES))
    if optimizer not in OPTIMIZERS:
        raise TraceError(unknown_name("optimizer", optimizer, OPTIMIZERS))
    name = _name(function)
    arguments, batch_size = _arguments(function, batch_size, name)
    mode = StepMode(device)
    with (
        _same_random_numbers(),
        FakeTensorMode(allow_non_fake_inputs=True),
        KnownValues(),
        usual_methods(),
        _silent_torch(),
        acting_as(device),
        torch.enable_grad(),
    ):
        with (
            _told(f"{name} cannot be called"),
            without_truncation(),
            converting_fake_modules(),
        ):
            built = function(*arguments)
        model, inputs, step = _checked(built, name)
        if step is None:
            step = _default_step(model, optimizer, device, mode)
        with _told(f"the step of {name} cannot be traced"), _quiet_collector(), values_shown():
            optimizers: dict[int, torch.optim.Optimizer] = {}
            growth_bytes = 0
            with _optimizers_noted(optimizers, mode):
                with LiveStorages() as first:
                    step(model, inputs)
                parameters = _parameters(model, optimizers.values())
                mode.note(parameters, "parameter")
                mode.note(model.buffers(), "constant")
                mode.note(_tensors(inputs), "input")
                mode.note((p.grad for p in parameters if p.grad is not None), "gradient")
                mode.note((t for one in optimizers.values() for t in _states(one)), "optimizer_state")
                gc.collect()  # what only circles hold is not kept
                mode.note_kept(first.storages())
                with mode, mode.saved_hooks(), _gradients_noted(parameters, mode):
                    step(model, inputs)
                mode.note((p.grad for p in parameters if p.grad is not None), "gradient")
                if with_growth:
                    growth_bytes = _growth_bytes(mode, lambda: step(model, inputs))
        mode.close()
    header = Header(
        torch_version=str(torch.__version__),
        device=device,
        created_by=created_by("symbolic"),
        batch_size=batch_size,
        comment=comment or name,
    )
    if not mode.draft.ops:
        raise TraceError(f"the step of {name} ran no op: it is called as step(model, inputs) and trains once")
    if not any(op.phase == "backward" for op in mode.draft.ops):
        raise TraceError(f"the step of {name} ran no backward: it is called as step(model, inputs) and trains once")
    trace = mode.draft.trace(header)
    validate(trace)
    return TracedStep(trace=trace, growth_bytes=growth_bytes, shapes=tuple(mode.shapes))


def _growth_bytes(mode: StepMode, step: Callable[[], Any]) -> int:
    """Return what a traced step leaves, if the next one leaves something as well."""
    gc.collect()
    growth_bytes = mode.growth_bytes()
    if growth_bytes <= 0:
        return 0
    live = LiveStorages(mode.living())
    before_bytes = live.size_bytes()
    with live:
        step()
    gc.collect()
    return max(min(growth_bytes, live.size_bytes() - before_bytes), 0)


def _default_step(
    model: nn.Module, optimizer: OptimizerName, device: str, mode: StepMode
) -> Callable[[nn.Module, Any], None]:
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not parameters:
        raise TraceError(f"{type(model).__name__} has no parameters that require gradients: there is nothing to train")
    foreach = device == "cuda"
    update: torch.optim.Optimizer | None = None
    if optimizer in {"sgd", "sgd-momentum"}:
        momentum = 0.9 if optimizer == "sgd-momentum" else 0.0
        update = torch.optim.SGD(parameters, lr=0.1, momentum=momentum, foreach=foreach)
    elif optimizer == "adamw":
        update = torch.optim.AdamW(parameters, lr=1e-3, foreach=foreach)

    def step(model: nn.Module, inputs: Any) -> None:
        mode.stage = "forward"
        # The output is let go at once and the loss lives on, as in `loss = model(**batch).loss`.
        loss = _loss(_call(model, inputs))
        mode.stage = "backward"
        loss.backward()
        mode.stage = "optimizer"
        if update is not None:
            update.step()
        model.zero_grad(set_to_none=True)

    return step


def _call(model: nn.Module, inputs: Any) -> Any:
    if isinstance(inputs, torch.Tensor):
        return model(inputs)
    # Other mappings, such as the tokenizer's BatchEncoding, have keys, too.
    return model(**inputs) if hasattr(inputs, "keys") else model(*inputs)


def _loss(output: Any) -> torch.Tensor:
    loss = getattr(output, "loss", None)
    if loss is None and isinstance(output, dict):
        loss = output.get("loss")
    if loss is None:
        loss = next(_tensors(output), None)
    if not isinstance(loss, torch.Tensor) or not loss.requires_grad:
        raise TraceError(
            f"the model's output, {type(output).__name__}, has no loss: return one that has `.loss`, or a tensor that "
            f"depends on the parameters, or write the step yourself"
        )
    return loss if loss.dim() == 0 else loss.sum()


def _arguments(function: Callable[..., Any], batch_size: int | None, name: str) -> tuple[tuple[Any, ...], int | None]:
    """Return what to call a function with, and the batch size that it gets."""
    if batch_size is not None and batch_size < 1:
        raise TraceError(f"batch size {batch_size} is no batch: use 1 or more")
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        parameters = []
    positional = [p for p in parameters if p.kind in {p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD}]
    required = [p for p in positional if p.default is inspect.Parameter.empty]
    if len(required) > 1:
        raise TraceError(f"{name} has {len(required)} required arguments: it may take one, the batch size")
    if batch_size is not None:
        if not positional:
            raise TraceError(
                f"{name} takes no batch size: give the function an argument for it; only `torchdelta trace` does "
                "without, if no --batch-size is given"
            )
        return (batch_size,), batch_size
    if required:
        raise TraceError(f"{name} needs a batch size: give one, such as 4")
    default = positional[0].default if positional else None
    return (), default if isinstance(default, int) and not isinstance(default, bool) else None


def _checked(built: Any, name: str) -> tuple[nn.Module, Any, Callable[[nn.Module, Any], Any] | None]:
    wanted = "(model, inputs) or (model, inputs, step)"
    if not isinstance(built, tuple) or len(built) not in {2, 3}:
        what = f"a tuple of {len(built)}" if isinstance(built, tuple) else type(built).__name__
        raise TraceError(f"{name} returned {what}: it must return {wanted}")
    model, inputs, *rest = built
    if not isinstance(model, nn.Module):
        raise TraceError(f"{name} returned {type(model).__name__} as the model: it must return {wanted}")
    step = rest[0] if rest else None
    if step is not None and not callable(step):
        raise TraceError(f"{name} returned {type(step).__name__} as the step, which cannot be called")
    if step is None and not isinstance(inputs, torch.Tensor | list | tuple) and not hasattr(inputs, "keys"):
        raise TraceError(f"{name} returned {type(inputs).__name__} as the inputs: use a tensor, a tuple or a dict")
    for where, tensor in (*model.named_parameters(), *(("the inputs", t) for t in _tensors(inputs))):
        if not isinstance(tensor, FakeTensor) and tensor.untyped_storage().nbytes():
            raise TraceError(f"{name}: {where} is a real tensor: build model and inputs inside of the function")
        if tensor.device.type != "cpu":
            raise TraceError(
                f"{name}: {where} is on {tensor.device}: build on CPU; an option chooses the device of the trace"
            )
    return model, inputs, step


@contextlib.contextmanager
def _told(what: str) -> Generator[None]:
    """Turn whatever goes wrong in a user's code into one line."""
    try:
        yield
    except TraceError:
        raise
    # A script's function may leave as well as fail.
    except (Exception, SystemExit) as error:
        text = " ".join(str(error).split()) or "no message"
        kind = type(error).__name__
        if kind in VALUES_WANTED or _NO_DATA in text:
            text = f"it asks for the value of a tensor that is not known without running the step ({text[:100]})"
        else:
            text = f"{kind}: {text[:300]}"
        raise TraceError(f"{what}: {text}") from error


@contextlib.contextmanager
def _same_random_numbers() -> Generator[None]:
    """Draw the same numbers in every trace, and leave the caller's generators as they were.

    Some models draw masks and dropped layers on the host, from Python's or numpy's generator.
    """
    numpy: Any = sys.modules.get("numpy")
    python_state = random.getstate()
    numpy_state = None if numpy is None else numpy.random.get_state()
    with torch.random.fork_rng(devices=[]):
        try:
            torch.manual_seed(0)
            random.seed(0)
            if numpy is not None:
                numpy.random.seed(0)
            yield
        finally:
            random.setstate(python_state)
            if numpy is not None:
                numpy.random.set_state(numpy_state)


@contextlib.contextmanager
def _silent_torch() -> Generator[None]:
    """Keep torch from logging, with a traceback, each fake kernel that fails: the error says it in one line."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(before)


@contextlib.contextmanager
def _quiet_collector() -> Generator[None]:
    """Keep Python's collector of cycles out of the step: when it would free a tensor is chance."""
    gc.collect()
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextlib.contextmanager
def _optimizers_noted(found: dict[int, torch.optim.Optimizer], mode: StepMode) -> Generator[None]:
    def watched(closure: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            mode.begin_forward()
            loss = closure(*args, **kwargs)
            mode.is_in_optimizer = True
            return loss

        return call

    def before(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any]:
        found[id(optimizer)] = optimizer
        mode.is_in_optimizer = True
        args = tuple(watched(each) if place == 1 and callable(each) else each for place, each in enumerate(args))
        return args, {
            name: watched(each) if name == "closure" and callable(each) else each for name, each in kwargs.items()
        }

    def after(_optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        mode.is_in_optimizer = False

    handles = (register_optimizer_step_pre_hook(before), register_optimizer_step_post_hook(after))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextlib.contextmanager
def _gradients_noted(parameters: Iterable[torch.Tensor], mode: StepMode) -> Generator[None]:
    """Note each gradient when it has been put into its `.grad`."""

    def accumulated(parameter: torch.Tensor) -> None:
        if parameter.grad is not None:
            mode.note((parameter.grad,), "gradient")

    handles = [p.register_post_accumulate_grad_hook(accumulated) for p in parameters if p.requires_grad and p.is_leaf]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _parameters(model: nn.Module, optimizers: Iterable[torch.optim.Optimizer]) -> list[torch.Tensor]:
    """Return the parameters of a model, and what else optimizers update: those of a second model, for example."""
    updated = (p for one in optimizers for group in one.param_groups for p in group["params"])
    return list({id(p): p for p in (*model.parameters(), *updated)}.values())


def _states(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    for state in optimizer.state.values():
        yield from _tensors(state)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)
    elif hasattr(value, "keys") and hasattr(value, "values"):
        for item in value.values():
            yield from _tensors(item)


def _name(function: Callable[..., Any]) -> str:
    module = getattr(function, "__module__", None)
    name = getattr(function, "__qualname__", None) or type(function).__name__
    return f"{module}:{name}" if module else name
