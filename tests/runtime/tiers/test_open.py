"""Tiers by name."""

from pathlib import Path

import pytest

from torchdelta.config import TIERS
from torchdelta.errors import TierError
from torchdelta.runtime.tiers import open_tier, tier_names


def test_every_configurable_tier_can_be_opened(tmp_path: Path) -> None:
    """The names that `Config` allows are the names that open."""
    assert set(tier_names()) == set(TIERS)
    for name in tier_names():
        tier = open_tier(name, swap_dir=tmp_path, host_budget_bytes=1 << 20, disk_budget_bytes=1 << 21)
        assert tier.name == name
        assert tier.capacity_bytes == {"disk": 1 << 21, "memory": 1 << 20}[name]
        assert tier.staging_bytes <= 1 << 20
        tier.close()


def test_an_unknown_tier_is_refused_with_the_known_names() -> None:
    """One line."""
    with pytest.raises(TierError, match=r"there is no tier 'tape'; take one of 'disk', 'memory'"):
        open_tier("tape")
