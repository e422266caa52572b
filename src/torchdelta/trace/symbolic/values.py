"""Knows the values of small tensors that depend on nothing but constants, so that models may look at them.

[Note: values in a step without values]
Fake tensors have no values, but models ask for some: rates that `linspace(...).tolist()` gives while they are built, a
random number against which a layer is dropped, whether a mask has a zero in it. All that hangs on constants, on
generators and on inputs. So beside each fake op of which every input's value is known, and whose outputs have at most
`MAX_ELEMENTS`, the real op runs, and its result is kept with the fake one. Of integers and bools, `MAX_INTEGERS`:
tokens, masks and the places of experts are what models ask about, and at the batch sizes that people train they are
large. What depends on an unknown value is unknown; so is what is written in place from one, with all views of it (a
`_Cell` is shared among them), and whatever requires gradients: parameters, and all that is computed from them. The
random numbers are those of seed 0, the same at every batch size, so that the same layers are dropped.

[Note: what is taken for granted]
Some questions about unknown values have one answer in a step that is worth tracing. Nothing is infinite or not a
number: `isnan`, `isinf` and a comparison with infinity or with itself say so. What `topk` chooses, it chooses in turn,
so that the experts of a router share the tokens evenly, and whoever counts them finds equal numbers.

It is also where ops run whose fake kernel is stricter than the real one (`_grouped_mm` takes float32 on CPU) or is
missing (the CTC loss: the shape of what it saves hangs on the lengths of its targets, which are known).
"""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING, Any, Final

import torch

from torchdelta._torch.fake import FakeTensor
from torchdelta._torch.modes import TorchDispatchMode
from torchdelta._torch.symbolic import without_fake_mode
from torchdelta.aten.facts import Kind, OpFacts, facts_of, written_tensors
from torchdelta.errors import TraceError

if TYPE_CHECKING:
    from collections.abc import Generator

MAX_ELEMENTS: Final = 1 << 16
MAX_INTEGERS: Final = 1 << 23
VALUES_WANTED: Final = frozenset({"DataDependentOutputException", "DynamicOutputShapeException"})
"""Names of the exceptions by which fake tensors say that they would need a value."""

_DEVICE = torch.ops.prim.device.default
aten = torch.ops.aten
_GROUPED = aten._grouped_mm.default
_CTC = aten._ctc_loss.Tensor
_NEVER: Final = frozenset({aten.isnan.default, aten.isinf.default})
_INFINITIES: Final = (float("inf"), float("-inf"))
_MAX_ANSWERS: Final = 1 << 24  # one element stands for all, but whoever sums them up reads all
_ATTRIBUTE: Final = "_torchdelta_value"


class _Unknown(Exception):  # noqa: N818 - no error: a way out of nested lists
    """An argument has no known value."""


class _Cell:
    """Whether what a storage holds is known: shared by all views of it."""

    __slots__ = ("is_known",)

    def __init__(self) -> None:
        self.is_known = True


class KnownValues(TorchDispatchMode):
    """Runs the real op beside the fake one where it can. Enter it above the fake-tensor mode."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an op."""
        del types
        kwargs = kwargs or {}
        if func is _DEVICE:
            return func(*args, **kwargs)
        facts = facts_of(func)
        try:
            reals = _known(args), {name: _known(value) for name, value in kwargs.items()}
        except _Unknown:
            reals = None
        if facts.kind is Kind.NO_OUTPUT and reals is not None:
            with without_fake_mode():
                return func(*reals[0], **reals[1])
        try:
            kernel: Any = _FAKE_KERNELS.get(func, func)
            output = kernel(*args, **kwargs)
        except Exception as error:
            if type(error).__name__ not in VALUES_WANTED:
                raise
            if reals is None:
                output = _picked(*args) if func is aten.index.Tensor else None
                if output is None:
                    raise
                return output
            # A shape that depends on values (`masked_select`): here they are known.
            with without_fake_mode():
                result = func(*reals[0], **reals[1])
            output = _fake_like(result)
            _attach(output, result, None)
            return output
        if reals is None:
            if facts.kind is Kind.WRITE:
                _forget(written_tensors(facts, args, kwargs))
            else:
                _take_for_granted(func, args, output)
        elif _is_small(output):
            _remember(func, facts, args, reals, output)
        return output


