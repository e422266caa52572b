"""Predicts an op's need, its output bytes and workspace bytes, so that room can be made before it runs.

The need is learned once for each key: the op, the shapes and dtypes of its tensors, and its other arguments. Workspace
bytes are learned where the allocator is counted. The first prediction for a key runs the op on meta tensors; where that
is impossible (a data-dependent output) it is a guess. The measured need replaces either; for outputs that depend on
data, room for their bound is made as well where that is possible (`VaryingNeed`).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final

import torch

from torchdelta._torch.engine import graph_task_id
from torchdelta._torch.modes import Quietly
from torchdelta._torch.ops import schema_of
from torchdelta._torch.storages import address_of, storage_address, storage_behind
from torchdelta._torch.tensors import storage_of
from torchdelta.aten.facts import Kind, OpFacts
from torchdelta.runtime.record.bounds import most_bytes
from torchdelta.runtime.record.convolution_workspaces import reordered_bytes
from torchdelta.runtime.record.workspaces import copied_matrix_bytes, estimated_bytes, possible_bytes
from torchdelta.runtime.state.need import Need, VaryingNeed

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

MAX_KEYS: Final = 4096
_WRITING: Final = (Kind.WRITE, Kind.REPLACE)
# 1 == 1.0 == True, and yet they promote a tensor to different dtypes.
_EQUAL_TO_INTS: Final = frozenset({float, bool, complex})
# Classes whose values a key may hold. Any other value (the storage given to `set_`, a generator, a process group) is
# replaced by its class: a key lives long and would keep the value's memory alive, or would differ at each call.
_VALUES: Final = frozenset(
    {type(None), int, str, torch.Size, torch.device, torch.dtype, torch.layout, torch.memory_format}
)


class Predictor:
    """Learned needs of ops, by key."""

    def __init__(self, accelerator: torch.device | None = None) -> None:
        self.learned: dict[Any, Need] = {}
        self.num_made = 0  # needs so far, one for each new key
        self.accelerator = accelerator  # of the session, which sees tensors of other devices as well; None on the CPU

    def key(self, facts: OpFacts, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
        """Return what the output size depends on. Not hashable for nested tensors, which have no shape."""
        parts: list[Any] = [facts]  # hashed by identity; an OpOverload's own hash is slow Python
        has_tensor = takes_lists = False
        for a in args:
            if isinstance(a, torch.Tensor):
                try:
                    parts.append((a.shape, a.dtype, a.device) if self.accelerator is not None else (a.shape, a.dtype))
                except RuntimeError:
                    return []
                has_tensor = True
            elif a is None or a.__class__ is int:
                parts.append(a)
            elif has_tensor and a.__class__ is float:
                # Sizes do not depend on it, and some change every step (the bias corrections of Adam): with a key for
                # each value the table would grow without end.
                parts.append(float)
            elif a.__class__ is list and a and isinstance(a[0], torch.Tensor):
                has_tensor = takes_lists = True
                parts.append(_plain(a))
                if self.accelerator is not None:
                    parts.append(a[0].device)
            elif takes_lists and a.__class__ is list:
                # One for each tensor. In the arguments of other ops, a list of floats may scale sizes.
                parts.append(tuple(float if item.__class__ is float else _plain(item) for item in a))
            else:
                parts.append(_plain(a))
        if facts.is_sized_by_memory:
            parts.append(copied_matrix_bytes(args) if facts.copies_strided else _spare_bytes(args[0]))
        if kwargs:
            for name, a in kwargs.items():
                parts.append(name)
                parts.append(float if has_tensor and a.__class__ is float else _plain(a))
            if facts.written_keywords:  # how much an `out` grows depends on the memory that it has
                parts.extend(_spare_bytes(buffer) for buffer in _out_buffers(facts, kwargs))
        return tuple(parts)

    def need(self, facts: OpFacts, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Need:
        """Return what the op will take: as learned, else from its meta kernel and estimates."""
        key = self.key(facts, args, kwargs)
        try:
            need = self.learned.get(key)
        except TypeError:  # an unhashable argument: rare, predict each time
            return self._new_need(facts, func, args, kwargs)
        if need is None:
            if len(self.learned) > MAX_KEYS:
                self.learned.clear()
            self.num_made += 1
            need = self.learned[key] = self._new_need(facts, func, args, kwargs)
        return need

    def _new_need(self, facts: OpFacts, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Need:
        if self.accelerator is not None and _device_of(args, kwargs) != self.accelerator:
            return Need(0, 0)
        if facts.written_keywords and not facts.keeps_statistics:
            return self._need_of_growth(facts, func, args, kwargs)
        if facts.resizes:
            return _need_of_resize(args)
        predicted_bytes = self._predict(facts, func, args, kwargs)
        need = _varying_need(facts, args) if predicted_bytes is None else Need(predicted_bytes, 0)
        need.workspace_bytes = estimated_bytes(facts, args, need.output_bytes)
        need.possible_bytes = possible_bytes(facts, args, need.output_bytes)
        return need

    def _need_of_growth(self, facts: OpFacts, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Need:
        """Return what an op with `out=` will take: the growth of its buffers."""
        buffers = _out_buffers(facts, kwargs)
        held_bytes = sum(map(_spare_bytes, buffers))
        try:
            if func.namespace != "aten":
                raise NotImplementedError  # noqa: TRY301 - as below
            with Quietly():
                meta_args, meta_kwargs = _all_to_meta(args, kwargs)
                func(*meta_args, **meta_kwargs)
                grown_bytes = _growth_bytes(buffers, _out_buffers(facts, meta_kwargs))
        except NotImplementedError:  # the output's size depends on data
            need = _varying_need(facts, args, held_bytes)
        except Exception:  # noqa: BLE001 - the op will raise the same error, which the user should see
            need = Need(0, 0)
        else:
            # A storage that grows is copied: the old memory is freed only after the copy.
            need = Need(grown_bytes, held_bytes if grown_bytes else 0)
        if facts.copies_strided:
            need.workspace_bytes += copied_matrix_bytes(args)
        elif facts.reorders:
            need.workspace_bytes += reordered_bytes(args, sum(b.numel() * b.element_size() for b in buffers))
        return need

    def _predict(self, facts: OpFacts, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> int | None:
        """Return an op's output bytes, from its meta kernel; None if that cannot be run."""
        is_writing = facts.kind in _WRITING and not facts.keeps_statistics
        if is_writing and (facts.is_collective or not _makes_outputs(func)):
            return 0
        if func.namespace != "aten":  # a custom kernel may have side effects that must happen only once
            return None
        try:
            with Quietly():
                meta_args, meta_kwargs = _all_to_meta(args, kwargs)
                if meta_kwargs.get("device") is not None:
                    meta_kwargs["device"] = "meta"
                if (
                    not any(isinstance(a, torch.Tensor) for a in args)
                    and "device" not in meta_kwargs
                    and _has_device(func)
                ):
                    meta_kwargs["device"] = "meta"
                outputs = func(*meta_args, **meta_kwargs)
                return new_bytes(outputs, meta_args if is_writing else args) + omitted_bytes(facts, args)
        except Exception:  # noqa: BLE001 - meta kernels raise all kinds of errors
            return None


