"""One of the two processes of the soak: `python -m benchmarks.worker soak.trainer:run seed=0 seconds=60 plain=false`.

It prints one JSON object a line: a record of each step, and one of each episode. Nothing is remembered here: what a
long run keeps would hide what leaks.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import io
import json
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, Literal

import torch

from benchmarks import bits
from benchmarks.held import count_held, live_storages
from benchmarks.models import seed_everything
from benchmarks.soak import faults, schedule, subjects
from torchdelta import Config, MemoryBudget
from torchdelta.errors import TierError

DecisionClass = Literal["saved", "all"]
_MEMORY_EVENT = "[memory]"
_METER_TOLERANCE = 0.01
_KEPT_FOR_STEPS = 2
PLAN_WAIT_S = 60.0
_TYPES_EVERY = 4
PERSISTENT_SHARE = 0.6  # in the class *all*: of a subject's parameters and states, what the budget holds beside a step


class Trainer:
    """Trains the subjects as the schedule says."""

    def __init__(
        self,
        seed: int,
        swap_dir: str,
        planner: str | None = None,
        decision_class: DecisionClass = "saved",
        *,
        plain: bool,
    ) -> None:
        self.seed = seed
        self.planner = planner
        self.decision_class: DecisionClass = decision_class
        self.plain = plain
        self.swap_dir = swap_dir
        self.measured = {} if plain else {name: self._measure(name) for name in schedule.MODELS}
        self.subjects = {name: subjects.build(name, seed) for name in schedule.MODELS}
        self.peak_is_tainted = False
        self.kept: list[tuple[int, torch.Tensor]] = []  # graphs that live on, and until which step

    def _measure(self, name: str) -> tuple[int, int]:
        """Return what the largest batch takes above a subject at rest, and what all subjects have at rest."""
        subject = subjects.build(name, self.seed)
        with MemoryBudget("1TiB") as budget:
            for _ in range(2):
                subject.loss(*subjects.LARGEST).backward()
                subject.optimizer.step()
                subject.optimizer.zero_grad()
        everything = [subjects.build(each, self.seed) for each in schedule.MODELS]
        return (
            budget.summary().steps[-1].peak_bytes - resting_bytes(subject),
            sum(resting_bytes(each) for each in everything),
        )

    def _budget_bytes(self, episode: schedule.Episode) -> int:
        step_bytes, rest_bytes = self.measured[episode.model]
        if self.decision_class == "all":
            rest_bytes -= int((1 - PERSISTENT_SHARE) * resting_bytes(self.subjects[episode.model]))
        return rest_bytes + int(episode.share * step_bytes)

    def run(self, seconds: float, least_episodes: int) -> int:
        """Train until the time is over, at the end of an episode, and for so many at least. Return how many."""
        end_s = time.monotonic() + seconds
        index = first_step = 0
        while time.monotonic() < end_s or index < least_episodes:
            episode = schedule.draw(self.seed, index, first_step)
            self._run_episode(episode)
            index += 1
            first_step += len(episode.steps)
        return index

    def _run_episode(self, episode: schedule.Episode) -> None:
        subject = self.subjects[episode.model]
        scope: Any = contextlib.nullcontext()
        if not self.plain:
            config = Config(
                policy=episode.policy,
                planner=self.planner,
                tier=episode.tier,
                swap_dir=self.swap_dir,
                decision_class=self.decision_class,
            )
            scope = MemoryBudget(self._budget_bytes(episode), config)
        if not episode.collects:
            gc.disable()
        met: set[Any] = set()
        num_evictions_bytes = num_followed = num_diverged = 0
        self.peak_is_tainted = False
        with scope as budget:
            for step in episode.steps:
                self._run_step(subject, step, budget, met)
                if self.planner is not None and budget is not None:
                    # A step lasts less than planning it: without waiting, few would be followed.
                    budget._session.programs.wait(PLAN_WAIT_S)
            self.kept.clear()
            if budget is not None:
                summary = budget.summary()
                num_evictions_bytes = summary.swapped_out_bytes + summary.recomputed_bytes
                if summary.follow is not None:
                    num_followed, num_diverged = summary.follow.num_followed_steps, summary.follow.num_diverged_steps
        gc.enable()
        record: dict[str, Any] = {
            "kind": "episode",
            "index": episode.index,
            "model": episode.model,
            "policy": episode.policy,
            "tier": episode.tier,
            "share": episode.share,
            "evicted_bytes": num_evictions_bytes,
            "num_followed_steps": num_followed,
            "num_diverged_steps": num_diverged,
            "state": self._state_digest(subject),
            "num_swap_files": len(list(Path(self.swap_dir).iterdir())),
            "num_native_threads": _num_native_threads(),
        }
        del scope, budget
        give_back_pages()
        held = count_held()
        types = held.pop("types")
        record.update(held)
        if episode.index % _TYPES_EVERY == 0:
            record["types"] = types
        say(record)

    def _run_step(self, subject: subjects.Subject, step: schedule.Step, budget: Any, met: set[Any]) -> None:
        session = budget._session if budget is not None else None
        record: dict[str, Any] = {"kind": "step", "index": step.index, "fault": step.fault}
        shapes = {*step.shapes, *(("evaluation", step.shapes[0]) for _ in range(step.evaluates))}
        # What ops take inside themselves is learned when their shapes are first met.
        is_known = shapes <= met and step.fault != "batch too large" and not self.peak_is_tainted
        may_be_lost = session is not None and step.fault in schedule.OWN_FAULTS
        earlier = Earlier(subject, is_whole=self.decision_class == "all") if may_be_lost else None
        num_steps_before = len(budget.summary().steps) if budget is not None else 0
        lost: list[str] = []
        observed: dict[str, Any] = {}
        released = self._release(step)
        if step.fault == "batch too large" and earlier is not None:
            lost.append(self._try_too_large(subject, step))
            earlier.put_back()
        for attempt in range(3):
            meter = Meter(is_on=step.is_metered and is_known and session is not None and not self.kept)
            injected = faults.own(step, session) if session is not None and attempt == 0 else contextlib.nullcontext()
            try:
                with injected, meter:
                    observed = self._train(subject, step)
                break
            except (TierError, RuntimeError) as error:
                if step.fault not in schedule.OWN_FAULTS or not (
                    isinstance(error, TierError) or faults.is_out_of_memory(error)
                ):
                    record["unexpected"] = f"{type(error).__name__}: {error}"
                lost.append(type(error).__name__)
            if earlier is not None:
                earlier.put_back()
        if observed and not observed["raised"] and "backward" not in step.fault:
            # What lives on has not been through its backward.
            met |= shapes - {step.shapes[0]} if step.fault == "graph kept alive" else shapes
        if session is not None:
            steps = budget.summary().steps[num_steps_before:]
            # The peak of a step that was given up counts in the next one.
            self.peak_is_tainted = not steps and not is_known
            record |= {
                "lost": lost,
                "is_known": is_known,
                "peak_bytes": max((part.peak_bytes for part in steps), default=0),
                "budget_bytes": budget.budget_bytes,
                "metered_peak_bytes": meter.peak_bytes,
                # After an error in a backward torch itself keeps a part of the graph until the next one.
                "num_handles": 0 if self.kept or step.fault else session.ledger.num_handles,
                "counted_bytes": session.ledger.usage.live_bytes,
            }
        say(record | {"bits": observed | {"released": released}})

    @staticmethod
    def _try_too_large(subject: subjects.Subject, step: schedule.Step) -> str:
        """Try a batch that cannot fit. Returns what came of it.

        While recording pauses, an allocation beyond the budget is refused with torch's own error.
        """
        seed_everything(step.index)
        try:
            subject.loss(*subjects.TOO_LARGE).backward()
        except torch.OutOfMemoryError as error:
            return type(error).__name__
        return "fits"

    def _train(self, subject: subjects.Subject, step: schedule.Step) -> dict[str, Any]:
        """Run one step, and return what anybody could see of it."""
        seed_everything(step.index)
        observed: dict[str, Any] = {"losses": [], "raised": []}
        if step.evaluates:
            subject.model.eval()
            with torch.no_grad():
                observed["evaluation"] = subject.loss(*step.shapes[0]).item().hex()
            subject.model.train()
        try:
            with faults.shared(step, subject):
                self._run_passes(subject, step, observed)
                observed["gradients"] = bits.gradients_digest(subject.model)
                subject.optimizer.step()
        except (faults.InjectedError, KeyboardInterrupt) as error:
            observed["raised"].append(type(error).__name__)
            observed["gradients"] = bits.gradients_digest(subject.model)
        subject.optimizer.zero_grad()
        observed["generator"] = bits.random_state_digest()
        return observed

    def _run_passes(self, subject: subjects.Subject, step: schedule.Step, observed: dict[str, Any]) -> None:
        """Run forward and backward of each micro-batch, in whatever order the fault demands."""
        waiting: list[torch.Tensor] = []
        for position, shape in enumerate(step.shapes):
            loss = subject.loss(*shape) / len(step.shapes)
            observed["losses"].append(loss.item().hex())
            if position == 0 and step.fault == "graph kept alive":
                self.kept.append((step.index + _KEPT_FOR_STEPS, loss))
            elif step.fault == "backwards out of order":
                waiting.append(loss)
            elif position or step.fault != "backward never called":
                loss.backward()
            del loss
        while waiting:
            waiting.pop(0).backward()

    def _release(self, step: schedule.Step) -> list[str]:
        """Call the backward of graphs that have lived on: their parameters have been stepped since.

        Returns what came of each.
        """
        raised: list[str] = []
        while self.kept and self.kept[0][0] <= step.index:
            _, loss = self.kept.pop(0)
            try:
                loss.backward()
                raised.append("nothing")
            except RuntimeError as error:
                raised.append(type(error).__name__)
            for subject in self.subjects.values():
                subject.optimizer.zero_grad()
        return raised

    @staticmethod
    def _state_digest(subject: subjects.Subject) -> str:
        states = [
            (f"{index}.{name}", value)
            for index, state in enumerate(subject.optimizer.state.values())
            for name, value in sorted(state.items())
            if isinstance(value, torch.Tensor)
        ]
        return bits.digest([*subject.model.named_parameters(), *subject.model.named_buffers(), *states])


class Earlier:
    """What a subject was before a step that may be lost.

    Args:
        subject: It.
        is_whole: Whether parameters and states count: in the class *all*, a tier may fail between two updates.
    """

    def __init__(self, subject: subjects.Subject, *, is_whole: bool) -> None:
        self._subject = subject
        self._is_whole = is_whole
        self._with_state = set(subject.optimizer.state)
        self._contents = io.BytesIO()  # no tensors: they would take room in the budget
        torch.save(self._tensors(), self._contents)

    def _tensors(self) -> list[torch.Tensor]:
        model, optimizer = self._subject.model, self._subject.optimizer
        if not self._is_whole:
            return list(model.buffers())
        states = [value for state in optimizer.state.values() for value in state.values()]
        return [*model.buffers(), *model.parameters(), *(value for value in states if isinstance(value, torch.Tensor))]

    def put_back(self) -> None:
        """Undo what the step left behind."""
        optimizer = self._subject.optimizer
        optimizer.zero_grad()
        if self._is_whole:
            for parameter in set(optimizer.state) - self._with_state:
                del optimizer.state[parameter]
        self._contents.seek(0)
        with torch.no_grad():
            for tensor, content in zip(self._tensors(), torch.load(self._contents), strict=True):
                tensor.copy_(content)


def resting_bytes(subject: subjects.Subject) -> int:
    """Return the bytes of a subject between steps, with its optimizer's states."""
    size_bytes = sum(tensor.nbytes for tensor in (*subject.model.parameters(), *subject.model.buffers()))
    num_states = 1 if isinstance(subject.optimizer, torch.optim.SGD) else 2
    return size_bytes + num_states * sum(parameter.nbytes for parameter in subject.model.parameters())


