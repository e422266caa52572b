"""The time of an op on a CUDA device by its kind of kernel: a roofline whose shares were fitted to published steps.

[Note: the kernel model]
`time_s = max(moved bytes / memory rate, FLOPs / matrix rate) + copies + launch`, and of each of the two rates a kind of
kernel reaches a share. The machine gives the rates of large square products and of streaming kernels; the shares are
the same for all machines, and there are few (`KernelShares`):

- Products of matrices and convolutions work in tiles: a short sum (`inner` small) pays for filling the pipeline, a
  narrow result for the empty part of its tiles. Groups of a convolution are so many narrow products, in smaller tiles.
- Half and TF32 convolutions run on tensor cores, whose kernels want channels innermost in memory and a multiple of 8 of
  them; otherwise cuDNN copies input and output to and fro.
- Without tensor cores a 3 x 3 convolution is computed by Winograd's algorithm, in up to 2.25 times fewer
  multiplications. Depthwise convolutions run on the vector units, a few percent of them busy. A convolution of an image
  (3 channels) fills half of a tile.
- cuDNN 8 has tensor-core kernels for grouped convolutions with channels innermost only where groups are at most 8
  channels wide, or there is a multiple of 32 of them (ResNeXt). All others run on the vector units as depthwise ones
  do: steps of RegNets took up to 3.5 times as long with channels innermost as without (timm's tables of torch 1.12;
  the same of 1.10 in pytorch/pytorch#70954). With cuDNN 9 they do not (timm's tables of torch 2.4). So a machine says
  whose kernels it has (`Machine.kernels`): those of the catalog today's, figures of the ledger those of their time.
- Batch norm reads its input twice in forward, and input and gradient twice in backward: 3 passes instead of 2, 5
  instead of 3. With channels innermost cuDNN keeps some of it on the chip.
- Each op has a fixed time: eager torch launches one or several kernels for it, and none starts before the last ends.

`docs/fidelity.md` compares it with every published figure, those left out of the fit in turn.

[Note: the frozen shares]
`CUDA_SHARES` is what `python -m benchmarks ledger --fit` found on 208 published steps of 57 vision models and 3
language models on 6 kinds of GPU, and on the kernel times of one profile; each share was drawn to a first guess, which
`benchmarks/ledger/fitting.py` has with its reason. Do not change one by hand: fit again, and write the ledger again.
"""

from typing import Final, Literal, NamedTuple

import msgspec

from torchdelta.machine.model import Machine, matrix_flops_per_s
from torchdelta.trace.model import Op, Product

__all__ = ["CUDA_SHARES", "Family", "KernelShares", "KernelTerms", "family_of", "kernel_time_s", "terms_of"]

Family = Literal["convolution", "product", "attention", "other"]
"""What kinds of kernels are told apart for an interval: see interval.py."""

_ALIGNMENT: Final = 8
_IMAGE_CHANNELS: Final = 4
_WINOGRAD_WINDOW: Final = 9
_GROUPS_OF_CUDNN_8: Final = 32
_WIDTH_OF_CUDNN_8: Final = 8
_MIN_WRITES_OF_TRAINING: Final = 4  # output, two saved statistics, and one running statistic or more


