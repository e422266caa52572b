"""The training steps whose times and peaks others published, as `torchdelta.trace.symbolic.trace_step` takes them.

Each is built from what its source states: model, batch, precision, memory format, optimizer, attention.
timm and transformers are needed for those that are theirs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch
from torch import nn
from torch.nn import functional

from benchmarks.ledger import language, torchvision_stub
from benchmarks.ledger.update import with_step

if TYPE_CHECKING:
    from collections.abc import Callable

    from benchmarks.ledger.figures import Step

__all__ = ["builder"]

# Side of the square images that timm's results were made with, where it is not 224.
_IMAGE_SIZES: Final = {
    "inception_v3": 299,
    "inception_v4": 299,
    "tf_efficientnetv2_s": 300,
    "tf_efficientnetv2_m": 384,
    "efficientnet_b4": 380,
}


def builder(step: Step) -> Callable[[int], Any]:
    """Return the function that builds a step at a batch size."""
    return {"timm": _timm, "bert-squad": language.bert_squad, "bert-classify": language.bert_classify}.get(
        step.family, language.gpt2 if step.family == "gpt2" else language.course_model
    )(step)


def _timm(step: Step) -> Callable[[int], Any]:
    def build(batch_size: int) -> Any:
        torchvision_stub.install_if_missing()
        import timm
        from timm.layers import set_fused_attn

        set_fused_attn(step.fused_attention)
        model = timm.create_model(step.model)
        model.train(not step.forward_only)
        size = _IMAGE_SIZES.get(step.model, 224)
        images = torch.randn(batch_size, 3, size, size)
        if step.layout == "nhwc":
            model = model.to(memory_format=torch.channels_last)
            images = images.contiguous(memory_format=torch.channels_last)
        labels = torch.zeros(batch_size, dtype=torch.long)

        def loss(model: nn.Module, inputs: Any) -> torch.Tensor:
            output = model(inputs[0])
            output = output[0] if isinstance(output, tuple | list) else output
            return functional.cross_entropy(output, inputs[1])

        return with_step(model, (images, labels), loss, step)

    return build
