"""The phases of a step that is recorded in part, and when a session may begin with such steps. See partial.py."""

from __future__ import annotations

import enum
import threading
from typing import TYPE_CHECKING, Any

from torchdelta._torch.compiled import is_in_compiled_call
from torchdelta._torch.engine import graph_task_id
from torchdelta._torch.modes import position_of_mode
from torchdelta._torch.ops import let_higher_order_pass
from torchdelta.errors import NativeError
from torchdelta.native.gate import GATE_KEY, load_gate_soon

if TYPE_CHECKING:
    from torchdelta.runtime.follow.follower import EndedStep
    from torchdelta.runtime.record.recorder import Recorder

__all__ = ["MOST_OTHERS", "Phase", "is_quiet", "load_gate_module", "may_begin"]

MOST_OTHERS = 3  # steps that were not like the outline of their program, before it is given up


class Phase(enum.Enum):
    """What is recorded.

    1. From its start on, every op is recorded, as in any followed step.
    2. At the first saved tensor, a program is chosen. If it has no outline, it learns it from here on. With an outline,
       only the ops and tensors that it names are recorded. If the step differs or the budget has no room, recording
       resumes before the op in question. If all that was saved dies without a backward, the step begins anew.
    3. The backward runs like that of any followed step.
    4. If the latest steps were alike, nothing is recorded from then until the optimizer has stepped. The tape is cut,
       so no replay can read a tensor that is written in between.
    """

    OFF = "the recorder is on the stack"
    WHOLE = "every op is recorded"
    LEARNING = "every op is recorded, and the outline of a program is learned"
    OUTLINED = "what the outline names is recorded"
    PAUSED = "nothing is recorded, until the optimizer has stepped"


def load_gate_module() -> Any:
    """Return what `load_gate_soon` returns. Ops that call functions of the program, such as `torch.cond`, pass it."""
    module = load_gate_soon()
    if module is not None and not isinstance(module, NativeError):
        let_higher_order_pass(GATE_KEY)
    return module


def is_quiet(recorder: Recorder) -> bool:
    """Return whether the recorder may be taken off the stack, or stay off it."""
    ledger, streams = recorder.ledger, recorder.device.streams
    return (
        not ledger.surveys
        and not ledger.observing.observer.wants_every_op
        and not recorder.only_counts
        and not recorder.subclasses.were_met
        and graph_task_id() == -1
        and (streams is None or streams.current_id() == streams.home_id)
    )


def may_begin(recorder: Recorder, ended: EndedStep | None) -> bool:
    """Return whether the next step may be recorded in part, given the latest one."""
    return (
        ended is not None
        and ended.program is not None
        and ended.program.num_others < MOST_OTHERS
        and ended.is_exact
        and recorder.room.usage.sees_peaks
        and is_quiet(recorder)
        and recorder.ledger.num_handles == 0
        and recorder.persistents is None
        and not is_in_compiled_call()
        and threading.current_thread() is threading.main_thread()
        and position_of_mode(recorder) != -1
    )
