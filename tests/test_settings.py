"""Where a setting comes from: argument over environment over file over default, and what is wrong names its source."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import typing
from pathlib import Path
from typing import Any

import pytest

from torchdelta import Config, MemoryBudget
from torchdelta.config import DECISIONS, POLICIES, TIERS, VERIFY
from torchdelta.errors import ConfigError, SizeError
from torchdelta.settings import KEYS, resolve_settings, unknown_variables, variable_of

FILE = 'memory_budget = "3GiB"\npolicy = "lru"\ntier = "memory"\narena = true\n'


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory, and no variable of ours."""
    monkeypatch.chdir(tmp_path)
    for key in (*KEYS, "config"):
        monkeypatch.delenv(variable_of(key), raising=False)
    return tmp_path


def test_without_any_source_all_is_default(folder: Path) -> None:
    """The options are those of `Config()`, and there is no budget."""
    settings = resolve_settings(directory=folder)
    assert settings.config == Config()
    assert settings.memory_budget is None
    assert set(settings.origins.values()) == {"default"}
    with pytest.raises(ConfigError, match="TORCHDELTA_MEMORY_BUDGET"):
        settings.required_budget()


def test_argument_over_environment_over_file_over_default(folder: Path) -> None:
    """Each key comes from the highest source that has it, and `origins` says which."""
    (folder / "torchdelta.toml").write_text(FILE)
    environ = {"TORCHDELTA_POLICY": "dtr", "TORCHDELTA_TIER": "disk", "TORCHDELTA_HOST_BUDGET": ""}
    settings = resolve_settings({"policy": "swap-only"}, environ=environ, directory=folder)
    path = str(folder / "torchdelta.toml")
    assert settings.config == Config(policy="swap-only", tier="disk", arena=True)
    assert settings.memory_budget == "3GiB"
    assert settings.options == {"policy": "swap-only", "arena": True}
    assert settings.origins["policy"] == "argument"
    assert settings.origins["tier"] == "TORCHDELTA_TIER"
    assert settings.origins["arena"] == settings.origins["memory_budget"] == path
    assert settings.origins["host_budget"] == "default"


def test_every_key_can_be_set_in_each_source(folder: Path) -> None:
    """A value from the file, the environment and the arguments is the same value."""
    values: dict[str, Any] = {
        "memory_budget": "2GiB",
        "policy": "dtr",
        "decision_class": "saved",
        "tier": "memory",
        "swap_dir": str(folder),
        "host_budget": "1GiB",
        "disk_budget": "2GiB",
        "checksum": True,
        "verify": "first-step",
        "count_allocations": False,
        "caching_allocator": False,
        "arena": True,
        "planner": "torchdelta",
        "decisions": "none",
    }
    assert set(values) == set(KEYS)
    texts = {variable_of(key): str(value) for key, value in values.items()}
    lines = [
        f"{key} = {str(value).lower() if value in (True, False) else repr(value)}" for key, value in values.items()
    ]
    (folder / "job.toml").write_text("\n".join(lines))
    from_file = resolve_settings(file=folder / "job.toml", environ={}, directory=folder)
    from_environment = resolve_settings(environ=texts, directory=folder)
    expected = Config(**{key: value for key, value in values.items() if key not in {"memory_budget", "decisions"}})
    assert from_file.config == from_environment.config == Config.from_dict(values) == expected
    assert from_file.memory_budget == from_environment.memory_budget == "2GiB"


@pytest.mark.parametrize(
    ("name", "text"), [("torchdelta.toml", FILE), ("pyproject.toml", f"[tool.torchdelta]\n{FILE}[tool.ruff]\n")]
)
def test_the_file_of_the_working_directory_is_found(folder: Path, name: str, text: str) -> None:
    """Either name; `Config.from_file` reads both as well."""
    (folder / name).write_text(text)
    assert (
        resolve_settings().config == Config.from_file(folder / name) == Config(policy="lru", tier="memory", arena=True)
    )
    assert MemoryBudget.from_settings().budget_bytes == 3 * 2**30


