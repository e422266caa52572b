"""Writes the trace of a step to a file, for `torchdelta plan`.

The file gets the trace of the second step. That is the first one that is traced from its start to its end and that
repeats: the first one makes the optimizer's states, and often the gradients. It is also the step that a given plan is
compared with. Its buffers are numbered by use.
"""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING, Final

from torchdelta.errors import ConfigError, TraceFileError
from torchdelta.notices import warn_once
from torchdelta.trace.file import write_trace
from torchdelta.trace.numbering import numbered_by_use

if TYPE_CHECKING:
    from torchdelta.runtime.follow.step_log import StepLog
    from torchdelta.trace.model import Trace

__all__ = ["TraceOutput", "check_trace_path"]

_logger = logging.getLogger("torchdelta")
_MAX_TRACES: Final = 3  # a trace can be dropped


class TraceOutput:
    """The file that a session writes its trace to. Mutable.

    Args:
        path: The file; None for none.
    """

    def __init__(self, path: str | None) -> None:
        self.path = path
        self._num_tries = 0

    @property
    def wants_trace(self) -> bool:
        """Whether the next step is to be traced: no step that repeats was traced to its end yet."""
        return self.path is not None and self._num_tries < _MAX_TRACES

    def on_trace_begin(self) -> None:
        """Count a step that is being traced: its trace may be dropped."""
        self._num_tries += 1

    def on_traced(self, trace: Trace, _log: StepLog) -> None:
        """Write the trace, if it is still wanted."""
        path, self.path = self.path, None
        if path is None:
            return
        try:
            write_trace(numbered_by_use(trace)[0], path)
        except (OSError, TraceFileError) as error:  # the training goes on
            warn_once(f"no trace was written: {error}")
        else:
            _logger.info("wrote the trace of a step to %s: %d ops", path, len(trace.ops))

    def on_stop(self) -> None:
        """Say so if there is no trace."""
        if self.path is not None:
            warn_once(f"no trace was written to {self.path}: there was no complete second step")


def check_trace_path(path: object) -> str:
    """Return the path as text, absolute: the program may change its working directory.

    Raises:
        ConfigError: A file cannot be written there.
    """
    if not isinstance(path, (str, os.PathLike)):
        raise ConfigError(f"trace_out={path!r} is not allowed: use the path of a file, or None")
    text = os.fspath(path)
    directory = os.path.dirname(text) or "."  # noqa: PTH120 - os.PathLike of any kind
    if os.path.isdir(text) or not os.path.isdir(directory):  # noqa: PTH112
        raise ConfigError(f"trace_out={text!r} is not the path of a file in a directory that exists: name another one")
    try:
        return os.path.abspath(text)  # noqa: PTH100 - likewise
    except FileNotFoundError:
        msg = f"trace_out={text!r}: the working directory does not exist any more: name an absolute path"
        raise ConfigError(msg) from None