class Meter:
    """The peak of one step from the profiler's memory events, above the storages that lived at its start."""

    def __init__(self, *, is_on: bool) -> None:
        self.is_on = is_on
        self.peak_bytes: int | None = None
        self._start_bytes = 0
        self._profiler: Any = None

    def __enter__(self) -> None:
        """Begin."""
        if self.is_on:
            gc.collect()
            self._start_bytes = sum(live_storages().values())
            self._profiler = torch.autograd.profiler.profile(profile_memory=True)
            self._profiler.__enter__()

    def __exit__(self, *exc: object) -> None:
        """Add up."""
        profiler, self._profiler = self._profiler, None
        if profiler is None:
            return
        profiler.__exit__(None, None, None)
        live_bytes = peak_bytes = self._start_bytes
        for event in profiler.kineto_results.events():
            if event.name() == _MEMORY_EVENT and event.device_type().name == "CPU":
                live_bytes += event.nbytes()
                peak_bytes = max(peak_bytes, live_bytes)
        known_bytes = sum(live_storages().values())
        # What another thread frees (a tier's, say) the profiler does not see: then its figure says nothing.
        if abs(live_bytes - known_bytes) <= _METER_TOLERANCE * known_bytes:
            self.peak_bytes = peak_bytes


def give_back_pages() -> None:
    """Let the C library return what it has kept of freed memory, so that resident pages tell what is held."""
    with contextlib.suppress(OSError, AttributeError):
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)


def _num_native_threads() -> int:
    """Return the threads of the process; one that has just ended is the kernel's for a moment more."""
    return min(_sample_native_threads(pause_s) for pause_s in (0.0, 0.01, 0.1))


def _sample_native_threads(pause_s: float) -> int:
    time.sleep(pause_s)
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith("Threads:"):
            return int(line.split()[1])
    return threading.active_count()


def say(record: dict[str, Any]) -> None:
    """Print one record."""
    print(json.dumps(record), flush=True)


def run(
    seed: int,
    seconds: float,
    planner: str | None = None,
    least_episodes: int = 0,
    decision_class: DecisionClass = "saved",
    *,
    plain: bool,
) -> dict[str, Any]:
    """Train, with budgets or plainly. The returned record is the last one."""
    with tempfile.TemporaryDirectory(prefix="torchdelta-soak-") as swap_dir:
        trainer = Trainer(seed, swap_dir, planner, decision_class, plain=plain)
        return {"kind": "end", "num_episodes": trainer.run(seconds, least_episodes)}
