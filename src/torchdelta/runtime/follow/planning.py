"""Has steps planned by a helper process while the training goes on (`planners/helper.py`).

The helper is started with the first request, answers one request at a time, and is ended when it has been idle for a
number of steps. If it fails, or does not answer for a long time, no further step is planned, and the training goes on
without new plans.

Traces and plans are files of one directory. This process removes it when it ends the helper; if this process is killed,
the helper removes it.
"""

from __future__ import annotations

import collections
import contextlib
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from torchdelta.errors import PlanError
from torchdelta.plan.file import read_plan
from torchdelta.plan.request import Answer, Request
from torchdelta.trace.file import write_trace

if TYPE_CHECKING:
    from torchdelta.config import Config
    from torchdelta.machine.model import Machine
    from torchdelta.plan.model import Plan
    from torchdelta.trace.model import Trace

__all__ = ["Planned", "Planning"]

COMMAND: Final = (sys.executable, "-m", "torchdelta.planners.helper")  # and the directory
IDLE_STEPS: Final = 64
ANSWER_TIME_S: Final = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """The answer to one request: a plan with its predictions, or an error.

    Attributes:
        key: What the request was made for.
        plan: The plan; None if there is none.
        answer: What it is predicted to cost, or why there is none.
    """

    key: Any
    plan: Plan | None
    answer: Answer


class Planning:
    """The requests of one session. Mutable."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.is_given_up = False
        self._waiting: collections.deque[tuple[Any, Request]] = collections.deque()  # the first is being answered
        self._helper: subprocess.Popen[bytes] | None = None
        self._directory: Path | None = None
        self._num_asked = 0
        self._output = b""
        self._asked_at_s = 0.0
        self._num_idle_steps = 0

    def __len__(self) -> int:
        """Return how many requests have no answer yet."""
        return len(self._waiting)

    def ask(self, key: Any, trace: Trace, machine: Machine, budget_bytes: int) -> None:
        """Have a step planned.

        Args:
            key: Returned with the answer.
            trace: The step.
            machine: Whose links are used.
            budget_bytes: The most bytes on the device.
        """
        if self.is_given_up:
            return
        planner = self.config.planner
        assert planner is not None
        if self._directory is None:
            self._directory = Path(tempfile.mkdtemp(prefix="torchdelta-"))
        self._num_asked += 1
        trace_path = self._directory / f"{self._num_asked}.trace"
        write_trace(trace, trace_path)
        request = Request(
            trace_path=str(trace_path),
            plan_path=str(trace_path.with_suffix(".plan")),
            machine=machine,
            budget_bytes=budget_bytes,
            planner=planner,
            decision_class="persistent" if self.config.decision_class == "all" else None,
            effort="fast",
        )
        self._waiting.append((key, request))
        if len(self._waiting) == 1:
            self._send()

    def poll(self, timeout_s: float = 0.0) -> Planned | None:
        """Return an answer if there is one. Call this at every end of a step.

        Args:
            timeout_s: Seconds to wait for it.

        Raises:
            PlanError: The helper has failed; nothing is planned any more.
        """
        helper = self._helper
        if not self._waiting or helper is None or helper.stdout is None:
            self._num_idle_steps += 1
            if self._num_idle_steps > IDLE_STEPS:
                self._end_helper()
            return None
        self._num_idle_steps = 0
        deadline_s = time.monotonic() + timeout_s
        while b"\n" not in self._output:
            if not _is_readable(helper.stdout.fileno(), max(0.0, deadline_s - time.monotonic())):
                if time.monotonic() - self._asked_at_s > ANSWER_TIME_S:
                    raise self._given_up(f"no answer within {ANSWER_TIME_S:.0f} s")
                return None
            said = os.read(helper.stdout.fileno(), 1 << 16)
            if not said:
                raise self._given_up(f"its helper process ended with exit code {helper.wait()}")
            self._output += said
        line, _, self._output = self._output.partition(b"\n")
        key, request = self._waiting.popleft()
        try:
            answer = msgspec.json.decode(line, type=Answer)
            plan = None if answer.error else read_plan(request.plan_path)
        except msgspec.MsgspecError as error:
            raise self._given_up(f"its helper process gave an invalid answer: {error}") from None
        finally:
            _remove(request)
        if self._waiting:
            self._send()
        return Planned(key=key, plan=plan, answer=answer)

    def close(self) -> None:
        """End the helper and forget what was asked."""
        self._waiting.clear()
        self._end_helper()

    def leave_child(self) -> None:
        """Use no helper in a forked child: it belongs to the parent."""
        if self._helper is not None:
            self._helper.returncode = 0  # do not wait for it here
        self._helper = self._directory = None
        self._waiting.clear()
        self.is_given_up = True

    def _send(self) -> None:
        helper = self._start_helper()
        assert helper.stdin is not None
        self._asked_at_s = time.monotonic()
        with contextlib.suppress(BrokenPipeError):  # `poll` finds that the helper has ended
            helper.stdin.write(msgspec.json.encode(self._waiting[0][1]) + b"\n")
            helper.stdin.flush()

    def _start_helper(self) -> subprocess.Popen[bytes]:
        if self._helper is None:
            assert self._directory is not None
            paths = [str(Path(__file__).parents[3]), *filter(None, [os.environ.get("PYTHONPATH")])]
            # Safe path: do not import modules from the working directory of the program.
            environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "PYTHONSAFEPATH": "1"}
            self._helper = subprocess.Popen(  # noqa: S603 - our own module
                (*COMMAND, str(self._directory)),
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # a Ctrl-C at the terminal must not reach it
            )
        return self._helper

    def _given_up(self, why: str) -> PlanError:
        self.is_given_up = True
        self.close()
        return PlanError(why)

    def _end_helper(self) -> None:
        """End the helper, then remove the files: it may be writing one."""
        helper, self._helper = self._helper, None
        directory, self._directory = self._directory, None
        self._output = b""
        if helper is not None:
            helper.kill()
            for pipe in (helper.stdin, helper.stdout):
                with contextlib.suppress(OSError):
                    if pipe is not None:
                        pipe.close()
            helper.wait()
        if directory is not None:
            shutil.rmtree(directory, ignore_errors=True)


def _is_readable(descriptor: int, timeout_s: float) -> bool:
    """Return whether there is something to read, or the other end is closed."""
    poll = select.poll()  # `select.select` takes no descriptor above 1023
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(timeout_s * 1000))


def _remove(request: Request) -> None:
    for path in (request.trace_path, request.plan_path):
        Path(path).unlink(missing_ok=True)
