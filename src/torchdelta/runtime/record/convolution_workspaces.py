"""Estimates of what convolutions on CPU allocate and free again while they run: copies in oneDNN's own layouts.

See workspaces.py for what the two estimates are for. Measured with torch 2.13 on two processors (AVX2, AVX-512), on 1
and 2 threads, on 8,000 convolutions of drawn shapes: usual and odd numbers of channels, strides, dilations, groups, 1
to 3 dimensions, transposed ones, channels-last, half precision. About one in a thousand others took more than the sum
of both estimates. What oneDNN does not compute (float64) unfolds the whole batch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch

from torchdelta._torch.device import has_half_convolutions, is_mkldnn_enabled

if TYPE_CHECKING:
    from torchdelta.aten.facts import OpFacts

__all__ = ["possible_convolution_bytes", "reordered_bytes"]

_LEAST_DIM: Final = 3  # of a batch of sequences
_PICTURE_DIM: Final = 4
_SCRATCH_BYTES: Final = 72 * 1024  # oneDNN's scratch memory for a convolution of a few elements was 2 to 68 KiB
# In a backward over pictures that are small beside the kernel, each thread takes this many copies of the weight.
# Measured: 4.00 to 4.15, where the weight has 64 KiB or more.
_COPIES_PER_THREAD: Final = 4
_SMALL_HEIGHT: Final = 8  # with a stride, pictures up to this height count as small
_MARGIN: Final = 1 / 8  # of the estimate, for what is rounded and aligned


def reordered_bytes(args: tuple[Any, ...], output_bytes: int) -> int:
    """Estimate the workspace of an op that reorders (`OpFacts.reorders`) on CPU: a blocked copy of each plain tensor.

    Measured on convolutions of ResNet-50 shapes (torch 2.13, oneDNN): 0.5 to 1.2 times inputs plus outputs, and almost
    nothing in channels-last.
    """
    tensors = [a for a in args if isinstance(a, torch.Tensor)]
    if (
        not tensors
        or tensors[0].device.type != "cpu"
        or tensors[0].dim() != _PICTURE_DIM
        or not is_mkldnn_enabled()
        or _is_channels_last(tensors[0])
    ):
        return 0
    return output_bytes + sum(map(_size_bytes, tensors))


def possible_convolution_bytes(
    facts: OpFacts, args: tuple[Any, ...], tensors: list[torch.Tensor], output_bytes: int
) -> int:
    """Return what a convolution may take beyond `reordered_bytes`, as far as it was measured.

    Args:
        facts: A forward convolution, or its backward.
        args: Its arguments.
        tensors: Those of them that are tensors on the CPU.
        output_bytes: Of its outputs.
    """
    is_backward = facts.base_name == "convolution_backward"
    shape = _shape(facts, args, output_bytes, is_backward=is_backward)
    if shape is None:
        return 0
    if tensors[0].dtype is torch.float64 or not is_mkldnn_enabled():
        return _SCRATCH_BYTES + shape.batch_size * shape.num_groups * shape.column_bytes
    most_bytes = 2 * shape.weight_bytes
    if is_backward or not (_is_channels_last(args[0]) and shape.keeps_channels_last):
        most_bytes = max(most_bytes, shape.most_bytes(is_backward=is_backward))
    if shape.num_groups > 1 and any(map(_is_channels_last, tensors)):
        most_bytes += shape.dense_weight_bytes * (torch.get_num_threads() if is_backward else 1)
    if tensors[0].dtype in (torch.bfloat16, torch.float16):
        most_bytes = 2 * most_bytes + _possible_half_bytes(args[1] if is_backward else args[0], shape)
    foreseen_bytes = reordered_bytes(args, 0 if is_backward else output_bytes)
    return max(0, most_bytes + int(_MARGIN * most_bytes) - foreseen_bytes) + _SCRATCH_BYTES


@dataclass(frozen=True, kw_only=True, slots=True)
class _Shape:
    """The numbers of a convolution that its workspace depends on.

    Attributes:
        batch_size: Pictures.
        num_inputs, num_outputs: Channels.
        num_groups: Groups of channels.
        num_input_positions, num_output_positions: Height times width of a picture, in any number of dimensions.
        height: Of the input, or of the output where that is smaller. Only a backward uses it.
        kernel_size, stride, dilation: One number for each dimension; the last two may have one that holds for all.
        is_transposed: Whether it is a transposed convolution.
        element_bytes: Of a number.
        weight_bytes: Of the weight.
    """

    batch_size: int
    num_inputs: int
    num_outputs: int
    num_groups: int
    num_input_positions: int
    num_output_positions: int
    height: int
    kernel_size: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    is_transposed: bool
    element_bytes: int
    weight_bytes: int

    @property
    def keeps_channels_last(self) -> bool:
        """Whether a forward in channels-last copies the weight alone."""
        return not (self.is_transposed or self.is_unfolded or self.num_groups > 1)

    @property
    def fills_blocks(self) -> bool:
        """Whether the channels of each group fill whole blocks."""
        is_depthwise = self.num_groups == self.num_inputs == self.num_outputs
        channels = (self.num_inputs,) if is_depthwise else self._group_channels
        return not any(n % _channel_block() for n in channels)

    @property
    def is_unfolded(self) -> bool:
        """Whether oneDNN may unfold a picture into columns."""
        if math.prod(self.kernel_size) * max(self.stride) == 1 and self.fills_blocks:
            return False
        is_volume = len(self.kernel_size) == _PICTURE_DIM - 1
        return not self.fills_blocks or is_volume or max(self.dilation) > 1 or self.batch_size == 1

    @property
    def dense_weight_bytes(self) -> int:
        """The bytes of the weight when each group's channels are padded to whole blocks."""
        block = _channel_block()
        filled = math.prod(_round_up(n, block) for n in self._group_channels)
        return self.num_groups * filled * math.prod(self.kernel_size) * self.element_bytes

    @property
    def column_bytes(self) -> int:
        """The columns of one picture and one group: for each position, all inputs that the kernel reads there."""
        inputs, outputs = self._group_channels
        num_positions, num_channels = self.num_output_positions, inputs
        if self.is_transposed:
            num_positions, num_channels = self.num_input_positions, outputs
        return num_channels * math.prod(self.kernel_size) * num_positions * self.element_bytes

    def most_bytes(self, *, is_backward: bool) -> int:
        """Return the copies of all tensors in oneDNN's layouts, and columns or copies for threads where they apply."""
        block = _channel_block()
        most_bytes = self._picture_bytes(self.num_inputs, self.num_input_positions)
        most_bytes += self._picture_bytes(self.num_outputs, self.num_output_positions)
        inputs, outputs = self._group_channels
        filled = _round_up(self.num_inputs if self.is_transposed else self.num_outputs, block)
        filled *= _round_up(outputs if self.is_transposed else inputs, block)
        most_bytes += filled * math.prod(self.kernel_size) * self.element_bytes
        if self.is_unfolded:
            most_bytes += self.column_bytes
        if is_backward or self.is_transposed:
            most_bytes *= 2  # a dense copy of the gradient, and the input's gradient in both layouts
        if is_backward and self._is_small_picture:
            most_bytes += _COPIES_PER_THREAD * torch.get_num_threads() * self.weight_bytes
        return most_bytes

    @property
    def _group_channels(self) -> tuple[int, int]:
        return self.num_inputs // self.num_groups, self.num_outputs // self.num_groups

    @property
    def _is_small_picture(self) -> bool:
        reach = (self.kernel_size[0] - 1) * self.dilation[0]
        return 2 * reach >= self.height or (self.stride[0] > 1 and self.height <= _SMALL_HEIGHT)

    def _picture_bytes(self, num_channels: int, num_positions: int) -> int:
        return self.batch_size * _round_up(num_channels, _channel_block()) * num_positions * self.element_bytes


