"""What is known of each framework: its packages, its command, its YAML, and how its how-to sets a budget."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

__all__ = ["FRAMEWORKS", "Framework"]

# Of torchdelta's extras `cli` and `plan`.
_OWN_PACKAGES: Final = ("msgspec", "numba", "rich", "tqdm", "typer")


@dataclass(frozen=True, kw_only=True, slots=True)
class Framework:
    """A framework, and how it is used.

    Attributes:
        distribution: Its release: "axolotl==0.19.0".
        packages: Those of its dependencies that training on a CPU needs; the rest is several GB of CUDA packages.
        packages_alone: Dependencies that are installed without their own.
        stubs: Modules that it imports at its start and does not use; empty ones take their place.
        command: What follows `python -m` before the YAML file.
        options: The YAML of a small training.
        lora: What is added for LoRA.
        is_plugin: Whether the budget stands in the YAML. Otherwise `torchdelta run` starts the command.
    """

    distribution: str
    packages: tuple[str, ...]
    packages_alone: tuple[str, ...] = ()
    stubs: tuple[str, ...] = ()
    command: tuple[str, ...]
    options: dict[str, Any]
    lora: dict[str, Any]
    is_plugin: bool


FRAMEWORKS: Final = {
    "axolotl": Framework(
        distribution="axolotl==0.19.0",
        packages=(
            *_OWN_PACKAGES,
            *("accelerate==1.13.0", "datasets==4.8.4", "kernels>=0.16,<0.17", "peft==0.20.0", "tokenizers==0.23.1"),
            *("transformers==5.16.1", "trl==1.9.0", "huggingface_hub==1.17.0", "optimum==1.16.2", "evaluate==0.4.1"),
            *("axolotl-contribs-lgpl==0.0.7", "axolotl-contribs-mit==0.0.6", "mistral-common==1.11.5"),
            *("pydantic==2.12.5", "posthog==6.7.11", "packaging==26.0", "nvidia-ml-py==12.560.30", "triton"),
            *("addict", "art", "colorama", "einops", "fastcore", "fire", "hf_transfer", "python-dotenv", "PyYAML"),
            *("requests", "schedulefree", "scipy", "sentencepiece", "tensorboard", "wandb", "zstandard"),
        ),
        packages_alone=("bitsandbytes==0.50.2",),
        command=("axolotl.cli.train",),
        options={
            "base_model": "model",
            "datasets": [{"path": "data.jsonl", "ds_type": "json", "type": "alpaca"}],
            "dataset_prepared_path": "prepared",
            "output_dir": "out",
            "plugins": ["seeded.Seeded"],  # axolotl draws adapters unseeded: see material.py
            "sequence_len": 256,
            "micro_batch_size": 4,
            "gradient_accumulation_steps": 2,
            "max_steps": 4,
            "optimizer": "adamw_torch",
            "learning_rate": 1e-3,
            "lr_scheduler": "constant",
            "gradient_checkpointing": False,
            "activation_offloading": False,
            "bf16": False,
            "fp16": False,
            "tf32": False,
            "save_strategy": "no",
            "val_set_size": 0,
            "seed": 0,
        },
        lora={
            "adapter": "lora",
            "lora_r": 8,
            "lora_alpha": 16,
            "lora_dropout": 0.1,
            "lora_target_linear": True,
            # Written in Triton, for CUDA.
            "lora_mlp_kernel": False,
            "lora_qkv_kernel": False,
            "lora_o_kernel": False,
        },
        is_plugin=True,
    ),
    "llama-factory": Framework(
        distribution="llamafactory==0.9.5",
        packages=(
            *_OWN_PACKAGES,
            *("accelerate<=1.11.0", "datasets<=4.0.0", "peft<=0.18.1", "transformers<=5.6.0", "trl<=0.24.0"),
            *("tyro<0.9.0", "einops", "fire", "hf-transfer", "matplotlib", "omegaconf", "pandas", "protobuf"),
            *("pydantic", "pyyaml", "safetensors", "scipy", "sentencepiece", "tiktoken"),
        ),
        stubs=("torchaudio",),
        command=("llamafactory.cli", "train"),
        options={
            "model_name_or_path": "model",
            "stage": "sft",
            "do_train": True,
            "finetuning_type": "full",
            "dataset_dir": ".",
            "dataset": "small",
            "template": "alpaca",
            "cutoff_len": 256,
            "output_dir": "out",
            "overwrite_output_dir": True,
            "overwrite_cache": True,
            "per_device_train_batch_size": 4,
            "gradient_accumulation_steps": 2,
            "max_steps": 4,
            "learning_rate": 1e-3,
            "disable_gradient_checkpointing": True,
            "save_strategy": "no",
            "report_to": "none",
            "seed": 0,
        },
        lora={"finetuning_type": "lora", "lora_rank": 8, "lora_dropout": 0.1, "lora_target": "all"},
        is_plugin=False,
    ),
}
