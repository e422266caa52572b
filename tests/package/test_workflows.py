"""The workflow files for a public host."""

import re
from pathlib import Path

import pytest

WORKFLOWS = sorted((Path(__file__).parents[2] / ".github" / "workflows").glob("*.yml"))
MAKEFILE = Path(__file__).parents[2] / "Makefile"


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_actions_are_pinned(path):
    """Each action has a full version, each workflow its permissions: none, unless a job names more."""
    text = path.read_text(encoding="ascii")
    versions = re.findall(r"uses: [\w/-]+@(\S+)", text)
    assert versions
    assert all(re.fullmatch(r"v\d+\.\d+\.\d+", version) for version in versions)
    assert "\npermissions:\n  contents: read\n" in text
    assert text.count("runs-on:") == text.count("timeout-minutes:")


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_the_targets_exist(path):
    """A workflow runs what a developer runs."""
    targets = set(re.findall(r"^([a-z-]+):", MAKEFILE.read_text(encoding="ascii"), re.MULTILINE))
    assert set(re.findall(r"run: make ([a-z-]+)", path.read_text(encoding="ascii"))) <= targets
