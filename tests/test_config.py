"""A Config is right from the start, or an error names the values that would be."""

import dataclasses

import numpy as np
import pytest

from torchdelta.budget import MemoryBudget
from torchdelta.config import POLICIES, Config, SavedBuffer
from torchdelta.errors import ConfigError


@pytest.mark.parametrize("policy", POLICIES)
def test_every_known_policy_is_allowed(policy):
    """The registered names are accepted."""
    assert Config(policy=policy).policy == policy


@pytest.mark.parametrize("decisions", [None, "recompute", "swap", "keep", lambda _buffer: "keep"])
def test_decisions_are_a_name_or_a_callable(decisions):
    """All three forms of the option are accepted."""
    assert Config(decisions=decisions).decisions is decisions


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ({"policy": "belady"}, ["policy='belady'", "'torchdelta'", "'delta-2022'", "'swap-only'"]),
        ({"policy": None}, ["policy=None"]),
        ({"decisions": "drop"}, ["decisions='drop'", "'recompute'", "callable"]),
        ({"decisions": 3}, ["decisions=3"]),
        ({"tier": "tape"}, ["tier='tape'", "'disk'", "'memory'"]),
        ({"verify": "always"}, ["verify='always'", "'first-step'", "None"]),
        ({"verify": True}, ["verify=True"]),
        ({"swap_dir": 3}, ["swap_dir=3", "directory"]),
        ({"swap_dir": "/nonexistent/swap"}, ["/nonexistent/swap", "not a directory"]),
        ({"host_budget": "much"}, ["host_budget 'much'"]),
        ({"host_budget": 0.5}, ["host_budget 0.5", "'0.5GiB'"]),
        ({"disk_budget": "50%"}, ["disk_budget '50%'", "'8GiB'"]),
        ({"disk_budget": 0}, ["disk_budget 0"]),
        ({"checksum": "crc32"}, ["checksum='crc32'", "True", "False"]),
        ({"count_allocations": "no"}, ["count_allocations='no'", "True", "False"]),
        ({"count_allocations": 1}, ["count_allocations=1"]),
        ({"arena": "cpu"}, ["arena='cpu'", "True", "False"]),
    ],
)
def test_a_wrong_value_is_named_with_the_allowed_ones(options, parts):
    """The message is one line with the option, its value and what would be right."""
    with pytest.raises(ConfigError) as caught:
        Config(**options)
    assert str(caught.value).isprintable()
    for part in parts:
        assert part in str(caught.value)


@pytest.mark.parametrize("options", [None, "disk", [("tier", "disk")]])
def test_options_that_are_no_mapping(options):
    """One line, not what Python says of the value inside."""
    with pytest.raises(ConfigError, match="is not a mapping: use "):
        Config.from_dict(options)


def test_sizes_are_read():
    """Budgets of host memory and disk come out as bytes, or as no limit."""
    config = Config(host_budget="1GiB", disk_budget=10**9)
    assert (config.host_budget_bytes, config.disk_budget_bytes) == (2**30, 10**9)
    assert (Config().host_budget_bytes, Config().disk_budget_bytes) == (None, None)
    assert type(Config(host_budget=np.int64(7)).host_budget) is int


@pytest.mark.parametrize("cls", [Config, SavedBuffer])
def test_data_are_frozen_keyword_only_and_slotted(cls):
    """Nothing can be changed, set by position, or misspelled into existence."""
    assert cls.__dataclass_params__.frozen
    assert all(field.kw_only for field in dataclasses.fields(cls))
    assert hasattr(cls, "__slots__")


def test_a_relative_directory_is_that_of_now(tmp_path, monkeypatch):
    """A program may change its working directory later."""
    (tmp_path / "swap").mkdir()
    monkeypatch.chdir(tmp_path)
    config = Config(swap_dir="swap")
    assert config == Config(swap_dir=str(tmp_path / "swap"))
    assert Config(swap_dir=tmp_path).swap_dir is tmp_path


def test_an_option_outside_of_a_config_is_answered_with_what_to_write():
    """And a name that is none of them, with the arguments that there are."""
    with pytest.raises(TypeError) as caught:
        MemoryBudget("8GiB", policy="lru", arena=True)
    said = "'policy' is an option of Config: write MemoryBudget('8GiB', Config(policy='lru', arena=True))"
    assert str(caught.value) == said
    with pytest.raises(TypeError, match="has no option 'polcy': it takes budget, config, plan and trace_out"):
        MemoryBudget("8GiB", polcy="lru")
