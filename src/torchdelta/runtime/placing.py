"""The arena of a session: it learns the steps, has them placed, and gives the places to the allocator.

[Note: placing in another process]
The solvers of torchdelta.pool are compiled by numba, and what numba takes (some 120 MiB) is more than an arena saves on
a small model. So a helper process places; it is started when the first recording is foreseen, which is a step before
it is complete, and ended when there was nothing to place for a while. A helper that fails, or that neither reads nor
answers for long, ends the planning: steps with a plan keep it, others allocate as ever.
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

from torchdelta.errors import NativeError, PoolError
from torchdelta.native.arena import new_arena
from torchdelta.runtime.notices import say_once
from torchdelta.runtime.region import Region

if TYPE_CHECKING:
    import torch

    from torchdelta.config import Config
    from torchdelta.native.arena import Arena
    from torchdelta.runtime.session import Session

__all__ = ["Placing", "arena_for", "open_arena"]

_ALIGNMENT_BYTES: Final = 64  # c10's
_OUTSIDE: Final = -1
_FORESEEN, _READY = 1, 2
_IDLE_STEPS: Final = 32  # after so many the helper ends
_ANSWER_TIME_S: Final = 300.0  # from question to answer; the first one may have to compile
_CHUNK_BYTES: Final = 1 << 16
_COMMAND: Final = (sys.executable, "-m", "torchdelta.pool.helper")

_logger = logging.getLogger("torchdelta")


def open_arena(session: Session) -> Placing | Region:
    """Return what the option `arena` means on the session's device: planned addresses on CPU, one segment on CUDA."""
    ledger = session.ledger
    if session.config.arena and ledger.device.type == "cuda":

        def room_bytes() -> int:
            return max(0, session.budget_bytes - ledger.total_bytes)

        return Region(ledger.device, trace=session.trace, room_bytes=room_bytes)
    return Placing(arena_for(session.config, ledger.device))


def arena_for(config: Config, device: torch.device) -> Arena | None:
    """Return the arena that the options ask for; None where they do not, and with a warning where it cannot be had."""
    if not config.arena:
        return None
    if device.type != "cpu":
        say_once(f"no arena: allocations on {device.type} are left as they are")
        return None
    arena = new_arena()
    if isinstance(arena, NativeError):
        say_once(f"no arena ({arena}): memory is allocated as ever")
        return None
    return arena


class Placing:
    """The arena of one session with its helper process. Without an arena it does nothing. Mutable."""

    def __init__(self, arena: Arena | None) -> None:
        self.arena = arena
        self._helper: subprocess.Popen[bytes] | None = None
        self._complaints: IO[bytes] | None = None  # the helper's standard error
        self._num_idle_steps = 0
        self._is_on = False
        self._is_given_up = False

    def start(self) -> None:
        """Place what this thread allocates."""
        if self.arena is not None:
            self.arena.start()
            self._is_on = True

    def stop(self) -> None:
        """Place nothing more."""
        if self.arena is not None:
            if self._is_on:
                figures = self.arena.figures()
                _logger.info("arena: %(num_planned_steps)d of %(num_steps)d steps had planned addresses", figures)
            self._is_on = False
            self.arena.stop()
            self._end_helper()

    def leave_child(self) -> None:
        """Leave the helper alone in a forked child: it is the parent's."""
        if self._helper is not None:
            self._helper.returncode = 0  # not to be waited for here
        self._is_given_up = True

    def on_step_end(self) -> None:
        """Have planned what can be planned now."""
        if self.arena is None or not self._is_on:
            return
        status = self.arena.cut()
        if self._is_given_up:
            while status == _READY and self.arena.recording() is not None:
                pass  # else those that wait to be planned would be more and more
            return
        try:
            if status == _READY:
                self._num_idle_steps = 0
                self._plan_recordings(self.arena)
            elif status == _FORESEEN:
                self._num_idle_steps = 0
                self._start_helper()
            elif self._helper is not None:
                self._num_idle_steps += 1
                if self._num_idle_steps >= _IDLE_STEPS:
                    self._end_helper()
        except (OSError, PoolError, ValueError) as error:  # the last one: an answer that is none
            self._is_given_up = True
            say_once(f"the arena plans no more steps: {error}")
            self._end_helper()
        except BaseException:  # an interrupt: what the helper says next would be the answer to something else
            self._end_helper()
            raise

    def _plan_recordings(self, arena: Arena) -> None:
        while (recording := arena.recording()) is not None:
            sizes, ends = (array.array("q", values) for values in recording)
            placed = [index for index, end in enumerate(ends) if end != _OUTSIDE]
            offsets = array.array("q", [_OUTSIDE]) * len(sizes)
            if placed:
                answer = self._ask([sizes[index] for index in placed], placed, [ends[i] for i in placed], len(sizes))
                for index, offset in zip(placed, answer, strict=True):
                    offsets[index] = offset
            arena.plan(offsets.tobytes())

    def _ask(self, sizes: list[int], starts: list[int], ends: list[int], num_moments: int) -> array.array[int]:
        helper = self._start_helper()
        request = f"{len(sizes)} {num_moments} {_ALIGNMENT_BYTES}\n".encode()
        request += array.array("q", [*sizes, *starts, *ends]).tobytes()
        line, _, offsets_bytes = _exchange(helper, request, 8 * len(sizes)).partition(b"\n")
        head = line.decode()
        if head and not head.startswith("ok "):
            raise PoolError(f"its helper process said: {head.strip()}")
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

    def _start_helper(self) -> subprocess.Popen[bytes]:
        if self._helper is None:
            paths = [str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
            # Safe path: the directory that the program runs in may have anything in it.
            environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "PYTHONSAFEPATH": "1"}
            # No pipe: nobody reads it while the helper lives.
            self._complaints = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the helper
            self._helper = subprocess.Popen(  # noqa: S603 - our own module
                _COMMAND,
                bufsize=0,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._complaints,
                start_new_session=True,  # a Ctrl-C at the terminal is not meant for it
            )
        return self._helper

    def _last_complaint(self) -> str:
        if self._complaints is None:
            return ""
        size_bytes = os.fstat(self._complaints.fileno()).st_size
        # The position in the file is shared with the helper, and stays where it is.
        tail = os.pread(self._complaints.fileno(), _CHUNK_BYTES, max(0, size_bytes - _CHUNK_BYTES))
        lines = tail.decode(errors="replace").split("\n")
        return next((f": {line.strip()}" for line in reversed(lines) if line.strip()), "")

    def _end_helper(self) -> None:
        helper, self._helper = self._helper, None
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
    """Send a request. Return what comes back: a line, and after one of success so many bytes; less from one that ends.

    Raises:
        PoolError: The helper took no request or gave no answer for too long. It may hang at either.
    """
    assert helper.stdin is not None
    assert helper.stdout is not None
    deadline_s = time.monotonic() + _ANSWER_TIME_S
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
                    rest = rest[:0]  # what it said before it ended tells why
                if not rest:
                    selector.unregister(helper.stdin)
            if helper.stdout in ready:
                said = os.read(helper.stdout.fileno(), _CHUNK_BYTES)
                answer += said
                line, newline, offsets_bytes = answer.partition(b"\n")
                if not said or (newline and (not line.startswith(b"ok ") or len(offsets_bytes) >= length_bytes)):
                    return bytes(answer)
            if time.monotonic() >= deadline_s:
                raise PoolError(f"its helper process gave no answer within {_ANSWER_TIME_S:.0f} s")
