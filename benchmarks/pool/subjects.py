"""Training steps to record: small in width, real in structure, 1,000 to 100,000 buffers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from benchmarks.models import Recipe, classifier, denoiser, encoder, gpt2, loss_of, of_transformers, seed_everything
from benchmarks.networks import language, vision
from torchdelta import MemoryBudget

if TYPE_CHECKING:
    from torchdelta.trace.model import Trace


class _Scores(nn.Module):
    """Takes the scores out of what a model of transformers returns."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, pictures: Tensor) -> Tensor:
        return self.model(pictures).logits


def _tokens(class_name: str, num_layers: int | None = None, **settings: Any) -> Recipe:
    if num_layers is not None:
        settings["num_hidden_layers"] = num_layers
    return of_transformers(class_name, batch_size=2, size=48, vocab_size=500, **settings)


def _gpt2(num_layers: int) -> Recipe:
    return gpt2(batch_size=2, size=48, vocab_size=500, n_layer=num_layers, n_embd=64, n_head=4)


def _pictures(class_name: str, size: int, **settings: Any) -> Recipe:
    def network() -> nn.Module:
        import transformers

        model_class = getattr(transformers, class_name)
        return _Scores(model_class(model_class.config_class(image_size=size, num_labels=10, **settings)))

    return classifier(network, batch_size=4, size=size, num_classes=10)


def _resnet(*num_blocks_by_stage: int) -> Recipe:
    return classifier(lambda: vision.build_resnet(num_blocks_by_stage, 10), batch_size=4, size=64, num_classes=10)


def _unet(width: int) -> Recipe:
    return denoiser(batch_size=2, size=32, width=width, multiples=(1, 2, 2), num_blocks=2)


def _unrolled(network: Any, num_steps: int, width: int, *arguments: Any) -> Recipe:
    return Recipe(
        network=lambda: network(*arguments, num_steps),
        draw=lambda num_samples, length: (torch.randn(num_samples, length, width),),
        batch_size=8,
        size=32,
    )


_BERT = {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 128}
_LLAMA = _BERT | {"num_key_value_heads": 2}
_EXPERTS = _LLAMA | {"num_local_experts": 4, "num_experts_per_tok": 2}
_T5 = {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 8, "num_heads": 4, "decoder_start_token_id": 0}

SUBJECTS: dict[str, Recipe] = {
    "gpt2, 6 layers": _gpt2(6),
    "gpt2, 48 layers": _gpt2(48),
    "gpt2, 200 layers": _gpt2(200),
    "llama, 24 layers": _tokens("LlamaForCausalLM", 24, **_LLAMA),
    "qwen2, 64 layers": _tokens("Qwen2ForCausalLM", 64, **_LLAMA),
    "mixtral, 12 layers": _tokens("MixtralForCausalLM", 12, **_EXPERTS),
    "bert, 24 layers": _tokens("BertForMaskedLM", 24, **_BERT),
    "roberta, 12 layers": _tokens("RobertaForMaskedLM", 12, **_BERT),
    "t5, 8 + 8 layers": _tokens("T5ForConditionalGeneration", **_T5),
    "vit, 24 layers": _pictures("ViTForImageClassification", 32, patch_size=8, num_hidden_layers=24, **_BERT),
    "convnext": _pictures("ConvNextForImageClassification", 64, hidden_sizes=[16, 32, 64, 128]),
    "swin": _pictures("SwinForImageClassification", 128, embed_dim=24, window_size=4, num_heads=[2, 2, 4, 8]),
    "resnet-50": _resnet(3, 4, 6, 3),
    "resnet-101": _resnet(3, 4, 23, 3),
    "u-net, width 16": _unet(16),
    "u-net, width 32": _unet(32),
    "encoder, 24 layers": encoder(24, 64, 4, 128, batch_size=4, size=32),
    "lstm cells, 300 steps": _unrolled(language.Cells, 300, 32, nn.LSTMCell),
    "gru cells, 1000 steps": _unrolled(language.Cells, 1000, 32, nn.GRUCell),
    **{f"recurrence, {num} steps": _unrolled(language.Recurrence, num, 48) for num in (100, 350, 1000, 1900)},
}


def record(name: str) -> Trace:
    """Record one step of a subject, its optimizer included: the second one, in which the states exist."""
    seed_everything(0)
    recipe = SUBJECTS[name]
    model, inputs = recipe(recipe.batch_size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)

    def step() -> None:
        loss_of(model, inputs).backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    with MemoryBudget("1TiB") as budget:
        step()
    return budget.trace()
