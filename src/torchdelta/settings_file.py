"""Settings in TOML: `torchdelta.toml`, or the table `[tool.torchdelta]` of `pyproject.toml`.

This file only finds and reads them. `Config` knows the keys, and `settings.py` which source wins.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from torchdelta.errors import ConfigError

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping

__all__ = ["find_settings_file", "read_settings_file", "without_none"]

_OWN_NAME: Final = "torchdelta.toml"
_PROJECT_NAME: Final = "pyproject.toml"


def find_settings_file(directory: Path) -> Path | None:
    """Return the settings file of a directory, or None. `torchdelta.toml` wins; parent directories are not searched.

    Raises:
        ConfigError: There is a `pyproject.toml` that cannot be read.
    """
    own, project = directory / _OWN_NAME, directory / _PROJECT_NAME
    if own.is_file():
        return own
    return project if project.is_file() and _own_table(project, _read(project)) is not None else None


def read_settings_file(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the keys and values of a settings file, not checked; a relative `swap_dir` begins at the file's directory.

    Of a file named `pyproject.toml` it is the table `[tool.torchdelta]`, of any other one all of it.

    Raises:
        ConfigError: The file cannot be read or is not TOML, or a `pyproject.toml` has no such table.
    """
    path = Path(path)
    content = _read(path)
    table = _own_table(path, content) if path.name == _PROJECT_NAME else content
    if table is None:
        raise ConfigError(f"{path}: there is no table [tool.torchdelta]: add it, or name another file")
    table = without_none(table)
    if isinstance(table.get("swap_dir"), str):
        try:
            directory = Path(table["swap_dir"]).expanduser()
        except RuntimeError:
            raise ConfigError(
                f"{path}: swap_dir={table['swap_dir']!r} names no home directory that is known: write the whole path"
            ) from None
        table["swap_dir"] = str(path.absolute().parent / directory)
    return table


def without_none(table: Mapping[str, Any]) -> dict[str, Any]:
    """Return a table with None for the text "none": TOML and environment variables have no other way to say it."""
    return {
        key: None if key != "swap_dir" and isinstance(value, str) and value.lower() == "none" else value
        for key, value in table.items()
    }


def _read(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            return tomllib.load(file)
    except FileNotFoundError:
        raise ConfigError(f"no settings file {str(path)!r}") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not TOML: {error}") from None
    except ValueError as error:  # a number of thousands of digits, or a name that no file can have
        raise ConfigError(f"{path}: cannot be read: {str(error).partition(';')[0]}") from None
    except RecursionError:
        raise ConfigError(f"{path}: cannot be read: its values are nested too deeply") from None


def _own_table(path: Path, content: dict[str, Any]) -> dict[str, Any] | None:
    tools = content.get("tool", {})
    table = tools.get("torchdelta") if isinstance(tools, dict) else None
    if table is not None and not isinstance(table, dict):
        raise ConfigError(f"{path}: tool.torchdelta is not a table: write [tool.torchdelta], and the keys below it")
    return table
