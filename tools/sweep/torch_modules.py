"""Every module class that torch.nn exports, in training and in evaluation mode.

torch ships sample inputs for most of them (its module database); the others have theirs here. A class that cannot be
trained by itself is listed with the reason, so that none is left out silently.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from tests.same_bits import judge, op_database
from tools.sweep.subjects import AUTOCAST, PLAIN, NotConstructibleError, Subject

if TYPE_CHECKING:
    from tests.same_bits.judge import Scope, Step

# torch's database takes seconds to import: so many processes share it.
NUM_GROUPS = 6

NOT_TRAINED = {
    "Container": "deprecated alias of Module, without a forward",
    "Module": "the base class, without a forward",
    "RNNBase": "the base class of LSTM, GRU and RNN, without a forward",
    "RNNCellBase": "the base class of the recurrent cells, without a forward",
    "SyncBatchNorm": "refuses inputs that are not on an accelerator",
}


class Summed(nn.Module):
    """A module that holds one of the containers, and calls or multiplies with everything in it."""

    def __init__(self, held: Any) -> None:
        super().__init__()
        self.held = held

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Sum up what the parts make of x."""
        parts = self.held.values() if isinstance(self.held, nn.ModuleDict | nn.ParameterDict) else self.held
        return torch.stack([part(x) if isinstance(part, nn.Module) else x * part for part in parts]).sum(0)


def parts() -> list[nn.Module]:
    """Make some modules for a container."""
    return [nn.Linear(6, 6), nn.Tanh(), nn.BatchNorm1d(6)]


def parameters() -> list[nn.Parameter]:
    """Make some parameters for a container."""
    return [nn.Parameter(torch.randn(6)) for _ in range(3)]


def real(*shape: int) -> torch.Tensor:
    """Draw an input that wants a gradient."""
    return torch.randn(shape, requires_grad=True)


