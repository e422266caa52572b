"""Training steps to record: small in width, real in structure, 1,000 to 100,000 buffers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from benchmarks import resnet
from benchmarks.models import seed_everything
from benchmarks.unet import UNet
from torchdelta import MemoryBudget

if TYPE_CHECKING:
    from collections.abc import Callable

    from torchdelta.trace.model import Trace

Step = tuple[nn.Module, "Callable[[], Tensor]"]
_VOCABULARY = 500


class Recurrence(nn.Module):
    """A gated cell with layer norm, unrolled op by op, with a loss at every step."""

    def __init__(self, num_steps: int, width: int = 48) -> None:
        super().__init__()
        self.num_steps = num_steps
        self.inward, self.across = nn.Linear(width, 4 * width), nn.Linear(width, 4 * width)
        self.norm, self.dropout, self.out = nn.LayerNorm(4 * width), nn.Dropout(0.1), nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Return the mean loss over all steps."""
        hidden = cell = torch.zeros_like(x[:, 0])
        losses: list[Tensor] = []
        for step in range(self.num_steps):
            gates = self.norm(self.inward(x[:, step % x.shape[1]]) + self.across(hidden))
            first, second, third, fourth = gates.chunk(4, 1)
            cell = torch.sigmoid(first) * cell + torch.sigmoid(second) * torch.tanh(third)
            hidden = torch.sigmoid(fourth) * torch.tanh(cell)
            losses.append(self.out(self.dropout(hidden)).square().mean())
        return torch.stack(losses).mean()


def _recurrence(num_steps: int) -> Step:
    model, x = Recurrence(num_steps), torch.randn(8, 32, 48)
    return model, lambda: model(x)


def _cells(kind: type[nn.Module], num_steps: int) -> Step:
    cell, head, x = kind(32, 64), nn.Linear(64, 20), torch.randn(num_steps, 8, 32)

    def loss() -> Tensor:
        state: Any = None
        outputs: list[Tensor] = []
        for each in x:
            state = cell(each, state)
            outputs.append(head(state[0] if isinstance(state, tuple) else state))
        return torch.stack(outputs).square().mean()

    return nn.ModuleList([cell, head]), loss


def _language(name: str, **sizes: Any) -> Step:
    import transformers

    config = transformers.AutoConfig.for_model(name, vocab_size=_VOCABULARY, **sizes)
    model = transformers.AutoModelForCausalLM.from_config(config)
    tokens = torch.randint(_VOCABULARY, (2, 48))
    return model, lambda: model(input_ids=tokens, labels=tokens, use_cache=False).loss


def _masked(name: str, **sizes: Any) -> Step:
    import transformers

    config = transformers.AutoConfig.for_model(name, vocab_size=_VOCABULARY, **sizes)
    model = transformers.AutoModelForMaskedLM.from_config(config)
    tokens = torch.randint(_VOCABULARY, (2, 48))
    return model, lambda: model(input_ids=tokens, labels=tokens).loss


def _translation(**sizes: Any) -> Step:
    import transformers

    config = transformers.T5Config(vocab_size=_VOCABULARY, decoder_start_token_id=0, **sizes)
    model = transformers.T5ForConditionalGeneration(config)
    tokens = torch.randint(_VOCABULARY, (2, 48))
    return model, lambda: model(input_ids=tokens, labels=tokens).loss


def _pictures(model: nn.Module, size: int, batch_size: int = 4) -> Step:
    pictures = torch.randn(batch_size, 3, size, size)

    def loss() -> Tensor:
        output = model(pictures)
        scores = output if isinstance(output, Tensor) else output.logits
        return nn.functional.cross_entropy(scores, torch.zeros(batch_size, dtype=torch.long))

    return model, loss


def _vision(name: str, size: int, **sizes: Any) -> Step:
    import transformers

    config = transformers.AutoConfig.for_model(name, image_size=size, num_labels=10, **sizes)
    return _pictures(transformers.AutoModelForImageClassification.from_config(config), size)


def _unet(width: int) -> Step:
    model = UNet(width=width, multiples=(1, 2, 2), num_blocks=2)
    noisy, noise = torch.randn(2, 2, 3, 32, 32)
    return model, lambda: nn.functional.mse_loss(model(noisy, torch.randint(1000, (2,))), noise)


def _encoder(num_layers: int) -> Step:
    layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
    model, x = nn.TransformerEncoder(layer, num_layers, enable_nested_tensor=False), torch.randn(4, 32, 64)
    return model, lambda: model(x).square().mean()


_BERT = {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 128}
_LLAMA = _BERT | {"num_key_value_heads": 2}
_EXPERTS = _LLAMA | {"num_local_experts": 4, "num_experts_per_tok": 2}
_GPT2 = {"n_embd": 64, "n_head": 4}

SUBJECTS: dict[str, Callable[[], Step]] = {
    "gpt2, 6 layers": lambda: _language("gpt2", n_layer=6, **_GPT2),
    "gpt2, 48 layers": lambda: _language("gpt2", n_layer=48, **_GPT2),
    "gpt2, 200 layers": lambda: _language("gpt2", n_layer=200, **_GPT2),
    "llama, 24 layers": lambda: _language("llama", num_hidden_layers=24, **_LLAMA),
    "qwen2, 64 layers": lambda: _language("qwen2", num_hidden_layers=64, **_LLAMA),
    "mixtral, 12 layers": lambda: _language("mixtral", num_hidden_layers=12, **_EXPERTS),
    "bert, 24 layers": lambda: _masked("bert", num_hidden_layers=24, **_BERT),
    "roberta, 12 layers": lambda: _masked("roberta", num_hidden_layers=12, **_BERT),
    "t5, 8 + 8 layers": lambda: _translation(d_model=64, d_kv=16, d_ff=128, num_layers=8, num_heads=4),
    "vit, 24 layers": lambda: _vision("vit", 32, patch_size=8, num_hidden_layers=24, **_BERT),
    "convnext": lambda: _vision("convnext", 64, hidden_sizes=[16, 32, 64, 128]),
    "swin": lambda: _vision("swin", 128, embed_dim=24, window_size=4, num_heads=[2, 2, 4, 8]),
    "resnet-50": lambda: _pictures(resnet.resnet50(10), 64),
    "resnet-101": lambda: _pictures(resnet.resnet101(10), 64),
    "u-net, width 16": lambda: _unet(16),
    "u-net, width 32": lambda: _unet(32),
    "encoder, 24 layers": lambda: _encoder(24),
    "lstm cells, 300 steps": lambda: _cells(nn.LSTMCell, 300),
    "gru cells, 1000 steps": lambda: _cells(nn.GRUCell, 1000),
    "recurrence, 100 steps": lambda: _recurrence(100),
    "recurrence, 350 steps": lambda: _recurrence(350),
    "recurrence, 1000 steps": lambda: _recurrence(1000),
    "recurrence, 1900 steps": lambda: _recurrence(1900),
}


def record(name: str) -> Trace:
    """Record one step of a subject, its optimizer included: the second one, in which the states exist."""
    seed_everything(0)
    model, loss = SUBJECTS[name]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)

    def step() -> None:
        loss().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    with MemoryBudget("1TiB") as budget:
        step()
    return budget.trace()
