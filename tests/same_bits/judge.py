"""Judge a training step inside a memory budget against the same step run plainly, bit for bit.

A step is a function of a *scope factory*: it builds what it trains from the seeds, opens `with scope():` wherever a
user would open `MemoryBudget`, and returns what can be observed afterwards. The judge runs it twice plainly (a step
that does not equal itself proves nothing) and then inside budgets that force a decision on every saved buffer, so that
whatever can leave memory does leave it. Everything is compared as bytes: NaN equals NaN, and -0.0 does not equal 0.0.
"""

from __future__ import annotations

import contextlib
import gc
import os
import random
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from tests.collector import leave_out
from torchdelta import BudgetError, Config, MemoryBudget
from torchdelta._torch.storages import address_of
from torchdelta._torch.tensors import is_zerotensor

if TYPE_CHECKING:
    from torchdelta import SavedBuffer

Scope = Callable[[], contextlib.AbstractContextManager[Any]]
Step = Callable[[Scope], Mapping[str, Any]]
Decisions = str | Callable[["SavedBuffer"], str]

SEED = 7
# What the steps run on: "cpu", "cuda", or "standin" (tests/accelerator). Steps that name a device keep theirs.
DEVICE = os.environ.get("TORCHDELTA_TEST_DEVICE", "cpu")
# Larger than any machine: the budget itself must never be the reason for a decision.
UNLIMITED = "1TiB"


def alternate(buffer: SavedBuffer) -> str:
    """Decide keep, swap and recompute in turn, so that each kind meets neighbours of the two others."""
    return ("keep", "swap", "recompute")[buffer.index % 3]


DECISIONS: dict[str, Decisions] = {"recompute": "recompute", "swap": "swap", "mixed": alternate}


@dataclass(frozen=True, kw_only=True, slots=True)
class Bits:
    """The content of one tensor, by dtype, shape and bytes."""

    dtype: str
    shape: tuple[int, ...]
    content: bytes

    def differing_bytes(self, other: Bits) -> str:
        """Say how two contents differ, for the message of a failed comparison."""
        if (self.dtype, self.shape) != (other.dtype, other.shape):
            return f"{self.dtype}{list(self.shape)} became {other.dtype}{list(other.shape)}"
        num_bytes = sum(a != b for a, b in zip(self.content, other.content, strict=True))
        return f"{num_bytes} of {len(self.content)} bytes of {self.dtype}{list(self.shape)}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What one run of a step left behind: its observations, or the exception that it raised."""

    observed: Mapping[str, Any] = field(default_factory=dict[str, Any])
    raised: type[BaseException] | None = None
    message: str = ""
    tracked_bytes: int = 0
    num_threads: int = 0


