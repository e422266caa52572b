"""Predicts how many new bytes an op will allocate for its outputs, so that room can be made before it runs.

The answer depends on the op, the shapes and dtypes of its tensors and its other arguments; it is learned once for each
such key. So is, where the allocator is counted, what the op allocates beside its outputs. A first meeting is answered
by running the op on meta tensors, and where that is impossible (a data-dependent output) by an upper guess; the truth
replaces either.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch

from torchdelta._torch import Quietly, is_mkldnn_enabled, storage_address
from torchdelta.aten.facts import Kind, OpFacts, facts_of

if TYPE_CHECKING:
    from torchdelta.runtime.optime import Timing

_CONVOLUTION_DIM: Final = 4
_MAX_KEYS: Final = 4096
_WRITING: Final = (Kind.WRITE, Kind.REPLACE)
# 1 == 1.0 == True, and yet they promote a tensor to different dtypes.
_EQUAL_TO_INTS: Final = frozenset({float, bool, complex})
# What a key may hold. Of anything else (a storage that `set_` puts a tensor on, a generator, a process group) it holds
# the class: a key lives long, and would keep the memory behind it, or be another one at each call.
_VALUES: Final = frozenset(
    {type(None), int, str, torch.Size, torch.device, torch.dtype, torch.layout, torch.memory_format}
)


class Need:
    """What one op on tensors of certain shapes takes. One object a key, so that learning hashes nothing."""

    __slots__ = ("inside_bytes", "is_inside_known", "output_bytes", "timing")

    def __init__(self, output_bytes: int, inside_bytes: int) -> None:
        self.output_bytes = output_bytes  # of new storages that it hands out
        self.inside_bytes = inside_bytes  # what it allocates beside them, estimated until it is known
        self.is_inside_known = False
        self.timing: Timing | None = None  # kept by the clock of an accelerator (optime.py)

    def learn_inside(self, size_bytes: int) -> int:
        """Note what it allocated beside its outputs, and return the most that it ever did.

        Strides are no part of the key: the dearest layout counts.
        """
        if not self.is_inside_known or size_bytes > self.inside_bytes:
            self.is_inside_known = True
            self.inside_bytes = size_bytes
        return self.inside_bytes


class Predictor:
    """Learned needs of ops."""

    def __init__(self) -> None:
        self._needs: dict[Any, Need] = {}
        self.num_made = 0  # needs so far, those of ops met for the first time
        self.tells_devices_apart = False  # a session on an accelerator meets the CPU's tensors as well

    def key(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
        """Return what the output size depends on; hashable but for nested tensors, which have no shape."""
        parts: list[Any] = [facts_of(func)]  # hashed by identity; an OpOverload's own hash is slow Python
        has_tensor = False
        for a in args:
            if isinstance(a, torch.Tensor):
                try:
                    parts.append((a.shape, a.dtype, a.device) if self.tells_devices_apart else (a.shape, a.dtype))
                except RuntimeError:
                    return []
                has_tensor = True
            elif a is None or a.__class__ is int:
                parts.append(a)
            elif has_tensor and a.__class__ is float:
                # Sizes do not hang on it, and some change every step (the bias corrections of Adam): a key for each
                # would grow for ever.
                parts.append(float)
            else:
                parts.append(_plain(a))
        if kwargs:
            for name, a in kwargs.items():
                parts.append(name)
                parts.append(float if has_tensor and a.__class__ is float else _plain(a))
        return tuple(parts)

    def need(self, facts: OpFacts, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Need:
        """Return what the op will take: learned, else asked of a meta kernel and estimated."""
        key = self.key(func, args, kwargs)
        try:
            need = self._needs.get(key)
        except TypeError:  # an unhashable argument: rare, ask each time
            return self._new_need(facts, func, args, kwargs)
        if need is None:
            if len(self._needs) > _MAX_KEYS:
                self._needs.clear()
            self.num_made += 1
            need = self._needs[key] = self._new_need(facts, func, args, kwargs)
        return need

    def _new_need(self, facts: OpFacts, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Need:
        output_bytes = self._ask(facts, func, args, kwargs)
        if facts.name.startswith("aten.native_batch_norm_backward."):
            return Need(output_bytes, batch_norm_workspace_bytes(args))
        if not facts.reorders:
            return Need(output_bytes, 0)
        # What the backward of a convolution makes is as large as what it reads.
        is_backward = facts.name.startswith("aten.convolution_backward.")
        return Need(output_bytes, workspace_bytes(args, 0 if is_backward else output_bytes))

    def _ask(self, facts: OpFacts, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> int:
        if facts.kind in _WRITING and not facts.written_keywords and not facts.keeps_statistics:
            return 0
        if (
            func.namespace != "aten"
        ):  # somebody's own kernel might take a meta tensor, and do there what it must do only once
            return _guess(args)
        try:
            with Quietly():
                meta_args = [_to_meta(a) for a in args]
                meta_kwargs = {name: _to_meta(a) for name, a in (kwargs or {}).items() if name != "generator"}
                if meta_kwargs.get("device") is not None:
                    meta_kwargs["device"] = "meta"
                if (
                    not any(isinstance(a, torch.Tensor) for a in args)
                    and "device" not in meta_kwargs
                    and _has_device(func)
                ):
                    meta_kwargs["device"] = "meta"
                outputs = func(*meta_args, **meta_kwargs)
                return new_bytes(outputs, args) + _unsaid_bytes(facts, args)
        except Exception:  # noqa: BLE001 - whatever a meta kernel cannot do, the guess can
            return _guess(args)


def workspace_bytes(args: tuple[Any, ...], output_bytes: int) -> int:
    """Estimate what an op that reorders (`OpFacts.reorders`) allocates inside itself on CPU.

    A blocked copy of each tensor in a plain layout.

    Measured on convolutions of ResNet-50 shapes (torch 2.13, oneDNN): 0.5 to 1.2 times inputs plus outputs, and next to
    nothing in channels-last.
    """
    tensors = [a for a in args if isinstance(a, torch.Tensor)]
    if (
        not tensors
        or tensors[0].device.type != "cpu"
        or tensors[0].dim() != _CONVOLUTION_DIM
        or not is_mkldnn_enabled()
    ):
        return 0
    if tensors[0].is_contiguous(memory_format=torch.channels_last) and not tensors[0].is_contiguous():
        return 0
    return output_bytes + sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def batch_norm_workspace_bytes(args: tuple[Any, ...]) -> int:
    """Estimate what batch norm's backward allocates inside itself on CPU: its input's gradient once more.

    Measured on inputs of 2 to 5 dimensions in both layouts (torch 2.13): that to the byte, and next to nothing where
    the gradient that it reads is expanded from fewer numbers, as that of a sum is.
    """
    gradient, x = args[0], args[1]
    if x.device.type != "cpu" or 0 in gradient.stride():
        return 0
    return x.numel() * x.element_size()


def _unsaid_bytes(facts: OpFacts, args: tuple[Any, ...]) -> int:
    """Return what an op's meta kernel leaves out.

    oneDNN's LSTM hands on a workspace of which the meta kernel knows nothing, about 10 times its hidden states and 6
    times the wider of these and its inputs (measured, rounded up); its backward has one bias gradient more.
    """
    if facts.name.startswith("aten.mkldnn_rnn_layer."):
        x, hidden_size = args[0], args[10]
        num_rows = x.numel() // x.shape[-1]
        return int(num_rows * x.element_size() * (17 * hidden_size + 6.5 * max(0, x.shape[-1] - hidden_size)))
    if facts.name.startswith("aten.mkldnn_rnn_layer_backward."):
        return 2 * sum(a.shape[0] * a.element_size() for a in args[1:3])
    return 0


def _guess(args: tuple[Any, ...]) -> int:
    return sum(a.numel() * a.element_size() for a in args if isinstance(a, torch.Tensor))


def new_bytes(outputs: Any, args: tuple[Any, ...]) -> int:
    """Return the bytes of the distinct storages of an op's outputs, on whatever device.

    Views of arguments do not occur among COMPUTE ops.
    """
    seen: dict[int, int] = {}
    for output in outputs if isinstance(outputs, tuple | list) else (outputs,):
        if isinstance(output, torch.Tensor) and output.layout is torch.strided:
            seen[storage_address(output)] = output.untyped_storage().nbytes()
    for argument in args:
        if isinstance(argument, torch.Tensor) and argument.layout is torch.strided:
            seen.pop(storage_address(argument), None)
    return sum(seen.values())


def _has_device(func: Any) -> bool:
    return any(a.name == "device" for a in func._schema.arguments)


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return (value.shape, value.dtype)
    if value.__class__ is list or value.__class__ is tuple:
        return tuple(_plain(item) for item in value)
    if value.__class__ in _EQUAL_TO_INTS:
        return (value.__class__, value)
    return value if value.__class__ in _VALUES else value.__class__


def _to_meta(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    if value.__class__ is list or value.__class__ is tuple:
        return type(value)(_to_meta(item) for item in value)
    return value