def pooled(kind: Any, *shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Pool with indices, for a module that undoes it."""
    values, indices = kind(2, return_indices=True)(torch.randn(shape))
    return values.requires_grad_(), indices


# name -> (make the module, draw its inputs), as many as show its ways.
Sample = tuple[Callable[[], nn.Module], Callable[[], tuple[Any, ...]]]
# fmt: off
SAMPLES: dict[str, list[Sample]] = {
    "AdaptiveLogSoftmaxWithLoss": [
        (lambda: nn.AdaptiveLogSoftmaxWithLoss(8, 12, [3, 7]), lambda: (real(5, 8), torch.tensor([0, 2, 4, 8, 11]))),
    ],
    "AlphaDropout": [(lambda: nn.AlphaDropout(0.3), lambda: (real(4, 6),))],
    "ChannelShuffle": [(lambda: nn.ChannelShuffle(2), lambda: (real(2, 4, 3, 3),))],
    "CosineSimilarity": [(nn.CosineSimilarity, lambda: (real(4, 6), real(4, 6)))],
    "CrossMapLRN2d": [(lambda: nn.CrossMapLRN2d(3), lambda: (real(2, 6, 4, 4),))],
    "DataParallel": [(lambda: nn.DataParallel(nn.Linear(6, 3)), lambda: (real(4, 6),))],
    "Dropout": [
        (lambda: nn.Dropout(0.4), lambda: (real(4, 6),)),
        (lambda: nn.Dropout(0.4, inplace=True), lambda: (real(4, 6),)),
    ],
    "Dropout1d": [(lambda: nn.Dropout1d(0.4), lambda: (real(3, 4, 5),))],
    "Dropout2d": [(lambda: nn.Dropout2d(0.4), lambda: (real(3, 4, 5, 5),))],
    "Dropout3d": [(lambda: nn.Dropout3d(0.4), lambda: (real(3, 4, 2, 3, 3),))],
    "EmbeddingBag": [
        (lambda mode=mode, sparse=sparse: nn.EmbeddingBag(10, 4, mode=mode, sparse=sparse),
         lambda: (torch.randint(0, 10, (7,)), torch.tensor([0, 3, 3])))
        for mode, sparse in (("mean", False), ("sum", False), ("max", False), ("sum", True), ("mean", True))
    ],
    "FeatureAlphaDropout": [(lambda: nn.FeatureAlphaDropout(0.3), lambda: (real(3, 4, 5),))],
    "Flatten": [(nn.Flatten, lambda: (real(2, 3, 4),))],
    "Fold": [(lambda: nn.Fold((4, 5), (2, 2)), lambda: (real(2, 12, 12),))],
    # The database draws their random samples in float64 only.
    "FractionalMaxPool2d": [(lambda: nn.FractionalMaxPool2d(2, output_ratio=0.6), lambda: (real(2, 3, 7, 7),))],
    "FractionalMaxPool3d": [(lambda: nn.FractionalMaxPool3d(2, output_size=3), lambda: (real(2, 3, 5, 6, 7),))],
    "Hardsigmoid": [
        (nn.Hardsigmoid, lambda: (real(4, 6),)),
        (lambda: nn.Hardsigmoid(inplace=True), lambda: (real(4, 6),)),
    ],
    "Identity": [(nn.Identity, lambda: (real(4, 6),))],
    "LazyBatchNorm1d": [(nn.LazyBatchNorm1d, lambda: (real(4, 6),))],
    "LazyBatchNorm2d": [(nn.LazyBatchNorm2d, lambda: (real(4, 6, 3, 3),))],
    "LazyBatchNorm3d": [(nn.LazyBatchNorm3d, lambda: (real(4, 6, 2, 3, 3),))],
    "LazyInstanceNorm1d": [(lambda: nn.LazyInstanceNorm1d(affine=True, track_running_stats=True),
                            lambda: (real(2, 4, 6),))],
    "LazyInstanceNorm2d": [(lambda: nn.LazyInstanceNorm2d(affine=True), lambda: (real(2, 4, 3, 3),))],
    "LazyInstanceNorm3d": [(lambda: nn.LazyInstanceNorm3d(affine=True), lambda: (real(2, 4, 2, 3, 3),))],
    "LazyLinear": [(lambda: nn.LazyLinear(3), lambda: (real(4, 6),))],
    "MaxUnpool1d": [(lambda: nn.MaxUnpool1d(2), lambda: pooled(nn.MaxPool1d, 2, 3, 8))],
    "MaxUnpool2d": [(lambda: nn.MaxUnpool2d(2), lambda: pooled(nn.MaxPool2d, 2, 3, 8, 8))],
    "MaxUnpool3d": [(lambda: nn.MaxUnpool3d(2), lambda: pooled(nn.MaxPool3d, 2, 3, 4, 4, 4))],
    "ModuleDict": [(lambda: Summed(nn.ModuleDict(dict(zip("abc", parts(), strict=True)))), lambda: (real(4, 6),))],
    "ModuleList": [(lambda: Summed(nn.ModuleList(parts())), lambda: (real(4, 6),))],
    "NLLLoss2d": [(nn.NLLLoss2d,  # pyright: ignore[reportDeprecated] - swept as long as torch exports it
                   lambda: (real(2, 4, 3, 3), torch.randint(0, 4, (2, 3, 3))))],
    "PairwiseDistance": [(nn.PairwiseDistance, lambda: (real(4, 6), real(4, 6)))],
    "ParameterDict": [(lambda: Summed(nn.ParameterDict(dict(zip("abc", parameters(), strict=True)))),
                       lambda: (real(4, 6),))],
    "ParameterList": [(lambda: Summed(nn.ParameterList(parameters())), lambda: (real(4, 6),))],
    "PixelShuffle": [(lambda: nn.PixelShuffle(2), lambda: (real(2, 8, 3, 3),))],
    "PixelUnshuffle": [(lambda: nn.PixelUnshuffle(2), lambda: (real(2, 2, 6, 6),))],
    "RReLU": [(nn.RReLU, lambda: (real(4, 6),)), (lambda: nn.RReLU(inplace=True), lambda: (real(4, 6),))],
    "Sequential": [(lambda: nn.Sequential(*parts(), nn.ReLU(inplace=True)), lambda: (real(4, 6),))],
    "TransformerDecoder": [
        (lambda: nn.TransformerDecoder(nn.TransformerDecoderLayer(8, 2, 16, dropout=0.2, batch_first=True), 2),
         lambda: (real(2, 5, 8), real(2, 4, 8))),
    ],
    "TripletMarginLoss": [(nn.TripletMarginLoss, lambda: (real(4, 6), real(4, 6), real(4, 6)))],
    "TripletMarginWithDistanceLoss": [(nn.TripletMarginWithDistanceLoss, lambda: (real(4, 6), real(4, 6), real(4, 6)))],
    "Unflatten": [(lambda: nn.Unflatten(1, (2, 3)), lambda: (real(4, 6),))],
    "Unfold": [(lambda: nn.Unfold((2, 2)), lambda: (real(2, 3, 4, 5),))],
    "Upsample": [
        (lambda mode=mode: nn.Upsample(scale_factor=2, mode=mode), lambda: (real(2, 3, 4, 4),))
        for mode in ("nearest", "bilinear", "bicubic")
    ],
    "UpsamplingBilinear2d": [(lambda: nn.UpsamplingBilinear2d(scale_factor=2), lambda: (real(2, 3, 4, 4),))],
    "UpsamplingNearest2d": [(lambda: nn.UpsamplingNearest2d(scale_factor=2), lambda: (real(2, 3, 4, 4),))],
    # What torch.nn.utils makes of a module; no classes of torch.nn's own, judged beside them.
    "parametrizations.orthogonal": [
        (lambda: nn.utils.parametrizations.orthogonal(nn.Linear(6, 6)), lambda: (real(4, 6),)),
    ],
    "parametrizations.spectral_norm": [
        (lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(6, 4)), lambda: (real(4, 6),)),
    ],
    "parametrizations.weight_norm": [
        (lambda: nn.utils.parametrizations.weight_norm(nn.Conv1d(4, 3, 2)), lambda: (real(2, 4, 6),)),
    ],
}
# fmt: on


def exported_classes() -> list[str]:
    """List every module class that torch.nn exports."""
    return sorted(name for name, kind in vars(nn).items() if inspect.isclass(kind) and issubclass(kind, nn.Module))


def subjects() -> list[Subject]:
    """List every exported class, and the parametrizations."""
    names = [*exported_classes(), *(name for name in SAMPLES if "." in name)]
    return [
        Subject(family="torch_modules", name=name, group=f"torch.nn {index % NUM_GROUPS + 1}")
        for index, name in enumerate(names)
    ]


def build(subject: Subject) -> tuple[dict[str, Step], dict[str, Any]]:
    """Make one step of all samples of a class, each in training and in evaluation mode.

    Raises:
        NotConstructibleError: It cannot be trained by itself, or has no samples.
    """
    name = subject.name
    if name in NOT_TRAINED:
        raise NotConstructibleError(NOT_TRAINED[name])
    plain, reasons = working(calls(name, autocast=False))
    if not plain:
        raise NotConstructibleError(reasons[0] if reasons else "no samples")
    autocast, _ = working(calls(name, autocast=True))
    steps = {PLAIN: one_after_another(plain)}
    if autocast:
        steps[AUTOCAST] = one_after_another(autocast)
    facts = {
        "source": "here" if name in SAMPLES else "module_db",
        "num_samples": len(plain),
        "num_samples_autocast": len(autocast),
    }
    return steps, facts | ({"samples_left_out": reasons} if reasons else {})


def calls(name: str, *, autocast: bool) -> Iterator[Step]:
    """Make a step of every sample of a class."""
    for training in (True, False):
        if name in SAMPLES:
            judge.seed_everything()
            for make, draw in SAMPLES[name]:
                yield op_database.module_step(make, draw(), {}, training=training, autocast=autocast)
            continue
        for info in op_database.module_infos():
            if info.module_cls is getattr(nn, name):
                yield from op_database.module_calls(info, training=training, autocast=autocast)


def working(steps: Iterator[Step]) -> tuple[list[Step], list[str]]:
    """Leave the steps that plain eager finishes with a gradient, and say why the others are left out."""
    found: list[Step] = []
    reasons: list[str] = []
    for step in steps:
        judge.seed_everything()
        try:
            observed = step(contextlib.nullcontext)
        except Exception as error:  # noqa: BLE001 - a sample for another device, dtype or mode
            reasons.append(f"{type(error).__name__}: {' '.join(str(error).split())[:160]}")
            continue
        if observed["outputs"]:
            found.append(step)
        else:
            reasons.append("no output has a gradient")
    return found, reasons


def one_after_another(steps: list[Step]) -> Step:
    """Make one step of several, each in a scope of its own."""

    def step(scope: Scope) -> dict[str, Any]:
        return {f"{index}.{key}": value for index, one in enumerate(steps) for key, value in one(scope).items()}

    return step
