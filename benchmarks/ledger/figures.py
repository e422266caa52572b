"""The published figures of the ledger: what was measured, by whom, and the step that it was measured on."""

from __future__ import annotations

from typing import Literal

import msgspec

from torchdelta.machine.share import SharedKernel  # noqa: TC001 - msgspec reads it

__all__ = ["Figure", "Step"]


class Step(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A training step that the zoo builds.

    Attributes:
        family: "timm", "bert-squad", "bert-classify", "gpt2" or "course".
        model: Its name within the family.
        batch: Samples.
        precision: "fp32", "amp" (float16), "amp-bf16" or "fp16" (all in float16).
        layout: "nchw", "nhwc", or "" where there are no images.
        optimizer: "none", "sgd" (with momentum), "adam", "adamw" or "adamw-loop" (one parameter at a time).
        forward_only: Whether the figure is for inference.
        fused_attention: Whether the model calls `scaled_dot_product_attention`.
        checkpointed: Whether its blocks are checkpointed.
    """

    family: Literal["timm", "bert-squad", "bert-classify", "gpt2", "course"]
    model: str
    batch: int
    precision: str
    layout: str = ""
    optimizer: str = "none"
    forward_only: bool = False
    fused_attention: bool = False
    checkpointed: bool = False


class Figure(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A published figure.

    Attributes:
        id: Unique.
        quantity: What was measured: "step_time", "forward_time", "peak_allocated", "largest_batch", ...
        unit: Of `published`.
        published: The figure.
        gpu: As its source names it.
        machine: Its name in the catalog; "" if it is not in there.
        source: The repository.
        path: File in the repository, with its commit.
        licence: Of the source.
        step: What it was measured on; None for rates of a machine.
        note: What else the source states.
        kernel: What was timed, of a kernel that a user shared.
        added: When it was added to the first figures, for which the goals were set; "" for those.
        cudnn: The major version of cuDNN that it ran with, where that is known and matters; 0: that of today.
    """

    id: str
    quantity: str
    unit: str
    published: float
    gpu: str
    machine: str = ""
    source: str
    path: str = ""
    licence: str = ""
    step: Step | None = None
    note: str = ""
    kernel: SharedKernel | None = None
    cudnn: int = 0
    added: str = ""