def test_torchdelta_toml_wins_over_pyproject_and_config_names_another(folder: Path) -> None:
    """TORCHDELTA_CONFIG wins over both, and an explicit file over that."""
    (folder / "pyproject.toml").write_text('[tool.torchdelta]\npolicy = "dtr"\n')
    (folder / "torchdelta.toml").write_text('policy = "lru"\n')
    (folder / "other.toml").write_text('policy = "swap-only"\n')
    environ = {"TORCHDELTA_CONFIG": str(folder / "other.toml")}
    assert resolve_settings(environ={}).config.policy == "lru"
    assert resolve_settings(environ=environ).config.policy == "swap-only"
    assert resolve_settings(environ=environ, file=folder / "pyproject.toml").config.policy == "dtr"
    assert resolve_settings(environ=environ, file={"policy": "recompute-only"}).config.policy == "recompute-only"


def test_a_pyproject_of_others_is_left_alone(folder: Path) -> None:
    """Without a table of ours it is no settings file; named as one, it is an error."""
    (folder / "pyproject.toml").write_text("[tool.ruff]\n")
    assert resolve_settings().config == Config()
    with pytest.raises(ConfigError, match=r"pyproject\.toml: there is no table \[tool\.torchdelta\]"):
        Config.from_file(folder / "pyproject.toml")


