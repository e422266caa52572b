"""Training steps of two small models, and what people do to them: changes that cost memory, and changes that do not.

Each option is off in the step that was there before the change.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

WIDTH = 64
VOCABULARY_SIZE = 4096


class Block(nn.Module):
    """A transformer's layer, in several ways of writing it."""

    def __init__(self, options: dict[str, Any]) -> None:
        super().__init__()
        self.options = options
        self.first_norm = nn.LayerNorm(WIDTH, eps=options.get("eps", 1e-5))
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.second_norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.extra = nn.Linear(1, WIDTH) if options.get("small_layer") else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attend(self.first_norm(x))
        if self.extra is not None:
            x = x + self.extra.bias
        up = self.up(self.second_norm(x))
        hidden = nn.GELU()(up) if self.options.get("gelu_module") else functional.gelu(up)
        if self.options.get("no_dropout"):
            hidden = functional.dropout(hidden, 0.0, training=True)
        return x + self.down(hidden)

    def attend(self, x: torch.Tensor) -> torch.Tensor:
        qkv = self.qkv(x)
        parts = qkv.split(WIDTH, dim=-1) if self.options.get("split") else qkv.chunk(3, dim=-1)
        heads = 4
        if self.options.get("view"):
            q, k, v = (part.view(*part.shape[:2], heads, -1).permute(0, 2, 1, 3) for part in parts)
        else:
            q, k, v = (part.unflatten(-1, (heads, -1)).transpose(1, 2) for part in parts)
        if self.options.get("attention_by_hand"):
            scores = (q @ k.transpose(-2, -1)) / q.shape[-1] ** 0.5
            mixed = scores.softmax(-1) @ v
        else:
            mixed = functional.scaled_dot_product_attention(q, k, v)
        return self.out(mixed.transpose(1, 2).flatten(2))


class LanguageModel(nn.Module):
    """Blocks that are checkpointed, between an embedding and a head."""

    def __init__(self, options: dict[str, Any]) -> None:
        super().__init__()
        self.options = options
        self.vocabulary_size = options.get("vocabulary_size", VOCABULARY_SIZE)
        self.embedding = nn.Embedding(self.vocabulary_size, WIDTH)
        self.blocks = nn.ModuleList(Block(options) for _ in range(3))
        self.head = nn.Linear(WIDTH, self.vocabulary_size, bias=False)
        self.second_head = nn.Linear(WIDTH, self.vocabulary_size, bias=False) if options.get("second_head") else None

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> Any:
        options = self.options
        x = self.embedding(tokens)
        for index, block in enumerate(self.blocks):
            is_plain = options.get("no_checkpointing") or (options.get("half_checkpointing") and index % 2 == 0)
            x = block(x) if is_plain else checkpoint(block, x, use_reentrant=False)
        logits = self.head(x)
        if options.get("kept_logits"):
            self.logits = logits
        if options.get("upcast_logits"):
            logits = logits.double()
        flat = logits.flatten(0, 1)
        if options.get("one_hot"):
            loss = -(
                functional.one_hot(labels.flatten(), self.vocabulary_size).to(flat.dtype) * flat.log_softmax(-1)
            ).sum(-1)
            loss = loss.mean()
        else:
            loss = functional.cross_entropy(flat, labels.flatten(), ignore_index=options.get("ignore_index", -100))
        if options.get("auxiliary_loss"):
            loss = loss + 1e-4 * flat.logsumexp(-1).square().mean()
        if self.second_head is not None:
            loss = loss + functional.cross_entropy(self.second_head(x).flatten(0, 1), labels.flatten())
        if options.get("returns_loss"):
            return {"loss": loss}
        return loss, logits