def is_known(tensor: Any) -> bool:
    """Return whether a tensor's value can be asked for."""
    try:
        _known(tensor)
    except _Unknown:
        return False
    return True


@contextlib.contextmanager
def usual_methods() -> Generator[None]:
    """Make fake tensors do two things more that real ones do.

    `numpy` gives what is known, and says what it misses where nothing is. `copy.deepcopy`, by which many models make
    their layers, copies: torch's own looks at the storage, which is not where the tensor says that it is.
    """

    def numpy(self: Any, *, force: bool = False) -> Any:
        try:
            real = _known(self.detach() if force else self)
        except _Unknown:
            raise TraceError(
                "the step asks for the value of a tensor that is not known without running the step (numpy)"
            ) from None
        with without_fake_mode():
            return real.numpy(force=force)

    def deepcopy(self: Any, memo: dict[int, Any]) -> Any:
        if id(self) not in memo:
            copied = self.detach().clone()
            is_parameter = isinstance(self, torch.nn.Parameter)
            memo[id(self)] = torch.nn.Parameter(copied, self.requires_grad) if is_parameter else copied
            memo[id(self)].requires_grad_(self.requires_grad)
        return memo[id(self)]

    methods = {"numpy": numpy, "__deepcopy__": deepcopy}
    for name, method in methods.items():
        setattr(FakeTensor, name, method)
    try:
        yield
    finally:
        for name in methods:
            delattr(FakeTensor, name)


@contextlib.contextmanager
def values_shown() -> Generator[None]:
    """Make transformers, where it is loaded, ask for the values that are known.

    It takes fake tensors for a compiler's and does then not look whether a mask is needed: attention would get one, and
    another kernel, that the real step does without.
    """
    module: Any = sys.modules.get("transformers.utils.import_utils")
    original = getattr(module, "is_fake_tensor", None)
    if original is None:
        yield
        return
    module.is_fake_tensor = lambda tensor: original(tensor) and not is_known(tensor)
    try:
        yield
    finally:
        module.is_fake_tensor = original


def _known(value: Any) -> Any:
    """Return an argument with real tensors in place of fake ones."""
    if isinstance(value, FakeTensor):
        cell, real = getattr(value, _ATTRIBUTE, (None, None))
        if cell is None or not cell.is_known or value.requires_grad:
            raise _Unknown
        return real
    if isinstance(value, torch.Tensor) and value.numel() > _limit(value):
        raise _Unknown
    if isinstance(value, list | tuple):
        return type(value)([_known(item) for item in value])
    return value


def _limit(tensor: torch.Tensor) -> int:
    return MAX_ELEMENTS if tensor.is_floating_point() or tensor.is_complex() else MAX_INTEGERS


def _is_small(output: Any) -> bool:
    if isinstance(output, torch.Tensor):
        return output.numel() <= _limit(output)
    return not isinstance(output, list | tuple) or all(_is_small(item) for item in output)


def _remember(func: Any, facts: OpFacts, args: Any, reals: tuple[Any, dict[str, Any]], output: Any) -> None:
    """Run the real op and keep its results with the fake ones."""
    try:
        with without_fake_mode():
            result = func(*reals[0], **reals[1])
    except Exception:  # noqa: BLE001 - whatever it is, the fake op has shown that the step goes on
        _forget(written_tensors(facts, args, {}))
        return
    cell = None
    if facts.kind is Kind.VIEW and args and isinstance(args[0], FakeTensor):
        cell = getattr(args[0], _ATTRIBUTE)[0]
    _attach(output, result, cell)


