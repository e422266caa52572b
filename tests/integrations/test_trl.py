"""TRL's trainers with LoRA and MemoryBudgetCallback: the same losses and adapters as plain, bit for bit."""

from __future__ import annotations

import gc
import logging
from typing import TYPE_CHECKING, Any

import pytest
import trl.trainer.utils
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

from tests.integrations.holding import held_bytes, share_of_peak
from tests.integrations.trainers import VOCABULARY, Run, assert_same, assert_under_pressure, finished, tiny_llama
from torchdelta.integrations.transformers import MemoryBudgetCallback
from torchdelta.notices import warn_once

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.usefixtures("no_budget_is_left", "small_tiles")

SPECIAL = ["<pad>", "<eos>", "<unk>"]
WORDS = [f"w{index}" for index in range(VOCABULARY - len(SPECIAL))]


@pytest.fixture
def small_tiles(monkeypatch):
    """Make TRL compute logits in tiles of this vocabulary: its own of 32,768 columns would be most of the memory."""
    monkeypatch.setattr(trl.trainer.utils, "_CHUNKED_LOGPROB_CHUNK_SIZE", VOCABULARY)


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token for each word."""
    vocabulary = {word: index for index, word in enumerate([*SPECIAL, *WORDS])}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token=SPECIAL[2]))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        padding_side="left",
        **dict(zip(("pad_token", "eos_token", "unk_token"), SPECIAL, strict=True)),
    )


def text(start: int, num_words: int) -> str:
    """Return some words that depend on `start`."""
    return " ".join(WORDS[(start * 31 + index * index) % len(WORDS)] for index in range(num_words))


def rows(kind: str) -> Dataset:
    """Return 24 rows with texts of several lengths."""
    made: list[dict[str, str]] = []
    for index in range(24):
        if kind == "sft":
            made.append({"text": text(index, 40 + index)})
        else:
            made.append({"prompt": text(index, 20 + index)})
        if kind == "dpo":
            made[-1] |= {"chosen": text(index + 1, 30), "rejected": text(index + 2, 34)}
    return Dataset.from_list(made)


def reward(completions: list[str], **_kwargs: Any) -> list[float]:
    """Prefer even words."""
    return [float(sum(int(word[1:]) % 2 == 0 for word in text.split() if word[1:].isdigit())) for text in completions]


def train(kind: str, directory: Path, limit: int | str | None, **options: Any) -> Run:
    """Train LoRA adapters of the tiny model; `limit` None is plain."""
    gc.collect()
    common: dict[str, Any] = {
        "output_dir": str(directory),
        "use_cpu": True,
        "bf16": False,
        "max_steps": 2,
        "per_device_train_batch_size": 8,
        "logging_steps": 1,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
        "gradient_checkpointing": False,
        **options,
    }
    adapters = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    shared: dict[str, Any] = {
        "model": tiny_llama(pad_token_id=0, eos_token_id=1, bos_token_id=None),
        "processing_class": tiny_tokenizer(),
        "train_dataset": rows(kind),
        "peft_config": adapters,
        "callbacks": [MemoryBudgetCallback(limit)] if limit is not None else [],
    }
    if kind == "sft":
        trainer = SFTTrainer(args=SFTConfig(max_length=64, **common), **shared)
    elif kind == "dpo":
        trainer = DPOTrainer(args=DPOConfig(max_length=128, **common), **shared)
    else:
        sampling = {"num_generations": 4, "max_completion_length": 12, "beta": 0.1}
        trainer = GRPOTrainer(args=GRPOConfig(**sampling, **common), reward_funcs=reward, **shared)
    trainer.train()
    return finished(trainer)


@pytest.mark.parametrize(
    "kind", [pytest.param("sft"), *(pytest.param(k, marks=pytest.mark.rest) for k in ("dpo", "grpo"))]
)
def test_same_bits(kind, tmp_path):
    """Losses, gradient norms and adapters are plain's inside 70 % of its memory."""
    held = held_bytes()
    limit = share_of_peak(train(kind, tmp_path, "1TiB").peak_bytes, 0.7, held)
    plain = train(kind, tmp_path, None)
    budgeted = train(kind, tmp_path, limit)
    assert_same(plain, budgeted)
    assert_under_pressure(budgeted, limit)
    assert all("torchdelta/peak_gib" in log for log in budgeted.history if "loss" in log)


@pytest.mark.rest
def test_accumulation(tmp_path):
    """So they are where gradients of micro-batches of several lengths are accumulated."""
    options = {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 4}
    held = held_bytes()
    limit = share_of_peak(train("sft", tmp_path, "1TiB", **options).peak_bytes, 0.7, held)
    plain = train("sft", tmp_path, None, **options)
    budgeted = train("sft", tmp_path, limit, **options)
    assert_same(plain, budgeted)
    assert_under_pressure(budgeted, limit)


@pytest.mark.rest
def test_checkpointing_left_on(tmp_path, caplog):
    """TRL checkpoints activations by default: that works in a budget, and one warning says what is better."""
    warn_once.cache_clear()
    caplog.set_level(logging.WARNING, "torchdelta")
    plain = train("sft", tmp_path, None, gradient_checkpointing=True)
    whole = train("sft", tmp_path, "1TiB", gradient_checkpointing=True)
    assert_same(plain, whole)
    assert len([record for record in caplog.records if "checkpointing=True" in record.message]) == 1
