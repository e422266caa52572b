"""Resolves the settings of a run: an argument wins over an environment variable, that over a file, that over a default.

`torchdelta run` and `MemoryBudget.from_settings()` ask for this. A plain `MemoryBudget("8GiB")` reads no file and none
of these variables but TORCHDELTA_SWAP_DIR, so that code that names its options does what it says anywhere.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from torchdelta.config import MEMORY_BUDGET, Config
from torchdelta.errors import ConfigError, SizeError
from torchdelta.names import nearest
from torchdelta.settings_file import find_settings_file, read_settings_file, without_none
from torchdelta.units import parse_size

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["KEYS", "Settings", "resolve_settings", "unknown_variables", "variable_of"]

_DEFAULTS: Final[dict[str, Any]] = {MEMORY_BUDGET: None} | {field.name: field.default for field in fields(Config)}
KEYS: Final = tuple(_DEFAULTS)
"""The keys of a settings file."""

_PREFIX: Final = "TORCHDELTA_"
_FILE_VARIABLE: Final = "TORCHDELTA_CONFIG"
_OTHER_VARIABLES: Final = {
    _FILE_VARIABLE,
    "TORCHDELTA_CACHE_DIR",
    "TORCHDELTA_LOG_LEVEL",
    "TORCHDELTA_NATIVE",
    "TORCHDELTA_RUN",
    "TORCHDELTA_TEST_DEVICE",
}
_FLAGS: Final = {
    "1": True,
    "true": True,
    "yes": True,
    "on": True,
    "0": False,
    "false": False,
    "no": False,
    "off": False,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """The settings of a run.

    Attributes:
        memory_budget: As it was written, such as "8GiB"; None if it is given nowhere.
        config: The options.
        origins: For each key where its value comes from: "argument", an environment variable, a file, or "default".
        values: The value of each key.
    """

    memory_budget: int | str | None
    config: Config
    origins: dict[str, str]
    values: dict[str, Any]

    @property
    def options(self) -> dict[str, Any]:
        """The options of `config` that are no defaults."""
        return {key: value for key, value in self.values.items() if key != MEMORY_BUDGET and value != _DEFAULTS[key]}

    def required_budget(self) -> int | str:
        """Return the memory budget.

        Raises:
            ConfigError: None is given anywhere.
        """
        if self.memory_budget is None:
            raise ConfigError(
                "no memory budget is given: pass one ('8GiB'; --memory-budget 8GiB), or set TORCHDELTA_MEMORY_BUDGET, "
                "or memory_budget in torchdelta.toml"
            )
        return self.memory_budget


def resolve_settings(
    arguments: Mapping[str, Any] | None = None,
    *,
    file: str | os.PathLike[str] | Mapping[str, Any] | None = None,
    environ: Mapping[str, str] | None = None,
    directory: Path | None = None,
) -> Settings:
    """Resolve the settings.

    Args:
        arguments: Values by key. A key that is there wins over all other sources, also with the value None.
        file: The settings file, or a mapping with its keys; None: TORCHDELTA_CONFIG, else `torchdelta.toml`, else
            `[tool.torchdelta]` of `pyproject.toml` in the directory, if there is one.
        environ: The environment; None: that of this process.
        directory: Where a file is looked for; None: the working directory.

    Raises:
        ConfigError: A key is unknown, or a value is not allowed. The message names the file or the variable.
    """
    environ = os.environ if environ is None else environ
    path = file if file is not None else environ.get(_FILE_VARIABLE) or _find_near(directory)
    sources: list[tuple[str, Mapping[str, Any]]] = [("default", _DEFAULTS)]
    if isinstance(path, str | os.PathLike):
        sources.append((str(os.fspath(path)), read_settings_file(path)))
    elif path is not None:
        sources.append(("config", without_none(path)))
    sources += [(name, {key: value}) for key, name, value in _read_environment(environ)]
    sources.append(("argument", without_none(arguments or {})))

    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for origin, table in sources:
        if origin != "default":
            is_argument = origin == "argument"
            Config.from_dict(table, source="" if is_argument else origin)  # each source alone, so that errors name it
            if not is_argument:
                _check_budget(table.get(MEMORY_BUDGET), origin)
        values |= table
        origins |= dict.fromkeys(table, origin)
    config = _combined(values, origins)
    values["swap_dir"] = config.swap_dir  # absolute: a child process may start in another directory
    return Settings(
        memory_budget=values[MEMORY_BUDGET],
        config=config,
        origins=origins,
        values=values,
    )


def variable_of(key: str) -> str:
    """Return the environment variable of a key.

    Example:
        >>> variable_of("host_budget")
        'TORCHDELTA_HOST_BUDGET'
    """
    return _PREFIX + key.upper()


def unknown_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that look like settings and are not read, with what is wrong, in words."""
    known = {*_OTHER_VARIABLES, *map(variable_of, KEYS)}
    unknown = (name for name in environ if name.startswith(_PREFIX) and name not in known)
    return {name: f"not read{f': did you mean {near}?' if (near := nearest(name, known)) else ''}" for name in unknown}


def _find_near(directory: Path | None) -> Path | None:
    try:
        return find_settings_file(directory or Path.cwd())
    except FileNotFoundError:  # the working directory does not exist any more
        return None


def _read_environment(environ: Mapping[str, str]) -> list[tuple[str, str, Any]]:
    """Return (key, variable, value) of each variable that is set; an empty one is not set."""
    found: list[tuple[str, str, Any]] = []
    for key, default in _DEFAULTS.items():
        name = variable_of(key)
        text = environ.get(name, "").strip()
        if not text:
            continue
        value: Any = without_none({key: text})[key]
        if isinstance(default, bool):
            value = _FLAGS.get(text.lower())
            if value is None:
                raise ConfigError(f"{name}={text!r} is not allowed: use 1 or 0")
        found.append((key, name, value))
    return found


def _check_budget(budget: Any, source: str) -> None:
    if budget is None or (isinstance(budget, str) and budget.strip().lower() == "auto"):
        return
    try:
        parse_size(budget, total_bytes=2**40, name=MEMORY_BUDGET)  # a percentage is one of the device's memory
    except SizeError as error:
        raise ConfigError(f"{source}: {error}") from None


def _combined(values: Mapping[str, Any], origins: Mapping[str, str]) -> Config:
    options = {key: value for key, value in values.items() if key != MEMORY_BUDGET}
    try:
        return Config(**options)
    except ConfigError as error:  # options that exclude each other; each is allowed alone
        given = ", ".join(
            f"{key}: {origin}" for key, origin in origins.items() if origin != "default" and key in options
        )
        elsewhere = any(origin not in {"default", "argument"} for key, origin in origins.items() if key in options)
        raise ConfigError(f"{error} ({given})" if elsewhere else str(error)) from None