def test_a_plain_budget_reads_neither_file_nor_environment(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`MemoryBudget("8GiB")` is the same everywhere; an argument of `from_settings` wins."""
    (folder / "torchdelta.toml").write_text(FILE)
    monkeypatch.setenv("TORCHDELTA_POLICY", "dtr")
    assert MemoryBudget("8GiB").config == Config()
    budget = MemoryBudget.from_settings("1GiB", tier="disk", arena=False)
    assert (budget.budget_bytes, budget.config) == (2**30, Config(policy="dtr"))


def test_a_swap_directory_of_a_file_is_beside_the_file(folder: Path) -> None:
    """So that a file can be used from anywhere."""
    (folder / "job" / "swap").mkdir(parents=True)
    (folder / "job" / "job.toml").write_text('swap_dir = "swap"\n')
    assert Config.from_file("job/job.toml").swap_dir == str(folder / "job" / "swap")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('polcy = "lru"', "unknown key 'polcy': did you mean policy? Known are memory_budget, policy, planner"),
        ('policy = "lruu"', "policy='lruu' is not allowed: did you mean 'lru'?"),
        ("policy = 3", "policy=3 is not allowed: use 'torchdelta'"),
        ('arena = "on"', "arena='on' is not allowed: use True or False (in TOML: true or false)"),
        ("host_budget = 0.5", "host_budget 0.5 is ambiguous: write '0.5GiB'"),
        ("memory_budget = 0.5", "memory_budget 0.5 is ambiguous: write '50%'"),
        ('memory_budget = "80"', "memory_budget '80' is 80 bytes: name the unit, such as '80GiB'"),
        ('host_budget = "auto"', "host_budget 'auto' is not a size: write a number and one of B, kB,"),
        ("memory_budget = true", "memory_budget must be an int of bytes or text such as '8GiB' or '80%', not bool"),
        ("memory_budget = 8GiB", "not TOML: "),
        ("host_budget = " + "9" * 5000, "cannot be read: Exceeds the limit (4300 digits)"),
        ("policy = " + "[" * 5000, "cannot be read: its values are nested too deeply"),
        ('swap_dir = "~nobody-of-this-name/swap"', "swap_dir='~nobody-of-this-name/swap' names no home directory"),
        ("[tier]\nname = 1", "tier={'name': 1} is not allowed: use 'disk', 'memory'"),
    ],
)
def test_what_is_wrong_in_a_file_is_one_line_with_its_name(folder: Path, text: str, message: str) -> None:
    """File, key, value, and the nearest thing that works."""
    path = folder / "torchdelta.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        resolve_settings()
    assert str(caught.value).startswith(f"{path}: {message}")
    assert str(caught.value).isprintable()


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"TORCHDELTA_POLICY": "lruu"}, "TORCHDELTA_POLICY: policy='lruu' is not allowed: did you mean 'lru'?"),
        ({"TORCHDELTA_ARENA": "maybe"}, "TORCHDELTA_ARENA='maybe' is not allowed: use 1 or 0"),
        ({"TORCHDELTA_MEMORY_BUDGET": "much"}, "TORCHDELTA_MEMORY_BUDGET: memory_budget 'much' is not a size"),
        ({"TORCHDELTA_CONFIG": "no.toml"}, "no settings file 'no.toml'"),
    ],
)
def test_what_is_wrong_in_the_environment_names_the_variable(
    folder: Path, environ: dict[str, str], message: str
) -> None:
    """One line, as for a file."""
    with pytest.raises(ConfigError) as caught:
        resolve_settings(environ=environ, directory=folder)
    assert str(caught.value).startswith(message)


def test_options_that_exclude_each_other_say_where_they_are_from(folder: Path) -> None:
    """Each alone is right, so the message names both sources."""
    (folder / "torchdelta.toml").write_text('planner = "torchdelta"\n')
    with pytest.raises(ConfigError) as caught:
        resolve_settings(environ={"TORCHDELTA_DECISIONS": "swap"})
    assert "planner and decisions exclude each other" in str(caught.value)
    assert f"planner: {folder / 'torchdelta.toml'}, decisions: TORCHDELTA_DECISIONS" in str(caught.value)
    assert resolve_settings({"planner": None}, environ={"TORCHDELTA_DECISIONS": "swap"}).config.decisions == "swap"


def test_an_argument_keeps_its_own_message(folder: Path) -> None:
    """A wrong budget that is passed is a SizeError, as of `MemoryBudget`; a wrong option has no prefix."""
    with pytest.raises(SizeError, match=r"^budget 'much' is not a size"):
        MemoryBudget.from_settings("much", file={})
    with pytest.raises(ConfigError, match=r"^policy='belady' is not allowed"):
        MemoryBudget.from_settings("1GiB", policy="belady", file={})
    with pytest.raises(ConfigError, match=r"^unknown key 'polcy': did you mean policy"):
        MemoryBudget.from_settings("1GiB", polcy="lru", file={})
    assert not list(folder.iterdir())


def test_none_is_a_word_in_each_source(folder: Path) -> None:
    """An argument can be text, too, as of the command line."""
    expected = Config(planner=None)
    assert resolve_settings({"planner": "none", "host_budget": "None"}, environ={}, directory=folder).config == expected
    assert resolve_settings(environ={"TORCHDELTA_PLANNER": "none"}, directory=folder).config == expected
    assert MemoryBudget.from_settings("1GiB", file={}, planner="none").config == expected


def test_a_misspelled_variable_is_found() -> None:
    """What looks like one of ours and is not gets the nearest name; others' variables are left out."""
    found = unknown_variables({"TORCHDELTA_POLCY": "lru", "TORCHDELTA_LOG_LEVEL": "INFO", "HOME": "/"})
    assert found == {"TORCHDELTA_POLCY": "not read: did you mean TORCHDELTA_POLICY?"}


def test_settings_need_no_torch() -> None:
    """A file can be checked on a machine without torch."""
    code = "import sys, torchdelta.settings; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_reference_page_lists_every_key() -> None:
    """Each key stands there with its default and its variable, and each name that an option allows."""
    page = (Path(__file__).parents[1] / "docs" / "reference" / "config.md").read_text(encoding="utf-8")
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in page.splitlines() if line[:3] == "| `"]
    by_key = {row[0].strip("`"): row for row in rows if len(row) == 5}
    assert tuple(by_key) == KEYS
    defaults: dict[str, Any] = {field.name: field.default for field in dataclasses.fields(Config)}
    types = typing.get_type_hints(Config)
    for key, (_, allowed, default, variable, text) in by_key.items():
        assert variable.strip("`") == variable_of(key)
        if key != "memory_budget":
            value = defaults[key]
            assert default.strip("`") == ("none" if value is None else json.dumps(value))
            assert ("none" in allowed) == (type(None) in typing.get_args(types[key]))
            assert ("flag" in allowed) == isinstance(value, bool)
        names = {"policy": POLICIES, "tier": TIERS, "decisions": DECISIONS, "verify": VERIFY}.get(key, ())
        assert all(f'"{name}"' in allowed + text for name in names)