def omitted_bytes(facts: OpFacts, args: tuple[Any, ...]) -> int:
    """Return the output bytes that an op's meta kernel leaves out.

    oneDNN's LSTM returns a workspace that its meta kernel omits: about 10 times its hidden states and 6 times the wider
    of these and its inputs (measured, rounded up). Its backward returns one more bias gradient.
    """
    if facts.name.startswith("aten.mkldnn_rnn_layer."):
        x, hidden_size = args[0], args[10]
        num_rows = x.numel() // x.shape[-1]
        return int(num_rows * x.element_size() * (17 * hidden_size + 6.5 * max(0, x.shape[-1] - hidden_size)))
    if facts.name.startswith("aten.mkldnn_rnn_layer_backward."):
        return 2 * sum(a.shape[0] * a.element_size() for a in args[1:3])
    return 0


def _device_of(args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> torch.device:
    """Return the device on which an op makes its outputs: the one asked for, else that of its tensors.

    A tensor without dimensions may be on the CPU, whatever the device of the others.
    """
    device = (kwargs or {}).get("device")
    if device is not None:
        asked = torch.device(device)
        index: Any = asked.index  # which may be None, whatever the stubs say
        if index is None and asked.type != "cpu":
            return torch.device(asked.type, torch.accelerator.current_device_index())
        return asked
    tensors = [tensor for tensor in _each((*args, *(kwargs or {}).values())) if isinstance(tensor, torch.Tensor)]
    found = next((tensor for tensor in tensors if tensor.dim()), tensors[0] if tensors else None)
    return torch.device("cpu") if found is None else found.device


def _each(values: tuple[Any, ...]) -> Iterator[Any]:
    """Yield values, and those inside lists."""
    for value in values:
        if value.__class__ is list or value.__class__ is tuple:
            yield from value
        else:
            yield value


def _varying_need(facts: OpFacts, args: tuple[Any, ...], held_bytes: int = 0) -> VaryingNeed:
    """Return what an op will take whose output size is not known before: as much as its inputs, if it may.

    Args:
        facts: Of the op.
        args: Its inputs.
        held_bytes: What its `out` has already, and what is copied if that does not suffice.
    """
    guess_bytes = sum(a.numel() * a.element_size() for a in args if isinstance(a, torch.Tensor))
    most = most_bytes(facts, args)
    if most is None:
        return VaryingNeed(max(0, guess_bytes - held_bytes), 0, held_bytes)
    grown_bytes = max(0, most[0] - held_bytes)
    return VaryingNeed(
        min(max(0, guess_bytes - held_bytes), grown_bytes), grown_bytes, most[1] + (held_bytes if grown_bytes else 0)
    )


def _need_of_resize(args: tuple[Any, ...]) -> Need:
    """Return what a resize will take: the growth of the storage, and the old one, which is freed after it is copied."""
    tensor, size = args[:2]
    num_elements = size.numel() if isinstance(size, torch.Tensor) else math.prod(size)
    grown_bytes = max(0, num_elements * tensor.element_size() - _spare_bytes(tensor))
    if not grown_bytes or tensor.layout is not torch.strided:
        return Need(0, 0)
    offset_bytes = int(tensor.storage_offset()) * tensor.element_size()
    return Need(grown_bytes, offset_bytes + _spare_bytes(tensor))


def new_bytes(outputs: Any, args: Sequence[Any]) -> int:
    """Return the bytes of the distinct storages of an op's outputs, on any device, less those of its arguments."""
    seen: dict[int, int] = {}
    for output in outputs if isinstance(outputs, tuple | list) else (outputs,):
        if isinstance(output, torch.Tensor) and output.layout is torch.strided:
            storage = storage_of(output)
            if storage is not None:
                seen[address_of(storage)] = storage.nbytes()
    for argument in args:
        if isinstance(argument, torch.Tensor) and argument.layout is torch.strided:
            seen.pop(storage_address(argument), None)
    return sum(seen.values())


def _has_device(func: Any) -> bool:
    return any(a.name == "device" for a in schema_of(func).arguments)


def _makes_outputs(func: Any) -> bool:
    """Return whether an op returns more than the arguments that it writes."""
    return any(each.alias_info is None for each in schema_of(func).returns)


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return (value.shape, value.dtype)
    if value.__class__ is list or value.__class__ is tuple:
        return tuple(_plain(item) for item in value)
    if value.__class__ in _EQUAL_TO_INTS:
        return (value.__class__, value)
    return value if value.__class__ in _VALUES else value.__class__


def _all_to_meta(args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> tuple[list[Any], dict[str, Any]]:
    """Return an op's arguments on the meta device."""
    return [_to_meta(a) for a in args], {name: _to_meta(a) for name, a in (kwargs or {}).items()}


def _to_meta(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    if value.__class__ is list or value.__class__ is tuple:
        return type(value)(_to_meta(item) for item in value)
    return None if isinstance(value, torch.Generator) else value  # a generator would advance


# [Note: tensors given as out=]
# An op allocates no new storage for `out`. It resizes an `out` whose shape differs from the result's, and the storage
# grows only if it is too small.


def _out_buffers(facts: OpFacts, kwargs: dict[str, Any] | None) -> list[torch.Tensor]:
    """Return the tensors that an op writes through keyword arguments."""
    found: list[torch.Tensor] = []
    for keyword in facts.written_keywords:
        value: Any = (kwargs or {}).get(keyword)
        items: Any = value if isinstance(value, list | tuple) else (value,)
        found += [item for item in items if isinstance(item, torch.Tensor)]
    return found


def _spare_bytes(buffer: torch.Tensor) -> int:
    """Return how many bytes fit into a tensor's storage from its first element on; 0 without a storage.

    In backward the tensor may be a gradient, whose storage object must not be made (see [Note: storages are known by
    address] in _torch/storages.py): there it returns the bytes of the tensor's own elements.
    """
    if buffer.layout is not torch.strided:
        return 0
    if graph_task_id() != -1 and not torch.is_grad_enabled():
        return buffer.numel() * buffer.element_size()
    storage = storage_of(buffer)
    return 0 if storage is None else storage.nbytes() - int(buffer.storage_offset()) * buffer.element_size()


def _growth_bytes(buffers: list[torch.Tensor], results: list[torch.Tensor]) -> int:
    """Return by how many bytes `buffers` grow, given the `results` of the same op on meta copies of them."""
    grown_bytes = 0
    for buffer, result in zip(buffers, results, strict=True):
        if buffer.shape != result.shape:
            grown_bytes += max(0, storage_behind(result).nbytes() - _spare_bytes(buffer))
    return grown_bytes
