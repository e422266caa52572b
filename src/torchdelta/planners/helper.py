"""`python -m torchdelta.planners.helper DIRECTORY`: plans steps for another process, until its input ends.

A process that trains plans elsewhere: the planners are compiled by numba, which takes a hundred megabytes, and they
would hold the interpreter's lock for seconds. Requests and answers are those of `plan/request.py`; the plan itself
is a file. The directory holds the files; who asks ends the helper and removes them, unless it was killed: then the
input ends here, and the helper removes them.
"""

from __future__ import annotations

import contextlib
import shutil
import sys
from typing import TYPE_CHECKING

import msgspec

from torchdelta.errors import TorchdeltaError
from torchdelta.machine.model import validate_machine
from torchdelta.plan.file import write_plan
from torchdelta.plan.request import Answer, Request
from torchdelta.plan.validate import validate
from torchdelta.planners.registry import classes_of, get
from torchdelta.trace.file import read_trace

if TYPE_CHECKING:
    from typing import BinaryIO

__all__ = ["main", "serve"]


def serve(requests: BinaryIO, answers: BinaryIO) -> None:
    """Answer requests until there are no more."""
    while line := requests.readline():
        try:
            answer = _plan(msgspec.json.decode(line, type=Request))
        except TorchdeltaError as error:
            answer = Answer(error=str(error).partition("\n")[0])
        answers.write(msgspec.json.encode(answer) + b"\n")
        answers.flush()


def _plan(request: Request) -> Answer:
    from torchdelta.simulate.execute import execute

    validate_machine(request.machine)
    trace = read_trace(request.trace_path)
    classes = classes_of(request.planner)
    choose = get(request.planner, request.decision_class if request.decision_class in classes else None)
    plan = choose(trace, request.machine, request.budget_bytes, request.effort)
    validate(trace, plan, request.machine)
    write_plan(plan, request.plan_path)
    simulation = execute(trace, request.machine, plan)
    return Answer(time_s=simulation.time_s, plain_time_s=simulation.plain_time_s, peak_bytes=simulation.peak.size_bytes)


def main(directory: str) -> None:
    """Answer requests until there are no more, or nobody reads the answers."""
    try:
        with contextlib.suppress(BrokenPipeError):
            serve(sys.stdin.buffer, sys.stdout.buffer)
    finally:
        shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    main(sys.argv[1])
