"""Makes a small Llama, its tokenizer and a data set in a directory; runs in the environment of a framework."""

import json
import random
import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

NUM_SAMPLES = 32
WORDS = [f"w{i}" for i in range(250)]
PLUGIN = """import torch
from axolotl.integrations.base import BasePlugin

class Seeded(BasePlugin):
    def pre_lora_load(self, cfg, model):
        torch.manual_seed(cfg.seed)
"""
SPECIAL = ("<unk>", "<s>", "</s>", "<pad>")


def main(directory: Path) -> None:
    """Write `model/`, `data.jsonl`, `dataset_info.json`, and a plugin that seeds axolotl before it draws adapters."""
    vocabulary = {word: index for index, word in enumerate((*SPECIAL, *WORDS))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=SPECIAL[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    names = dict(zip(("unk_token", "bos_token", "eos_token", "pad_token"), SPECIAL, strict=True))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names).save_pretrained(directory / "model")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(vocabulary),
        hidden_size=128,
        intermediate_size=352,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        pad_token_id=vocabulary["<pad>"],
    )
    LlamaForCausalLM(config).save_pretrained(directory / "model")
    drawing = random.Random(0)
    with (directory / "data.jsonl").open("w", encoding="utf-8") as file:
        for _ in range(NUM_SAMPLES):
            question, answer = (" ".join(drawing.choices(WORDS, k=k)) for k in (40, 150))
            file.write(json.dumps({"instruction": question, "input": "", "output": answer}) + "\n")
    (directory / "seeded.py").write_text(PLUGIN, encoding="utf-8")
    information = {"small": {"file_name": "data.jsonl"}}
    (directory / "dataset_info.json").write_text(json.dumps(information), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