class Wrapper(nn.Module):
    """A module around the model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.inner = model

    def forward(self, *args: Any) -> Any:
        return self.inner(*args)


def _optimizer(model: nn.Module, options: dict[str, Any]) -> torch.optim.Optimizer:
    wanted = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if options.get("adamw"):
        return torch.optim.AdamW(wanted, lr=1e-3, foreach=True)
    if options.get("groups"):
        no_decay = [parameter for parameter in wanted if parameter.dim() < 2]
        decay = [parameter for parameter in wanted if parameter.dim() >= 2]
        groups = [{"params": decay, "weight_decay": 0.1}, {"params": no_decay}]
        return torch.optim.SGD(groups, lr=0.1, momentum=0.9, foreach=True)
    foreach = not options.get("one_by_one")
    return torch.optim.SGD(
        wanted, lr=options.get("lr", 0.1), momentum=0.9, weight_decay=options.get("decay", 0.0), foreach=foreach
    )


def language_model(**options: Any) -> tuple[nn.Module, Any, Any]:
    """Build a language model, a batch and the step that trains it."""
    model: Any = LanguageModel(options)
    if options.get("other_init"):
        for parameter in model.parameters():
            nn.init.normal_(parameter, std=0.02)
    if options.get("frozen"):
        model.embedding.requires_grad_(requires_grad=False)
    if options.get("wrapped"):
        model = Wrapper(model)
    if options.get("float64"):
        model = model.double()
    average = [p.detach().clone() for p in model.parameters()] if options.get("average") else []
    optimizer = _optimizer(model, options)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10) if options.get("scheduler") else None
    batch = options.get("batch_size", 4)
    length = options.get("length", 128)
    tokens = torch.randint(0, VOCABULARY_SIZE, (batch, length))
    labels = torch.randint(0, VOCABULARY_SIZE, (batch, length))
    kept: list[torch.Tensor] = []

    def loss_of(tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        output = model(tokens, labels)
        if isinstance(output, dict):
            return output["loss"]
        loss, logits = output
        if options.get("kept_outputs"):
            kept.append(logits)
        if options.get("kept_probabilities"):
            kept.append(logits.detach().softmax(-1))
        if options.get("accuracy"):
            with torch.no_grad():
                (logits.argmax(-1) == labels).float().mean()
        return loss

    def step(_model: nn.Module, _inputs: Any) -> None:
        if options.get("zero_first"):
            optimizer.zero_grad()
        if options.get("late_backward"):
            losses = [loss_of(tokens, labels) for _ in range(2)]
            torch.stack(losses).mean().backward()
        elif options.get("accumulation"):
            for half in range(2):
                part = slice(half * batch // 2, (half + 1) * batch // 2)
                (loss_of(tokens[part], labels[part]) / 2).backward()
        else:
            loss = loss_of(tokens, labels)
            if options.get("scaled_loss"):
                loss = loss * 0.5
            loss.backward(retain_graph=options.get("kept_graphs", False))
            if options.get("kept_losses") or options.get("kept_graphs"):
                kept.append(loss if options.get("kept_graphs") else loss.detach())
        if options.get("clipping"):
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        if average:
            with torch.no_grad():
                for one, parameter in zip(average, model.parameters(), strict=True):
                    one.lerp_(parameter, 0.01)
        if not options.get("zero_first"):
            optimizer.zero_grad(set_to_none=not options.get("zeroed_gradients"))
        if options.get("evaluation"):
            with torch.no_grad():
                model(tokens, labels)
        if options.get("evaluation_with_graph"):
            score = model(tokens, labels)
            kept[:] = score

    return model, (tokens, labels), step


def image_model(**options: Any) -> tuple[nn.Module, Any, Any]:
    """Build a small convolutional network, a frozen teacher, and the step that trains the former."""

    def network() -> nn.Sequential:
        return nn.Sequential(
            *(
                layer
                for channels in (3, 16, 16)
                for layer in (
                    nn.Conv2d(channels, 16, 3, padding=1, bias=False),
                    nn.BatchNorm2d(16),
                    nn.ReLU(inplace=True),
                )
            ),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(16, 10),
        )

    student, teacher = network(), network().eval()
    size = options.get("image_size", 32)
    optimizer = torch.optim.SGD(student.parameters(), lr=0.1)

    def step(_model: nn.Module, images: torch.Tensor) -> None:
        with torch.set_grad_enabled(bool(options.get("teacher_with_graph"))):
            target = teacher(images)
        if options.get("squared_error_in_one"):
            loss = functional.mse_loss(student(images), target)
        else:
            loss = (student(images) - target).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return nn.ModuleList([student, teacher]), torch.randn(16, 3, size, size), step


def uncheckpointed_model(**options: Any) -> tuple[nn.Module, Any, Any]:
    """Build the same language model, with all its activations kept."""
    return language_model(no_checkpointing=True, **options)


BUILDERS = {"language": language_model, "uncheckpointed": uncheckpointed_model, "image": image_model}

# fmt: off
REGRESSIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "checkpointing is lost": ("language", {"no_checkpointing": True}),
    "every second layer is no longer checkpointed": ("language", {"half_checkpointing": True}),
    "the model keeps its logits": ("language", {"kept_logits": True}),
    "logits are cast to a wider type": ("language", {"upcast_logits": True}),
    "labels become one-hot": ("language", {"one_hot": True}),
    "outputs are kept in a list": ("language", {"kept_outputs": True}),
    "probabilities are kept for a metric": ("language", {"kept_probabilities": True}),
    "losses are kept with graphs that are retained": ("language", {"kept_graphs": True}),
    "one backward for the losses of all micro-batches": ("language", {"late_backward": True}),
    "an auxiliary loss of the logits": ("language", {"auxiliary_loss": True}),
    "a second head": ("language", {"second_head": True}),
    "attention is written by hand": ("uncheckpointed", {"attention_by_hand": True}),
    "an optimizer with two states": ("language", {"adamw": True}),
    "a moving average of the weights": ("language", {"average": True}),
    "gradients are zeroed and not freed": ("language", {"zeroed_gradients": True}),
    "everything in a wider type": ("language", {"float64": True}),
    "a larger vocabulary": ("language", {"vocabulary_size": 6000}),
    "a longer sequence": ("language", {"length": 160}),
    "the score of an evaluation keeps its graph": ("language", {"evaluation_with_graph": True}),
    "a teacher without no_grad": ("image", {"teacher_with_graph": True}),
    "larger images": ("image", {"image_size": 36}),
}

HARMLESS: dict[str, tuple[str, dict[str, Any]]] = {
    "another learning rate": ("language", {"lr": 0.01}),
    "weight decay": ("language", {"decay": 0.1}),
    "groups of parameters": ("language", {"groups": True}),
    "a schedule": ("language", {"scheduler": True}),
    "parameters are updated one by one": ("language", {"one_by_one": True}),
    "gradients are freed first": ("language", {"zero_first": True}),
    "gradients are clipped": ("language", {"clipping": True}),
    "other initial weights": ("language", {"other_init": True}),
    "another epsilon": ("language", {"eps": 1e-6}),
    "the activation as a module": ("language", {"gelu_module": True}),
    "split for chunk": ("language", {"split": True}),
    "views for unflatten": ("language", {"view": True}),
    "a dropout of nothing": ("language", {"no_dropout": True}),
    "a small layer": ("language", {"small_layer": True}),
    "a module around the model": ("language", {"wrapped": True}),
    "a dict as the output": ("language", {"returns_loss": True}),
    "another label to ignore": ("language", {"ignore_index": 0}),
    "the loss is scaled": ("language", {"scaled_loss": True}),
    "detached losses are kept": ("language", {"kept_losses": True}),
    "accuracy without a graph": ("language", {"accuracy": True}),
    "an evaluation without a graph": ("language", {"evaluation": True}),
    "a frozen embedding": ("language", {"frozen": True}),
    "gradient accumulation": ("language", {"accumulation": True}),
    "a loss of one function": ("image", {"squared_error_in_one": True}),
}
# fmt: on