def _attach(fake: Any, real: Any, cell: _Cell | None) -> None:
    if isinstance(fake, FakeTensor) and isinstance(real, torch.Tensor):
        # What was written in place has its cell already.
        if fake.shape == real.shape and not hasattr(fake, _ATTRIBUTE):
            setattr(fake, _ATTRIBUTE, (cell or _Cell(), real))
    elif isinstance(fake, list | tuple) and isinstance(real, list | tuple):
        for one, other in zip(fake, real, strict=False):
            _attach(one, other, cell)


def _picked(source: torch.Tensor, indices: list[torch.Tensor | None]) -> torch.Tensor | None:
    """Index by masks that are known a tensor that is not; None where a mask is not known either."""
    places: list[torch.Tensor | None] = []
    for index in indices:
        if index is None or index.dtype != torch.bool:
            places.append(index)
            continue
        try:
            mask = _known(index)
        except _Unknown:
            return None
        with without_fake_mode():
            count = int(mask.count_nonzero())
        places += [torch.empty(count, dtype=torch.int64) for _ in range(index.dim())]
    return aten.index.Tensor(source, places)


def _take_for_granted(func: Any, args: Any, output: Any) -> None:
    """Attach what an op's output must be, whatever its input: see [Note: what is taken for granted]."""
    if func is aten.topk.default:
        indices = output[1]
        if 0 < indices.numel() <= MAX_INTEGERS:
            with without_fake_mode():
                in_turn = torch.arange(indices.numel()).remainder(args[0].shape[args[2] if len(args) > 2 else -1])
                _attach(indices, in_turn.view(indices.shape), None)
        return
    answer = None
    if func in _NEVER or (func is aten.eq.Scalar and args[1] in _INFINITIES):
        answer = False
    elif func in {aten.eq.Tensor, aten.ne.Tensor} and args[0] is args[1]:
        answer = func is aten.eq.Tensor
    elif func is aten.ne.Scalar and args[1] in _INFINITIES:
        answer = True
    if answer is not None and output.numel() <= _MAX_ANSWERS:
        with without_fake_mode():
            _attach(output, torch.full((), answer).expand(output.shape), None)


def _fake_like(real: Any) -> Any:
    if isinstance(real, torch.Tensor):
        return torch.empty_strided(real.shape, real.stride(), dtype=real.dtype)
    return type(real)(_fake_like(item) for item in real) if isinstance(real, list | tuple) else real


def _forget(written: list[torch.Tensor]) -> None:
    for tensor in written:
        cell, _ = getattr(tensor, _ATTRIBUTE, (None, None))
        if cell is not None:
            cell.is_known = False


def _grouped_mm(
    self: torch.Tensor,
    mat2: torch.Tensor,
    offs: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Run the fake kernel as if in bfloat16, which is the one dtype that it takes; the shape is the same in all."""
    half = torch.bfloat16
    result = _GROUPED(self.to(half), mat2.to(half), offs, None if bias is None else bias.to(half))
    return torch.empty_strided(result.shape, result.stride(), dtype=out_dtype or self.dtype)


def _ctc_loss(
    log_probs: torch.Tensor,
    targets: torch.Tensor,
    input_lengths: torch.Tensor,
    target_lengths: torch.Tensor,
    blank: int = 0,
    zero_infinity: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the losses and the table of partial sums, in the shapes of LossCTC.cpp and LossCTC.cu."""
    try:
        lengths = _known(target_lengths)
    except _Unknown:
        return _CTC(log_probs, targets, input_lengths, target_lengths, blank, zero_infinity)  # says what it misses
    with without_fake_mode():
        longest = int(lengths.max())
    num_steps, batch_size, _ = log_probs.shape
    return log_probs.new_empty(batch_size), log_probs.new_empty(batch_size, num_steps, 2 * longest + 1)


def _ctc_loss_backward(_grad: torch.Tensor, log_probs: torch.Tensor, *_others: Any) -> torch.Tensor:
    return torch.empty_like(log_probs)


_FAKE_KERNELS: Final = {_GROUPED: _grouped_mm, _CTC: _ctc_loss, aten._ctc_loss_backward.Tensor: _ctc_loss_backward}
