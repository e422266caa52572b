"""MemoryBudgetPlugin: a memory budget for axolotl, from its YAML file.

    plugins:
      - torchdelta.integrations.axolotl.MemoryBudgetPlugin
    memory_budget: 8GiB
    memory_budget_config:   # optional: the options of torchdelta.Config
      tier: disk

`make frameworks` tries it in whole runs of axolotl 0.19 on a CPU. Where axolotl is not installed, the tests use a
stand-in for its plugin interface.
"""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Any

from axolotl.integrations.base import BasePlugin  # pyright: ignore[reportMissingImports]
from pydantic import BaseModel

from torchdelta.config import Config
from torchdelta.errors import ConfigError
from torchdelta.integrations.transformers import MemoryBudgetCallback
from torchdelta.names import unknown_name

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["MemoryBudgetArgs", "MemoryBudgetPlugin"]


class MemoryBudgetArgs(BaseModel):
    """The keys that the plugin adds to axolotl's YAML.

    Attributes:
        memory_budget: The budget of each process, as `MemoryBudget` takes it: "8GiB", "80%", "auto", or bytes. Without
            it the plugin does nothing.
        memory_budget_config: Options of `torchdelta.Config` by name.
    """

    memory_budget: int | str | None = None
    memory_budget_config: dict[str, Any] | None = None


class MemoryBudgetPlugin(BasePlugin):  # pyright: ignore[reportUntypedBaseClass]
    """Train with the callback of `torchdelta.integrations.transformers`, as the YAML file says."""

    def get_input_args(self) -> str:
        """Return the path of the class with the plugin's keys."""
        return "torchdelta.integrations.axolotl.MemoryBudgetArgs"

    def post_trainer_create(self, cfg: Any, trainer: Any) -> None:
        """Check the options before anything is loaded for training.

        Raises:
            SizeError: `memory_budget` is no size.
            ConfigError: An option is unknown or not allowed.
        """
        del trainer
        _callbacks(cfg)

    def add_callbacks_post_trainer(self, cfg: Any, trainer: Any) -> list[Any]:
        """Return the callback, or none if the YAML names no budget."""
        del trainer
        return _callbacks(cfg)


def _callbacks(cfg: Any) -> list[Any]:
    limit = _get(cfg, "memory_budget")
    options = _get(cfg, "memory_budget_config")
    if limit is None:
        if options is not None:
            raise ConfigError("memory_budget_config is given without memory_budget: name a budget, such as 8GiB")
        return []
    return [MemoryBudgetCallback(limit, None if options is None else _config(options))]


def _get(cfg: Any, key: str) -> Any:
    """Return a key of axolotl's configuration (a dict whose keys are attributes too), or None."""
    return cfg.get(key) if hasattr(cfg, "get") else getattr(cfg, key, None)


def _config(options: Mapping[str, Any]) -> Config:
    names = [field.name for field in fields(Config)]
    for name in options:
        if name not in names:
            raise ConfigError(f"memory_budget_config: {unknown_name('option', name, names)}")
    return Config(**dict(options))