def _shape(facts: OpFacts, args: tuple[Any, ...], output_bytes: int, *, is_backward: bool) -> _Shape | None:
    """Return the numbers of a convolution, or None if it is none: the op then raises its own error."""
    x, weight = (args[1], args[2]) if is_backward else (args[0], args[1])
    if facts.base_name == "mkldnn_convolution":
        (stride, dilation, num_groups), is_transposed = args[4:7], False
    else:
        stride, _, dilation, is_transposed, _, num_groups = args[4:10] if is_backward else args[3:9]
    if x.dim() != weight.dim() or x.dim() < _LEAST_DIM or num_groups < 1 or not stride or not dilation:
        return None
    if is_backward and args[0].dim() != x.dim():
        return None
    num_outputs = weight.shape[1] * num_groups if is_transposed else weight.shape[0]
    if is_backward:
        num_positions = math.prod(args[0].shape[2:])
    else:
        num_positions = output_bytes // max(1, x.shape[0] * num_outputs * x.element_size())
    return _Shape(
        batch_size=x.shape[0],
        num_inputs=x.shape[1],
        num_outputs=num_outputs,
        num_groups=num_groups,
        num_input_positions=math.prod(x.shape[2:]),
        num_output_positions=num_positions,
        height=min(x.shape[2], args[0].shape[2]) if is_backward else x.shape[2],
        kernel_size=tuple(weight.shape[2:]),
        stride=tuple(stride),
        dilation=tuple(dilation),
        is_transposed=is_transposed,
        element_bytes=x.element_size(),
        weight_bytes=_size_bytes(weight),
    )


def _possible_half_bytes(x: torch.Tensor, shape: _Shape) -> int:
    """Return the columns of all pictures where half precision is computed without instructions for it."""
    if has_half_convolutions(x.dtype):
        return 0
    return max(_size_bytes(x) * math.prod(shape.kernel_size), shape.batch_size * shape.num_groups * shape.column_bytes)


def _channel_block() -> int:
    """Return how many channels lie together in oneDNN's layouts: the floats of a vector register."""
    return 16 if torch.backends.cpu.get_cpu_capability() == "AVX512" else 8


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _is_channels_last(tensor: torch.Tensor) -> bool:
    is_picture = tensor.dim() == _PICTURE_DIM
    return is_picture and tensor.is_contiguous(memory_format=torch.channels_last) and not tensor.is_contiguous()


def _size_bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()
