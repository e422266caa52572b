"""Train a small Llama with transformers' Trainer inside a memory budget.

python examples/trainer.py                        # inside 36 MiB
python examples/trainer.py --memory-budget none   # plain: the same losses, in 56 MiB
"""

import argparse
import tempfile

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed

from torchdelta.integrations.transformers import MemoryBudgetCallback


def main() -> None:
    """Train, and print the losses."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--memory-budget", default="36MiB", help="such as 36MiB or 50%%; none trains without a budget")
    budget = parser.parse_args().memory_budget

    set_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=512, hidden_size=128, intermediate_size=256, num_hidden_layers=4, num_attention_heads=4)
    )
    rows = torch.randint(0, 512, (64, 128))
    data = [{"input_ids": row, "labels": row} for row in rows]
    callbacks = [] if budget == "none" else [MemoryBudgetCallback(budget)]
    with tempfile.TemporaryDirectory() as directory:
        arguments = TrainingArguments(
            directory,
            max_steps=8,
            per_device_train_batch_size=8,
            gradient_accumulation_steps=2,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            use_cpu=True,
        )
        trainer = Trainer(model, arguments, train_dataset=data, callbacks=callbacks)
        trainer.train()

    for log in trainer.state.log_history:
        if "loss" in log:
            print("loss", log["step"], repr(log["loss"]))
    for callback in callbacks:
        print(callback.budget.summary())


if __name__ == "__main__":
    main()
