"""The helper process and its files: asked, answering, ended, and where who asked is killed."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from tests.planners.chains import MACHINE, MIB, chain
from torchdelta import Config
from torchdelta.errors import PlanError
from torchdelta.runtime.follow import planning
from torchdelta.runtime.follow.planning import Planning
from torchdelta.trace.file import write_trace

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

STEP = chain([(8 * MIB, 2e-3, 1e-4)] * 4)
WAIT_S = 60.0
REFUSES = 'import sys\nfor line in sys.stdin.buffer: print(\'{"error": "no plan"}\', flush=True)'
NEVER_ANSWERS = "import time\ntime.sleep(600)"


@pytest.fixture(autouse=True)
def _temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))


@pytest.fixture
def asking(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Planning]:
    """Yield the requests of a session whose helper runs the code that the test names."""
    monkeypatch.setattr(planning, "COMMAND", (sys.executable, "-c", request.param))
    found = Planning(Config(planner="torchdelta"))
    yield found
    found.close()


def _ask(asking: Planning, key: str = "key") -> None:
    asking.ask(key, STEP, MACHINE, 16 * MIB)


@pytest.mark.parametrize("asking", [REFUSES], indirect=True, ids=["refuses"])
def test_answers_come_in_the_order_of_the_requests(asking: Planning, tmp_path: Path) -> None:
    """The files of a request are gone with its answer, and the directory with the helper."""
    for key in ("first", "second", "third"):
        _ask(asking, key)
    (directory,) = tmp_path.iterdir()
    for key, num_left in (("first", 2), ("second", 1), ("third", 0)):
        planned = asking.poll(WAIT_S)
        assert planned is not None
        assert (planned.key, planned.plan, planned.answer.error) == (key, None, "no plan")
        assert len(list(directory.iterdir())) == num_left
    asking.close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("asking", [REFUSES], indirect=True, ids=["refuses"])
def test_a_process_with_more_than_1024_open_files_is_answered(asking: Planning) -> None:
    """A training with many files open, as with many workers, is no reason to fail."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 2048:
        pytest.skip("this process may not open so many files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (2048, hard))
    descriptors: list[int] = []
    try:
        while not descriptors or descriptors[-1] < 1100:
            descriptors.append(os.open(os.devnull, os.O_RDONLY))
        _ask(asking)
        planned = asking.poll(WAIT_S)
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
        asking.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert planned is not None
    assert planned.answer.error == "no plan"


@pytest.mark.parametrize("asking", [NEVER_ANSWERS], indirect=True, ids=["hangs"])
def test_who_gives_up_waiting_leaves_no_process_and_no_file(asking: Planning, tmp_path: Path) -> None:
    """A session that ends while its step is being planned does not wait for the plan."""
    _ask(asking)
    assert asking.poll() is None
    helper = asking._helper  # noqa: SLF001 - the process is what the test is about
    assert helper is not None
    assert helper.poll() is None
    asking.close()
    assert helper.returncode is not None
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("asking", [NEVER_ANSWERS], indirect=True, ids=["hangs"])
def test_a_killed_helper_is_one_error(asking: Planning, tmp_path: Path) -> None:
    """Nothing is planned from then on, and later requests are not even written."""
    _ask(asking)
    helper = asking._helper  # noqa: SLF001
    assert helper is not None
    helper.kill()
    with pytest.raises(PlanError, match="helper process ended with exit code -9"):
        asking.poll(WAIT_S)
    _ask(asking)
    assert asking.poll() is None
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("asking", [NEVER_ANSWERS], indirect=True, ids=["hangs"])
def test_a_helper_that_hangs_is_given_up(asking: Planning, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the longest time that an answer may take."""
    monkeypatch.setattr(planning, "ANSWER_TIME_S", 0.0)
    _ask(asking)
    with pytest.raises(PlanError, match="no answer within 0 s"):
        asking.poll(0.01)


def test_the_helper_removes_the_files_of_who_was_killed(tmp_path: Path) -> None:
    """Its input ends without that it was ended itself: nobody else will remove them."""
    directory = tmp_path / "torchdelta-files"
    directory.mkdir()
    write_trace(STEP, directory / "1.trace")
    command = [sys.executable, "-m", "torchdelta.planners.helper", str(directory)]
    subprocess.run(command, stdin=subprocess.DEVNULL, check=True, timeout=WAIT_S)
    assert list(tmp_path.iterdir()) == []
