"""Other processes: forked workers, a second budget in the same directory, a kill, and limits that the kernel sets."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from tests.faults.programs import WIDTH, Loop, complaints, forced, no_fault, run
from tests.faults.switches import disabled
from tests.sampling import keep
from torchdelta._torch.modes import num_modes
from torchdelta.runtime.current import current_session
from torchdelta.runtime.tiers import scratch
from torchdelta.runtime.tiers.disk import DiskTier

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parent.parent.parent


def script(code: str, *arguments: object, prefix: tuple[str, ...] = ()) -> subprocess.Popen[str]:
    """Start Python code in a process of its own, with the tests' own programs at hand."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ["PYTHONPATH"]])}
    return subprocess.Popen(
        [*prefix, sys.executable, "-c", code, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )


def output(process: subprocess.Popen[str]) -> str:
    """Wait for a process that must end well, and return what it printed."""
    printed, complained = process.communicate(timeout=300)
    assert process.returncode == 0, complained
    return printed.strip()


# -- forked workers of a DataLoader


class Worker(Dataset[Any]):
    """Makes its items with torch ops, and says what of the parent's scope the worker still has."""

    def __init__(self, swap_dir: Path) -> None:
        self.swap_dir = swap_dir

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        x = torch.full((WIDTH, WIDTH), float(index)).sin_().add(1)
        on = (current_session() is not None) + num_modes()
        on += any(_target(link).startswith(str(self.swap_dir)) for link in Path("/proc/self/fd").iterdir())
        return x, on


def _target(link: Path) -> str:
    try:
        return str(link.readlink())
    except OSError:
        return ""


def train_with_workers(scope: Any, swap_dir: Path) -> tuple[list[torch.Tensor], int, Any]:
    """Train on batches from two workers; return the weights, what was still on in the workers, and the budget."""
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh(), torch.nn.Linear(WIDTH, WIDTH))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    num_on = 0
    with scope() as budget:
        for _ in range(2):
            loader = DataLoader(Worker(swap_dir), batch_size=4, num_workers=2, multiprocessing_context="fork")
            frozen = torch.full((WIDTH, WIDTH), 0.5, requires_grad=True)
            swapped = (frozen * 3).sin().exp().sum()  # the workers are forked while this is away
            for x, on in loader:
                num_on += int(on.sum())
                model(x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            swapped.backward()
            assert frozen.grad is not None
    return [*(parameter.detach() for parameter in model.parameters()), frozen.grad], num_on, budget


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_workers_know_nothing_of_the_budget(tmp_path: Path) -> None:
    """No mode, no session, no descriptor in the workers; when they end, the parent's swapped bytes are still there."""
    expected, _, _ = train_with_workers(contextlib.nullcontext, tmp_path)
    actual, num_on, budget = train_with_workers(forced("swap", tmp_path), tmp_path)
    assert num_on == 0
    assert all(torch.equal(a, b) for a, b in zip(expected, actual, strict=True))
    assert budget.summary().swapped_in_bytes > 0


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_control_without_the_handling_workers_run_inside_the_budget(tmp_path: Path) -> None:
    """The negative control: the scope is on in the workers."""
    with disabled("fork"):
        _, num_on, _ = train_with_workers(forced("swap", tmp_path), tmp_path)
    assert num_on > 0


@pytest.mark.rest
def test_a_forked_child_may_leave_the_scope_and_open_its_own(tmp_path: Path) -> None:
    """`os.fork()` inside a `with`: the child leaves the block without an error, and the parent goes on."""
    code = """
import os, sys, warnings
warnings.simplefilter("ignore")
import torch
from torchdelta import Config, MemoryBudget
def step():
    x = torch.linspace(-1, 1, 4096).view(64, 64).requires_grad_()
    y = (x * 2).sin()
    return x, y.exp().sum()
def gradient(x, loss):
    loss.backward()
    return torch.equal(x.grad, ((x * 2).sin().exp() * (x * 2).cos() * 2).detach())
config = Config(decisions="swap", swap_dir=sys.argv[1])
with MemoryBudget("1GiB", config) as budget:
    x, loss = step()
    child = os.fork()
if child == 0:
    with MemoryBudget("1GiB", config):
        right = gradient(*step())
    os._exit(0 if right else 1)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), gradient(x, loss))
"""
    assert output(script(code, tmp_path)) == "0 True"


# -- a second budget in another process, in the same directory


TRAINS = """
import sys, hashlib
from tests.faults.programs import forced, no_fault, run
shared = None
ours = run(no_fault, forced("swap", sys.argv[1]))
print(hashlib.sha256(repr(sorted(ours.observed.items())).encode()).hexdigest(), ours.raised)
"""


@pytest.mark.rest
def test_two_processes_share_a_swap_directory(tmp_path: Path) -> None:
    """Each has a file of its own: both train as if they were alone."""
    alone = output(script(TRAINS.replace('forced("swap", sys.argv[1])', ""), tmp_path))
    processes = [script(TRAINS, tmp_path) for _ in range(2)]
    assert [output(process) for process in processes] == [alone, alone]
    assert list(tmp_path.iterdir()) == []


@contextlib.contextmanager
def second_tier(loop: Loop) -> Iterator[None]:
    """While a step's buffers are away, somebody else swaps to the same directory."""
    session = loop.session
    if session is None:
        yield
        return

    def swap() -> None:
        tier = DiskTier(swap_dir=session.config.swap_dir)
        content = torch.full((2 << 20,), 255, dtype=torch.uint8).untyped_storage()
        tier.write(tier.reserve(content.nbytes()), content).wait()
        tier.close()

    loop.blocks[-1].in_forward = swap
    yield
    loop.blocks[-1].in_forward = None


def test_a_second_tier_in_the_directory_is_not_met(tmp_path: Path) -> None:
    """The same in one process, where the moment can be chosen."""
    assert complaints(run(second_tier), run(second_tier, forced("swap", tmp_path))) == []


def test_control_with_one_file_for_both_bits_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: a file with a name is shared, and spoilt."""
    monkeypatch.setattr(scratch, "open_nameless", lambda path: os.open(path / "one", os.O_RDWR | os.O_CREAT))
    monkeypatch.setattr(scratch, "probe", lambda *_: (1e9, 1e9))
    monkeypatch.setattr(os, "posix_fallocate", lambda *_: None)
    assert complaints(run(second_tier), run(second_tier, forced("swap", tmp_path))) != []


# -- sudden death


KILLED = """
import sys
from tests.faults.programs import forced, no_fault, run
prepare = None
print("ready", flush=True)
while True:
    run(no_fault, forced("swap", sys.argv[1]))
"""


def kill_at_random(code: str, directory: Path, num_kills: int) -> list[str]:
    """Kill a training process at random moments; return the names of the files that it left."""
    left: list[str] = []
    for seed in range(num_kills):
        process = script(code, directory)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        time.sleep(random.Random(seed).uniform(0, 0.4))
        process.kill()
        process.communicate(timeout=60)
        assert process.returncode == -signal.SIGKILL
        left += [entry.name for entry in directory.iterdir()]
    return left


@pytest.mark.parametrize("num_kills", keep([1, 3], [1]))
def test_a_killed_process_leaves_no_file(tmp_path: Path, num_kills: int) -> None:
    """SIGKILL while steps swap: the file never had a name."""
    assert kill_at_random(KILLED, tmp_path, num_kills) == []


@pytest.mark.rest
def test_control_a_named_file_stays_behind(tmp_path: Path) -> None:
    """The negative control: what has a name outlives its process."""
    code = KILLED.replace(
        "prepare = None",
        "import tempfile; from torchdelta.runtime.tiers import scratch; "
        "scratch.open_nameless = lambda directory: tempfile.mkstemp(dir=directory)[0]; "
        'run(no_fault, forced("swap", sys.argv[1]))',
    )
    assert kill_at_random(code, tmp_path, 1) != []


# -- limits that the kernel sets


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return what training without a budget prints."""
    return output(script(TRAINS.replace('forced("swap", sys.argv[1])', ""), tmp_path_factory.mktemp("unused")))


@pytest.mark.rest
def test_a_full_file_system_is_another_way(alone: str, tmp_path: Path) -> None:
    """A tmpfs of 64 KiB, in a mount namespace of the test's own: what does not fit is recomputed."""
    mount = f'mount -t tmpfs -o size=64k none {tmp_path} && exec "$@"'
    prefix = ("unshare", "-rm", "sh", "-c", mount, "sh")
    if subprocess.run([*prefix, "true"], check=False, capture_output=True).returncode:
        pytest.skip("this machine does not let the test mount a file system")
    assert output(script(TRAINS, tmp_path, prefix=prefix)) == alone


@pytest.mark.rest
def test_a_limit_on_the_size_of_files_is_another_way(alone: str, tmp_path: Path) -> None:
    """RLIMIT_FSIZE: the same."""
    limited = TRAINS.replace(
        "shared = None", "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (65536, 65536))"
    )
    assert output(script(limited, tmp_path)) == alone


@pytest.mark.rest
def test_control_without_the_handling_a_full_file_system_is_fatal(alone: str, tmp_path: Path) -> None:
    """The negative control: every step ends in the tier's error."""
    unhandled = TRAINS.replace(
        "shared = None",
        "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (65536, 65536)); "
        "import pytest; from tests.faults.switches import switch_off; switch_off('tier-full', pytest.MonkeyPatch())",
    )
    printed = output(script(unhandled, tmp_path))
    assert printed != alone
    assert "TierFullError" in printed


def test_report_is_comparable(tmp_path: Path) -> None:
    """What the processes print is what runs in this one print: the comparison is not of constants."""
    plain = run(no_fault)
    assert complaints(plain, run(no_fault, forced("swap", tmp_path))) == []
    assert plain.observed["losses"]
