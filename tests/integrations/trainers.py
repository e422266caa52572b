"""A tiny Llama with random weights, trained by transformers' Trainer, plain and inside a budget."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed

from torchdelta.integrations.transformers import MemoryBudgetCallback

if TYPE_CHECKING:
    from torchdelta.summary import Summary

SHARE = 0.6  # of the plain peak
SEQUENCE = 64
VOCABULARY = 128


def tiny_llama(**changes: Any) -> LlamaForCausalLM:
    """Return a model whose activations take much more than its parameters; the same weights in each call."""
    set_seed(0)
    sizes = {"hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=VOCABULARY, **{**sizes, "num_key_value_heads": 2, **changes})
    return LlamaForCausalLM(config)


def token_data(num_rows: int = 32, seed: int = 1) -> list[dict[str, torch.Tensor]]:
    """Return rows of random tokens."""
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.randint(0, VOCABULARY, (SEQUENCE,), generator=generator) for _ in range(num_rows)]
    return [{"input_ids": row, "labels": row} for row in rows]


def arguments(output_dir: Any, **options: Any) -> TrainingArguments:
    """Return the options of a silent training of three steps on CPU that logs each step."""
    defaults: dict[str, Any] = {
        "use_cpu": True,
        "max_steps": 3,
        "per_device_train_batch_size": 8,
        "logging_steps": 1,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
    }
    return TrainingArguments(str(output_dir), **{**defaults, **options})


@dataclass(frozen=True, kw_only=True)
class Run:
    """A finished training, as data: a model that is still alive would count in the budget of the next one."""

    history: list[dict[str, Any]]
    contents: dict[str, bytes]  # of the parameters, and of what else is to be compared
    summary: Summary | None

    @property
    def losses(self) -> list[tuple[float | None, ...]]:
        """Loss, gradient norm and evaluation loss of each log."""
        return [tuple(log.get(key) for key in ("loss", "grad_norm", "eval_loss")) for log in self.history]

    @property
    def peak_bytes(self) -> int:
        """Most bytes that the budget counted."""
        assert self.summary is not None
        return self.summary.peak_bytes


def contents_of(module: torch.nn.Module) -> dict[str, bytes]:
    """Return the bytes of all parameters and buffers."""
    return {
        name: tensor.detach().reshape(-1).view(torch.uint8).numpy().tobytes()
        for name, tensor in module.state_dict().items()
    }


def finished(trainer: Trainer, *further: torch.nn.Module) -> Run:
    """Return what a trainer has done."""
    callbacks = trainer.callback_handler.callbacks
    callback = next((each for each in callbacks if isinstance(each, MemoryBudgetCallback)), None)
    contents = contents_of(trainer.model)
    for index, module in enumerate(further):
        contents |= {f"{index}: {name}": content for name, content in contents_of(module).items()}
    summary = callback.budget.summary() if callback is not None and callback.budget is not None else None
    return Run(history=[dict(log) for log in trainer.state.log_history], contents=contents, summary=summary)


def assert_same(plain: Run, budgeted: Run) -> None:
    """Compare all losses, norms and parameters bit for bit."""
    assert any(loss is not None for loss, *_ in plain.losses)
    assert budgeted.losses == plain.losses
    assert budgeted.contents == plain.contents


def assert_under_pressure(run: Run, limit: int, *, from_step: int = 0) -> None:
    """Check that the budget held, and that it had to do something."""
    assert run.summary is not None
    assert run.summary.budget_bytes == limit
    assert all(step.peak_bytes <= limit for step in run.summary.steps[from_step:])
    assert run.summary.peak_bytes <= limit or from_step
    assert run.summary.swapped_out_bytes + run.summary.recomputed_bytes > 0
