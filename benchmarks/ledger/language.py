"""Language models of the ledger: BERT as transformers has it, GPT-2 as nanoGPT writes it, the model of a course."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional

from benchmarks.ledger.update import autocast, with_step

if TYPE_CHECKING:
    from collections.abc import Callable

    from benchmarks.ledger.figures import Step

__all__ = ["bert_classify", "bert_squad", "course_model", "gpt2"]


def bert_squad(step: Step) -> Callable[[int], Any]:
    """Build BERT for question answering, 384 tokens, as NVIDIA's and Lambda's scripts train it."""

    def build(batch_size: int) -> Any:
        from transformers import BertForQuestionAnswering

        model = BertForQuestionAnswering(_bert_config(step.model, vocabulary=30528)).train()
        ids = torch.zeros(batch_size, 384, dtype=torch.long)
        mask, place = torch.ones_like(ids), torch.zeros(batch_size, dtype=torch.long)

        def loss(model: nn.Module, inputs: Any) -> torch.Tensor:
            ids, mask, place = inputs
            return model(
                input_ids=ids, attention_mask=mask, token_type_ids=ids, start_positions=place, end_positions=place
            ).loss

        return with_step(model, (ids, mask, place), loss, step)

    return build


def bert_classify(step: Step) -> Callable[[int], Any]:
    """Build BERT for classification, 512 tokens, as transformers' guide to one GPU trained it in 2022."""

    def build(batch_size: int) -> Any:
        from transformers import BertForSequenceClassification

        model = BertForSequenceClassification(_bert_config(step.model, vocabulary=30522)).train()
        if step.checkpointed:
            model.gradient_checkpointing_enable()
        ids, labels = torch.zeros(batch_size, 512, dtype=torch.long), torch.zeros(batch_size, dtype=torch.long)

        def loss(model: nn.Module, inputs: Any) -> torch.Tensor:
            return functional.cross_entropy(model(input_ids=inputs[0]).logits, inputs[1])

        return with_step(model, (ids, labels), loss, step)

    return build


def _bert_config(size: str, *, vocabulary: int) -> Any:
    from transformers import BertConfig

    is_large = size == "large"
    return BertConfig(
        vocab_size=vocabulary,
        hidden_size=1024 if is_large else 768,
        num_hidden_layers=24 if is_large else 12,
        num_attention_heads=16 if is_large else 12,
        intermediate_size=4096 if is_large else 3072,
        attn_implementation="eager",
    )


class _CausalAttention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.taken, self.given, self.heads = nn.Linear(width, 3 * width), nn.Linear(width, width), heads
        self.register_buffer("mask", torch.ones(1024, 1024).view(1, 1, 1024, 1024))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        parts = self.taken(x).split(width, dim=2)
        q, k, v = (part.view(batch, length, self.heads, width // self.heads).transpose(1, 2) for part in parts)
        scores = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        scores = scores.masked_fill(self.mask[:, :, :length, :length] == 0, -torch.inf)
        y = functional.softmax(scores, dim=-1) @ v
        return self.given(y.transpose(1, 2).contiguous().view(batch, length, width))


class _Gpt2Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.attention, self.norm2 = (
            nn.LayerNorm(width),
            _CausalAttention(width, heads),
            nn.LayerNorm(width),
        )
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        h = self.wide(self.norm2(x))
        h = 0.5 * h * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (h + 0.044715 * torch.pow(h, 3.0))))
        return x + self.narrow(h)


class _Gpt2(nn.Module):
    def __init__(self, width: int = 768, heads: int = 12, layers: int = 12, vocabulary: int = 50257) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(1024, width)
        self.blocks = nn.ModuleList(_Gpt2Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def gpt2(step: Step) -> Callable[[int], Any]:
    """Build GPT-2 of 124M parameters at 1,024 tokens with the attention and GELU of nanoGPT before PyTorch 2."""

    def build(batch_size: int) -> Any:
        ids = torch.zeros(batch_size, 1024, dtype=torch.long)

        def loss(model: nn.Module, inputs: Any) -> torch.Tensor:
            output = model(inputs[0])
            return functional.cross_entropy(output.view(-1, output.size(-1)), inputs[1].view(-1))

        return with_step(_Gpt2().train(), (ids, ids.clone()), loss, step)

    return build


class _Product(nn.Module):
    def __init__(self, width_in: int, width_out: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width_out, width_in))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight.t()


