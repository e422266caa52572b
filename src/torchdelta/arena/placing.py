"""The arena of a session: it records steps, has their allocations placed, and passes the places to the allocator.

[Note: placing in another process]
The solvers of torchdelta.pool are compiled by numba, which takes some 120 MiB: more than an arena saves on a small
model. So a helper process places. It is started when the first recording is foreseen, one step before it is complete,
and ended when there was nothing to place for a while. If a helper fails, or neither reads nor answers for long, the
planning ends: steps with a plan keep it, others allocate without an arena.
"""

from __future__ import annotations

import array
import contextlib
import logging
import os
import selectors
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import IO, TYPE_CHECKING, Final

from torchdelta.arena.caching import Caching
from torchdelta.arena.region import Region
from torchdelta.errors import NativeError, PoolError
from torchdelta.native.arena import new_arena
from torchdelta.notices import warn_once

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from torchdelta.config import Config
    from torchdelta.native.arena import Arena
    from torchdelta.trace.model import Trace

__all__ = ["Placing", "arena_for", "open_arena"]

_ALIGNMENT_BYTES: Final = 64  # c10's
_OUTSIDE: Final = -1
_FORESEEN, _READY = 1, 2
IDLE_STEPS: Final = 32  # the helper ends after this many steps without a recording
ANSWER_TIME_S: Final = 300.0  # from request to answer; the first one may have to compile
_CHUNK_BYTES: Final = 1 << 16
COMMAND: Final = (sys.executable, "-m", "torchdelta.pool.helper")

_logger = logging.getLogger("torchdelta")


def open_arena(
    config: Config, device: torch.device, *, trace: Callable[[], Trace | None], room_bytes: Callable[[], int]
) -> Placing | Region | Caching:
    """Return what places a session's allocations: an arena if the options ask for one, else on CPU a caching allocator.

    An arena plans addresses on CPU, and is one segment on CUDA.
    `trace` gives the trace of the first step, None until it is complete; `room_bytes` what the budget leaves now.
    """
    if config.arena and device.type == "cuda":
        return Region(device, trace=trace, room_bytes=room_bytes)
    is_counted = config.count_allocations and config.decisions is None
    if config.caching_allocator and is_counted and not config.arena and device.type == "cpu":
        return Caching()
    return Placing(arena_for(config, device))


def arena_for(config: Config, device: torch.device) -> Arena | None:
    """Return the CPU arena if the options ask for one; None, with a warning, if it is not available."""
    if not config.arena:
        return None
    if device.type != "cpu":
        warn_once(f"no arena: it does not support {device.type}; memory is allocated without it")
        return None
    arena = new_arena()
    if isinstance(arena, NativeError):
        warn_once(f"no arena ({arena}): memory is allocated without it")
        return None
    return arena


