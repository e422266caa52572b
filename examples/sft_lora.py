"""Fine-tune LoRA adapters with TRL's SFTTrainer inside a memory budget.

python examples/sft_lora.py                        # inside 88 MiB
python examples/sft_lora.py --memory-budget none   # plain: the same losses, in 112 MiB
"""

import argparse
import tempfile

from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed
from trl import SFTConfig, SFTTrainer

from torchdelta.integrations.transformers import MemoryBudgetCallback

WORDS = ["<pad>", "<eos>", *(f"w{index}" for index in range(254))]


def main() -> None:
    """Train, and print the losses."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--memory-budget", default="88MiB", help="such as 88MiB or 50%%; none trains without a budget")
    budget = parser.parse_args().memory_budget

    set_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=256, hidden_size=192, intermediate_size=768, num_hidden_layers=8, num_attention_heads=4)
    )
    words = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="<eos>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>")
    texts = [" ".join(f"w{(row * 31 + i * i) % 254}" for i in range(40 + row % 24)) for row in range(64)]

    callbacks = [] if budget == "none" else [MemoryBudgetCallback(budget)]
    with tempfile.TemporaryDirectory() as directory:
        arguments = SFTConfig(
            directory,
            max_steps=4,
            per_device_train_batch_size=4,
            logging_steps=1,
            activation_checkpointing=False,  # the budget decides what to recompute
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            use_cpu=True,
            bf16=False,
        )
        trainer = SFTTrainer(
            model,
            arguments,
            train_dataset=Dataset.from_dict({"text": texts}),
            processing_class=tokenizer,
            peft_config=LoraConfig(r=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"),
            callbacks=callbacks,
        )
        trainer.train()

    for log in trainer.state.log_history:
        if "loss" in log:
            print("loss", log["step"], repr(log["loss"]))


if __name__ == "__main__":
    main()