class KernelShares(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What kinds of kernels reach of a machine's rates. See [Note: the kernel model].

    Attributes:
        stream: Share of the memory rate of everything that has no share of its own.
        norm: The same for a batch norm, whose second reads are counted.
        norm_channels_last: The same with channels innermost.
        softmax: The same for a softmax.
        matrix: Share of the matrix rate of large products and dense convolutions.
        stem: The same for convolutions of images.
        depthwise: Share of the vector units' rate of depthwise convolutions.
        fallback: The same of grouped convolutions that cuDNN 8 has no tensor-core kernel for.
        winograd: Factor on the rate of 3 x 3 convolutions without tensor cores.
        backward: Factor on the rate of a convolution's gradients.
        fill_inner: Length of a sum at which filling the pipeline takes as long as the sum itself.
        fill_narrow: Width of a result at which half of a tile is empty.
        fill_grouped: The same for each group of a convolution.
        copies: Passes over input and output that a convolution in the other layout costs.
        copies_pointwise: The same for a 1 x 1 convolution, which partly runs in either layout.
        launch_s: Seconds of each op.
    """

    stream: float
    norm: float
    norm_channels_last: float
    softmax: float
    matrix: float
    stem: float
    depthwise: float
    fallback: float
    winograd: float
    backward: float
    fill_inner: float
    fill_narrow: float
    fill_grouped: float
    copies: float
    copies_pointwise: float
    launch_s: float


CUDA_SHARES: Final = KernelShares(
    stream=1.03,
    norm=0.991,
    norm_channels_last=1.15,
    softmax=0.343,
    matrix=0.985,
    stem=0.598,
    depthwise=0.0908,
    fallback=0.232,
    winograd=2.08,
    backward=0.848,
    fill_inner=70.1,
    fill_narrow=17,
    fill_grouped=53.7,
    copies=1.86,
    copies_pointwise=0.541,
    launch_s=1.9e-05,
)


class KernelTerms(NamedTuple):
    """What the price of an op depends on beside the shares: numbers, and the names of its shares."""

    moved_bytes: float
    memory_share: str
    flops: float
    flops_per_s: float
    matrix_share: str
    inner: float
    """Length of its sums; 0: it is not priced in tiles."""
    narrow: float
    """The smaller side of a result."""
    narrow_share: str
    is_winograd: bool
    is_backward: bool
    copied_bytes: float
    copies_share: str


def terms_of(op: Op, moved_bytes: int, machine: Machine, *, tf32: bool = True) -> KernelTerms:
    """Return what the price of an op depends on, on a machine.

    `tf32`: whether float32 products run on tensor cores.
    """
    name = op.name.split(".")[1] if "." in op.name else op.name
    passes, memory_share = 1.0, "stream"
    if "batch_norm" in name:
        memory_share = "norm_channels_last" if op.layout == "channels_last" else "norm"
        if "backward" in name:
            passes = 5 / 3
        elif len(op.writes) >= _MIN_WRITES_OF_TRAINING:
            passes = 3 / 2
    elif "softmax" in name:
        memory_share = "softmax"
    dtype = op.dtype or "float32"
    sizes = op.product
    is_convolution = "convolution" in name
    is_backward = is_convolution and "backward" in name
    is_half = dtype in {"float16", "bfloat16"} and dtype in machine.flops_per_s
    has_tensor_cores = is_half or (dtype == "float32" and tf32 and "tf32" in machine.flops_per_s)
    rate = matrix_flops_per_s(machine, dtype, tf32=tf32) if op.flops else 1.0
    matrix_share, inner, narrow, narrow_share = "matrix", 0.0, 1.0, "fill_narrow"
    is_winograd, copied_bytes, copies_share = False, 0.0, "copies"
    if sizes is not None and "attention" not in name:
        inner = float(max(sizes.inner * max(sizes.window, 1), 1))
        narrow = float(max(min(sizes.columns, sizes.rows), 1))
        if is_convolution and sizes.groups > 1 and sizes.inner == 1:
            matrix_share, inner, has_tensor_cores = "depthwise", 0.0, False
            rate = matrix_flops_per_s(machine, "float32", tf32=False)
        elif is_convolution:
            if sizes.groups > 1:
                narrow_share = "fill_grouped"
                if has_tensor_cores and op.layout == "channels_last" and _lacks_kernel(sizes, machine):
                    matrix_share, has_tensor_cores = "fallback", False
                    rate = matrix_flops_per_s(machine, "float32", tf32=False)
            elif sizes.inner <= _IMAGE_CHANNELS:
                matrix_share = "stem"
            is_winograd = not has_tensor_cores and sizes.window == _WINOGRAD_WINDOW and matrix_share != "fallback"
            is_aligned = sizes.inner <= _IMAGE_CHANNELS or not (sizes.inner % _ALIGNMENT or sizes.columns % _ALIGNMENT)
            if has_tensor_cores and (op.layout != "channels_last" or not is_aligned):
                copied_bytes = 2.0 * moved_bytes
                copies_share = "copies" if sizes.window > 1 else "copies_pointwise"
    return KernelTerms(
        moved_bytes=moved_bytes * passes,
        memory_share=memory_share,
        flops=float(op.flops),
        flops_per_s=rate,
        matrix_share=matrix_share,
        inner=inner,
        narrow=narrow,
        narrow_share=narrow_share,
        is_winograd=is_winograd,
        is_backward=is_backward,
        copied_bytes=copied_bytes,
        copies_share=copies_share,
    )


def _lacks_kernel(sizes: Product, machine: Machine) -> bool:
    """Whether the library of a machine has no tensor-core kernel for a grouped convolution with channels innermost."""
    if machine.kernels != "cuda-cudnn8":
        return False
    return sizes.inner > _WIDTH_OF_CUDNN_8 and sizes.groups % _GROUPS_OF_CUDNN_8 != 0


def kernel_time_s(
    op: Op, moved_bytes: int, machine: Machine, *, tf32: bool = True, shares: KernelShares = CUDA_SHARES
) -> float:
    """Return the seconds that an op takes, given what it moves. See [Note: the kernel model].

    `tf32`: whether float32 products run on tensor cores.
    """
    terms = terms_of(op, moved_bytes, machine, tf32=tf32)
    time_s = terms.moved_bytes / (machine.memory_bytes_per_s * getattr(shares, terms.memory_share))
    if terms.flops:
        share = getattr(shares, terms.matrix_share)
        if terms.inner:
            narrow = getattr(shares, terms.narrow_share) / terms.narrow
            share /= 1.0 + shares.fill_inner / terms.inner + narrow
        if terms.is_winograd:
            share *= shares.winograd
        if terms.is_backward:
            share *= shares.backward
        time_s = max(time_s, terms.flops / (terms.flops_per_s * share))
    copies_s = getattr(shares, terms.copies_share) * terms.copied_bytes / machine.memory_bytes_per_s
    return time_s + copies_s + shares.launch_s


def family_of(op: Op) -> Family:
    """Return what kind of kernel an op is, roughly."""
    if not op.flops:
        return "other"
    if "convolution" in op.name:
        return "convolution"
    return "attention" if "attention" in op.name else "product"