class Placing:
    """The arena of one session with its helper process. Without an arena it does nothing. Mutable."""

    def __init__(self, arena: Arena | None) -> None:
        self.arena = arena
        self.helper: subprocess.Popen[bytes] | None = None  # runs only while it may be needed
        self._complaints: IO[bytes] | None = None  # the helper's standard error
        self._num_idle_steps = 0
        self._is_on = False
        self._is_given_up = False

    def start(self) -> None:
        """Place the allocations of this thread from now on."""
        if self.arena is not None:
            self.arena.start()
            self._is_on = True

    def stop(self) -> None:
        """Stop placing."""
        if self.arena is not None:
            if self._is_on:
                figures = self.arena.figures()
                _logger.info("arena: %(num_planned_steps)d of %(num_steps)d steps had planned addresses", figures)
            self._is_on = False
            self.arena.stop()
            self._end_helper()

    def leave_child(self) -> None:
        """Do not use the helper in a forked child: it belongs to the parent."""
        if self.helper is not None:
            self.helper.returncode = 0  # do not wait for it here
        self._is_given_up = True

    def on_step_end(self) -> None:
        """Plan the recordings that are complete."""
        if self.arena is None or not self._is_on:
            return
        status = self.arena.cut()
        if self._is_given_up:
            while status == _READY and self.arena.recording() is not None:
                pass  # discard it, or recordings would accumulate
            return
        try:
            if status == _READY:
                self._num_idle_steps = 0
                self._plan_recordings(self.arena)
            elif status == _FORESEEN:
                self._num_idle_steps = 0
                self.start_helper()
            elif self.helper is not None:
                self._num_idle_steps += 1
                if self._num_idle_steps >= IDLE_STEPS:
                    self._end_helper()
        except (OSError, PoolError, ValueError) as error:  # ValueError: the answer is malformed
            self._is_given_up = True
            warn_once(f"the arena stops planning steps: {error}")
            self._end_helper()
        except BaseException:  # an interrupt: the helper's next answer would belong to another request
            self._end_helper()
            raise

    def _plan_recordings(self, arena: Arena) -> None:
        while (recording := arena.recording()) is not None:
            sizes, ends = (array.array("q", values) for values in recording)
            placed = [index for index, end in enumerate(ends) if end != _OUTSIDE]
            offsets = array.array("q", [_OUTSIDE]) * len(sizes)
            if placed:
                answer = self.ask([sizes[index] for index in placed], placed, [ends[i] for i in placed], len(sizes))
                for index, offset in zip(placed, answer, strict=True):
                    offsets[index] = offset
            arena.plan(offsets.tobytes())

    def ask(self, sizes: list[int], starts: list[int], ends: list[int], num_moments: int) -> array.array[int]:
        """Have the helper place allocations of these bytes, alive between these moments. Return their offsets.

        Raises:
            PoolError: The helper has failed, or gave no answer in time.
        """
        helper = self.start_helper()
        request = f"{len(sizes)} {num_moments} {_ALIGNMENT_BYTES}\n".encode()
        request += array.array("q", [*sizes, *starts, *ends]).tobytes()
        line, _, offsets_bytes = _exchange(helper, request, 8 * len(sizes)).partition(b"\n")
        head = line.decode()
        if head and not head.startswith("ok "):
            raise PoolError(f"its helper process answered: {head.strip()}")
        if len(offsets_bytes) < 8 * len(sizes):
            raise PoolError(f"its helper process has ended{self._last_complaint()}")
        answer = array.array("q", offsets_bytes)
        footprint_bytes, lower_bound_bytes = map(int, head.split()[1:])
        _logger.debug(
            "arena: %d of %d allocations of a step placed in %d bytes, %.2f %% above the lower bound",
            len(sizes),
            num_moments,
            footprint_bytes,
            100 * (footprint_bytes / max(1, lower_bound_bytes) - 1),
        )
        return answer

    def start_helper(self) -> subprocess.Popen[bytes]:
        """Return the helper process; start it if there is none."""
        if self.helper is None:
            paths = [str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
            # Safe path: do not import modules from the working directory of the program.
            environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "PYTHONSAFEPATH": "1"}
            # A file, not a pipe: it is read only after the helper has ended.
            self._complaints = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the helper
            self.helper = subprocess.Popen(  # noqa: S603 - our own module
                COMMAND,
                bufsize=0,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._complaints,
                start_new_session=True,  # a Ctrl-C at the terminal must not reach it
            )
        return self.helper

    def _last_complaint(self) -> str:
        if self._complaints is None:
            return ""
        size_bytes = os.fstat(self._complaints.fileno()).st_size
        # The helper shares the file position, so do not move it.
        tail = os.pread(self._complaints.fileno(), _CHUNK_BYTES, max(0, size_bytes - _CHUNK_BYTES))
        lines = tail.decode(errors="replace").split("\n")
        return next((f": {line.strip()}" for line in reversed(lines) if line.strip()), "")

    def _end_helper(self) -> None:
        helper, self.helper = self.helper, None
        complaints, self._complaints = self._complaints, None
        if complaints is not None:
            complaints.close()
        if helper is not None:
            helper.kill()
            for pipe in (helper.stdin, helper.stdout):
                with contextlib.suppress(OSError):
                    if pipe is not None:
                        pipe.close()
            helper.wait()


def _exchange(helper: subprocess.Popen[bytes], request: bytes, length_bytes: int) -> bytes:
    """Send a request. Return the answer: a line and, if it says ok, `length_bytes` bytes; less if the helper ends.

    Raises:
        PoolError: The helper did not read the request, or did not answer, in time.
    """
    assert helper.stdin is not None
    assert helper.stdout is not None
    deadline_s = time.monotonic() + ANSWER_TIME_S
    rest = memoryview(request)
    answer = bytearray()
    os.set_blocking(helper.stdin.fileno(), False)
    with selectors.DefaultSelector() as selector:
        selector.register(helper.stdin, selectors.EVENT_WRITE)
        selector.register(helper.stdout, selectors.EVENT_READ)
        while True:
            ready = [key.fileobj for key, _ in selector.select(max(0.0, deadline_s - time.monotonic()))]
            if helper.stdin in ready:
                try:
                    rest = rest[os.write(helper.stdin.fileno(), rest[:_CHUNK_BYTES]) :]
                except BrokenPipeError:
                    rest = rest[:0]  # the helper has ended; its last output tells why
                if not rest:
                    selector.unregister(helper.stdin)
            if helper.stdout in ready:
                said = os.read(helper.stdout.fileno(), _CHUNK_BYTES)
                answer += said
                line, newline, offsets_bytes = answer.partition(b"\n")
                if not said or (newline and (not line.startswith(b"ok ") or len(offsets_bytes) >= length_bytes)):
                    return bytes(answer)
            if time.monotonic() >= deadline_s:
                raise PoolError(f"its helper process gave no answer within {ANSWER_TIME_S:.0f} s")