class _RootMeanSquareNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        dtype = x.dtype
        x = x.to(torch.float32)
        return (self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5))).to(dtype)


class _CourseBlock(nn.Module):
    """Rotary attention written out, and a gated feed-forward part."""

    def __init__(self, width: int, inner: int, heads: int) -> None:
        super().__init__()
        self.queries, self.keys, self.values, self.given = (_Product(width, width) for _ in range(4))
        self.wide, self.narrow, self.gate = _Product(width, inner), _Product(inner, width), _Product(width, inner)
        self.norm1, self.norm2, self.heads = _RootMeanSquareNorm(width), _RootMeanSquareNorm(width), heads

    def forward(self, x: torch.Tensor, cosine: torch.Tensor) -> torch.Tensor:
        y = self.norm1(x)
        batch, length, width = y.shape
        parts = (part(y) for part in (self.queries, self.keys, self.values))
        q, k, v = (part.view(batch, length, self.heads, width // self.heads).transpose(1, 2) for part in parts)
        q, k = _rotated(q, cosine), _rotated(k, cosine)
        places = torch.arange(length)
        mask = (places[:, None] >= places[None, :])[None, None]
        scores = torch.einsum("bhqd,bhkd->bhqk", q, k) / math.sqrt(width // self.heads)
        scores = torch.where(mask, scores, -torch.inf)
        less = scores - torch.max(scores, dim=-1, keepdim=True)[0]
        exponentials = torch.exp(less)
        shares = exponentials / torch.sum(exponentials, dim=-1, keepdim=True)
        y = torch.einsum("bhqk,bhkd->bhqd", shares, v).transpose(1, 2).contiguous().view(batch, length, width)
        x = x + self.given(y)
        y = self.norm2(x)
        wide = self.wide(y)
        return x + self.narrow(wide * torch.sigmoid(wide) * self.gate(y))


def _rotated(x: torch.Tensor, cosine: torch.Tensor) -> torch.Tensor:
    a, b = x.unflatten(-1, (-1, 2)).movedim(-1, 0).unbind(0)
    return torch.concat((cosine * a - cosine * b, cosine * a + cosine * b), dim=-1)


class _CourseModel(nn.Module):
    def __init__(self, width: int, inner: int, layers: int, heads: int, vocabulary: int = 10000) -> None:
        super().__init__()
        self.tokens = nn.Parameter(torch.empty(vocabulary, width))
        self.blocks = nn.ModuleList(_CourseBlock(width, inner, heads) for _ in range(layers))
        self.norm, self.head, self.half_width = (
            _RootMeanSquareNorm(width),
            _Product(width, vocabulary),
            width // heads // 2,
        )

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens[ids]
        cosine = torch.ones(ids.shape[1], self.half_width)
        for block in self.blocks:
            x = block(x, cosine)
        return self.head(self.norm(x))


def course_model(step: Step) -> Callable[[int], Any]:
    """Build the language model of Stanford's CS336 course at a length, with its own loss and its own AdamW."""
    size, length = step.model.split("/ctx")
    shape = {"medium": (1024, 4096, 24, 16), "3.4B": (2560, 10240, 32, 32)}[size]

    def build(batch_size: int) -> Any:
        ids = torch.zeros(batch_size, int(length), dtype=torch.long)
        states: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

        def train(model: nn.Module, inputs: Any) -> None:
            with autocast(step.precision):
                output = model(inputs[0])
                output = output - torch.max(output, dim=-1, keepdim=True)[0]
                logarithms = output - torch.log(torch.sum(torch.exp(output), dim=-1, keepdim=True))
                loss = torch.mean(-torch.gather(logarithms, -1, inputs[1][..., None]))
            loss.backward()
            for parameter in model.parameters():  # plain tensors, one parameter at a time
                gradient: Any = parameter.grad
                gradient = gradient.data
                first, second = states.get(id(parameter), (None, None))
                if first is None or second is None:
                    first, second = torch.zeros_like(gradient), torch.zeros_like(gradient)
                parameter.data -= 1e-5 * parameter.data
                first = 0.9 * first + 0.1 * gradient
                second = 0.999 * second + 0.001 * torch.square(gradient)
                parameter.data -= 1e-3 * first / (torch.sqrt(second) + 1e-8)
                states[id(parameter)] = (first, second)
            model.zero_grad(set_to_none=True)

        return _CourseModel(*shape).train(), (ids, ids.clone()), train

    return build