def bits_of(value: Any) -> Any:
    """Turn tensors inside nested containers into `Bits`, leaving other values as they are."""
    if isinstance(value, torch.Tensor):
        tensor = value.detach()
        if tensor.layout is torch.sparse_coo:
            # Uncoalesced on purpose: the order of the entries is part of what a user can see.
            return ("sparse", tuple(tensor.shape), bits_of(tensor._indices()), bits_of(tensor._values()))
        if tensor.layout is not torch.strided:
            return (str(tensor.layout), bits_of(tensor.to_dense()))
        if is_zerotensor(tensor):
            tensor = torch.zeros(tensor.shape, dtype=tensor.dtype, device="cpu")
        compact = tensor.resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
        flat = compact.reshape(-1).view(torch.uint8)
        return Bits(dtype=str(tensor.dtype), shape=tuple(tensor.shape), content=flat.cpu().numpy().tobytes())
    if isinstance(value, Mapping):
        return {key: bits_of(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return tuple(bits_of(item) for item in value)
    return value


def state_of(*modules: torch.nn.Module, **others: Any) -> dict[str, Any]:
    """Observe modules: every gradient, parameter and buffer by name, and whatever else is given."""
    observed: dict[str, Any] = dict(others)
    for index, module in enumerate(modules):
        for name, parameter in module.named_parameters():
            observed[f"{index}.grad.{name}"] = parameter.grad
            observed[f"{index}.parameter.{name}"] = parameter
        for name, buffer in module.named_buffers():
            observed[f"{index}.buffer.{name}"] = buffer
    return observed


def on_device() -> contextlib.AbstractContextManager[Any]:
    """Return a context in which factories make their tensors on the device that the steps run on."""
    return contextlib.nullcontext() if DEVICE == "cpu" else torch.device(DEVICE)


@contextlib.contextmanager
def comparable_conditions() -> Iterator[None]:
    """Run on one thread, and leave the objects of earlier imports out of the judge's many collections.

    `transformers` and the op database are about a million objects; the judge collects after each of its runs.
    """
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    if DEVICE == "cuda":
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False
    leave_out()
    yield
    torch.set_num_threads(num_threads)


def device_generators() -> tuple[torch.Generator, ...]:
    """Return the generators of the accelerators that the steps run on; none where they run on the CPU."""
    if DEVICE == "cuda":
        torch.cuda.init()  # before that there are no generators: the first run would not be seeded
    return () if DEVICE == "cpu" else tuple(torch.get_device_module(torch.device(DEVICE).type).default_generators)


def seed_everything(seed: int = SEED) -> None:
    """Seed the generators that models draw from; some of `transformers` masks with numpy and random."""
    torch.default_generator.manual_seed(seed)  # the CPU's alone: a tenth of the time of torch.manual_seed
    for generator in device_generators():
        generator.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002


def rng_states() -> dict[str, Any]:
    """Observe the state of every global generator."""
    name, keys, *rest = np.random.get_state()  # noqa: NPY002
    return {
        "rng.torch": torch.get_rng_state(),
        "rng.device": [generator.get_state() for generator in device_generators()],
        "rng.python": repr(random.getstate()),
        "rng.numpy": (name, keys.tobytes(), *rest),
    }


def tracked_bytes() -> int:
    """Count the bytes of all storages that a Python object reaches, after a collection."""
    gc.collect()
    size_bytes: dict[int, int] = {}
    for thing in gc.get_objects():
        if not issubclass(type(thing), torch.Tensor | torch.UntypedStorage):
            continue
        try:
            storage = thing.untyped_storage() if isinstance(thing, torch.Tensor) else thing
            size_bytes[address_of(storage)] = storage.nbytes()
        except (RuntimeError, NotImplementedError, ReferenceError):
            continue  # sparse, meta and half-dead tensors own no storage that could be counted
    return sum(size_bytes.values())


def run(step: Step, scope: Scope = contextlib.nullcontext) -> Outcome:
    """Run a step once from fixed seeds and observe everything that it left behind."""
    seed_everything()
    observed: dict[str, Any] = {}
    raised: type[BaseException] | None = None
    message = ""
    try:
        with on_device():
            observed = bits_of(step(scope))
        observed |= bits_of(rng_states())
    except Exception as error:  # noqa: BLE001 - the type is judged by the caller; the traceback must not outlive this line
        raised, message = type(error), f"{type(error).__name__}: {error}"
    return Outcome(
        observed=observed,
        raised=raised,
        message=message,
        tracked_bytes=tracked_bytes(),
        num_threads=threading.active_count(),
    )


def least_budget_from(step: Step, budget_bytes: int, config: Config) -> int:
    """Return a budget that a step fits in: the given one, or else what its error names, and a little more.

    What a model needs at least differs between devices: by the ops of their optimizers and the workspaces of libraries.
    """
    for _ in range(10):  # what an op takes inside itself is known once it has run
        found = run(step, lambda budget_bytes=budget_bytes: MemoryBudget(budget_bytes, config))
        if found.raised is not BudgetError:
            return budget_bytes
        named = re.search(r"\((\d+) bytes\)", found.message)
        assert named is not None, found.message
        budget_bytes = int(named[1]) * 103 // 100
    raise AssertionError(f"no budget that an error has named was enough; the last one was {budget_bytes} bytes")


def inside_budget(decisions: Decisions) -> Scope:
    """Make a scope factory whose budgets force `decisions` on every saved buffer."""
    return lambda: MemoryBudget(UNLIMITED, Config(decisions=decisions, tier="memory"))


def differences(expected: Outcome, actual: Outcome) -> list[str]:
    """Name everything in which two outcomes differ, bytes leaked included."""
    if expected.raised is not None or actual.raised is not None:
        if expected.raised and actual.raised and issubclass(actual.raised, expected.raised):
            return leaks(expected, actual)
        return [f"raised {actual.message or 'nothing'} where plain raised {expected.message or 'nothing'}"]
    found = [f"{name} is missing" for name in expected.observed.keys() - actual.observed.keys()]
    found += [f"{name} is new" for name in actual.observed.keys() - expected.observed.keys()]
    for name in expected.observed.keys() & actual.observed.keys():
        plain, ours = expected.observed[name], actual.observed[name]
        if plain == ours:
            continue
        both = isinstance(plain, Bits) and isinstance(ours, Bits)
        found.append(f"{name}: {plain.differing_bytes(ours)}" if both else f"{name} differs")
    return sorted(found) + leaks(expected, actual)


def leaks(expected: Outcome, actual: Outcome) -> list[str]:
    """Name what an outcome holds more than another: tensor bytes and threads."""
    found: list[str] = []
    if actual.tracked_bytes > expected.tracked_bytes:
        found.append(f"{actual.tracked_bytes - expected.tracked_bytes} tracked bytes leaked")
    if actual.num_threads > expected.num_threads:
        found.append(f"{actual.num_threads - expected.num_threads} threads leaked")
    return found


def plain_outcome(step: Step) -> Outcome:
    """Run a step plainly, twice; it must equal itself, and the second run is what ours is compared with."""
    first, second = run(step), run(step)
    # Only contents: a first run may fill caches of torch itself.
    found = [difference for difference in differences(first, second) if not difference.endswith("leaked")]
    assert not found, f"the plain step does not equal itself: {found}"
    return second


def judge(step: Step, decisions: Decisions, plain: Outcome | None = None) -> list[str]:
    """Name everything in which a step inside a budget differs from the plain step.

    A cache that fills once is no leak: what grew in the first run must not grow again in a second one.
    """
    plain = plain or plain_outcome(step)
    actual = run(step, inside_budget(decisions))
    if leaks(plain, actual):
        again = run(step, inside_budget(decisions))
        return [d for d in differences(plain, actual) if not d.endswith("leaked")] + leaks(actual, again)
    return differences(plain, actual)


def assert_same_bits(step: Step, *names: str) -> None:
    """Assert that a step finishes, and leaves the same bits and no garbage, under each named kind of decisions."""
    plain = plain_outcome(step)
    if DEVICE != "cpu" and plain.raised in (NotImplementedError, RuntimeError, TypeError, UserWarning):
        pytest.skip(f"plain torch cannot do this on {DEVICE}: {plain.message[:200]}")
    assert plain.raised is None, f"the plain step raised {plain.message}"
    verdicts = {name: judge(step, DECISIONS[name], plain) for name in names or DECISIONS}
    assert not any(verdicts.values()), f"not the plain run's bits: { {n: v[:8] for n, v in verdicts.items() if v} }"


def assert_same_error(step: Step, error: type[BaseException], *names: str) -> None:
    """Assert that plain raises `error` and that each named kind of decisions raises the same type, leaking nothing."""
    plain = plain_outcome(step)
    assert plain.raised is not None, "the plain step raised nothing"
    assert issubclass(plain.raised, error), f"the plain step raised {plain.message}"
    verdicts = {name: judge(step, DECISIONS[name], plain) for name in names or DECISIONS}
    assert not any(verdicts.values()), f"not the plain run's error: { {n: v for n, v in verdicts.items() if v} }"
