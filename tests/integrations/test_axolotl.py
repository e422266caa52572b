"""The plugin for axolotl, against axolotl's plugin interface, or a stand-in for it where axolotl is not installed."""

from __future__ import annotations

import importlib
import sys
import types
from typing import TYPE_CHECKING, Any

import pytest
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed

from tests.integrations.holding import held_bytes, share_of_peak
from torchdelta.errors import ConfigError, SizeError, TorchdeltaError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

PLUGIN = "torchdelta.integrations.axolotl.MemoryBudgetPlugin"


class BasePlugin:
    """What a plugin inherits from: hooks that do nothing."""

    def get_input_args(self) -> str | None:
        """Return the path of a pydantic model of the plugin's keys."""

    def post_trainer_create(self, cfg: Any, trainer: Any) -> None:
        """Act once the trainer exists."""

    def add_callbacks_post_trainer(self, _cfg: Any, _trainer: Any) -> list[Any]:
        """Return callbacks for the trainer."""
        return []


class Options(dict[str, Any]):
    """axolotl's configuration: a dict whose keys are attributes, and whose missing keys are None."""

    def __getattr__(self, name: str) -> Any:
        """Return a key's value."""
        return self.get(name)


@pytest.fixture
def plugin() -> Iterator[Any]:
    """Load the plugin as axolotl does, by the name in the YAML file."""
    made: list[str] = []
    try:
        importlib.import_module("axolotl.integrations.base")
    except ImportError:
        for name in ("axolotl", "axolotl.integrations", "axolotl.integrations.base"):
            module: Any = types.ModuleType(name)
            module.BasePlugin = BasePlugin
            sys.modules[name] = module
            made.append(name)
    module_name, class_name = PLUGIN.rsplit(".", 1)
    yield getattr(importlib.import_module(module_name), class_name)()
    for name in [*made, module_name]:
        sys.modules.pop(name, None)


def train(plugin: Any, options: Options, folder: Path) -> list[float]:
    """Make a trainer and call the plugin's hooks as axolotl does; returns the losses."""
    set_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=64, **sizes))
    rows = [{"input_ids": [(3 * row + place) % 64 for place in range(64)]} for row in range(24)]
    for row in rows:
        row["labels"] = row["input_ids"]
    arguments = TrainingArguments(
        str(folder),
        use_cpu=True,
        max_steps=3,
        logging_steps=1,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    trainer = Trainer(model, arguments, train_dataset=rows)  # pyright: ignore[reportArgumentType]
    plugin.post_trainer_create(options, trainer)
    for callback in plugin.add_callbacks_post_trainer(options, trainer):
        trainer.add_callback(callback)
    trainer.train()
    return [log["loss"] for log in trainer.state.log_history if "loss" in log]


def callback_of(plugin: Any, options: Options) -> Any:
    """Return the one callback that the plugin adds."""
    (callback,) = plugin.add_callbacks_post_trainer(options, None)
    return callback


def test_losses_are_those_without_the_plugin(plugin: Any, tmp_path: Path) -> None:
    """Inside 60 % of the plain peak; without the key it does nothing."""
    plain = train(plugin, Options(), tmp_path)
    held = held_bytes()
    roomy = callback_of(plugin, Options(memory_budget="1TiB"))
    options = Options(memory_budget="1TiB", memory_budget_config={"tier": "memory"})
    plugin.add_callbacks_post_trainer = lambda _cfg, _trainer: [roomy]
    assert train(plugin, options, tmp_path) == plain
    budget_bytes = share_of_peak(roomy.budget.summary().peak_bytes, 0.6, held)
    tight = callback_of(type(plugin)(), Options(options, memory_budget=budget_bytes))
    plugin.add_callbacks_post_trainer = lambda _cfg, _trainer: [tight]
    assert train(plugin, options, tmp_path) == plain
    summary = tight.budget.summary()
    assert summary.peak_bytes <= budget_bytes
    assert summary.swapped_out_bytes + summary.recomputed_bytes > 0


def test_keys_of_the_yaml_file_are_declared(plugin: Any) -> None:
    """The model that axolotl merges into its own has both keys, and refuses no kind of budget."""
    path = plugin.get_input_args()
    module_name, class_name = path.rsplit(".", 1)
    model = getattr(importlib.import_module(module_name), class_name)
    assert set(model.model_fields) == {"memory_budget", "memory_budget_config"}
    for limit in ("8GiB", "80%", 123, None):
        assert model(memory_budget=limit).memory_budget == limit
    assert model(memory_budget_config={"tier": "memory"}).memory_budget_config == {"tier": "memory"}


def test_options_reach_the_budget(plugin: Any) -> None:
    """`memory_budget_config` is a `Config`."""
    options = Options(memory_budget="8GiB", memory_budget_config={"tier": "memory", "host_budget": "1GiB"})
    callback = callback_of(plugin, options)
    assert callback.limit == "8GiB"
    assert callback.config.tier == "memory"
    assert callback.config.host_budget_bytes == 2**30


@pytest.mark.parametrize(
    ("options", "kind", "said"),
    [
        ({"memory_budget": "8 potatoes"}, SizeError, "memory budget .8 potatoes"),
        ({"memory_budget": "8GiB", "memory_budget_config": {"teir": "disk"}}, ConfigError, "did you mean tier"),
        ({"memory_budget": "8GiB", "memory_budget_config": {"tier": "tape"}}, ConfigError, "'disk', 'memory'"),
        ({"memory_budget_config": {"tier": "disk"}}, ConfigError, "without memory_budget"),
    ],
)
def test_what_is_wrong_is_said_before_training(
    plugin: Any, options: dict[str, Any], kind: type[TorchdeltaError], said: str
) -> None:
    """When the trainer is made, in one line."""
    with pytest.raises(kind, match=said) as caught:
        plugin.post_trainer_create(Options(options), None)
    assert len(str(caught.value).splitlines()) == 1
