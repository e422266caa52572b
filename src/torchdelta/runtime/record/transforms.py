"""`torch.func.grad`, `vjp` and related transforms: their ops are counted and given room, but not recorded.

[Note: ops inside transforms]
The transforms that use reverse mode forbid saved-tensor hooks, so their saved tensors cannot be evicted. (`vmap` and
`jvp` do not: under them everything works as outside.) Their ops reach a dispatch mode below all functorch layers, as
plain tensors with all batch dimensions. The recorder stays on and makes room before each op, which evicts tensors that
were saved outside. It records nothing for replay.

The mode changes no bits there, unlike in an ordinary backward: torch takes other derivative formulas and accumulates
out of place where a mode is on OR a tensor is a transform's wrapper, and here the tensors are wrappers anyway. A
backward inside a transform whose tensors are not wrapped is an ordinary one: it runs without the mode.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch

from torchdelta._torch.modes import without_mode, without_saved_hooks
from torchdelta._torch.tensors import is_in_transform

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from torchdelta.runtime.errors import BudgetError
    from torchdelta.runtime.record.recorder import Recorder

__all__ = ["Transforms"]


class Transforms:
    """Counts the ops that transforms run.

    Args:
        recorder: The dispatch mode that counts.
        take_error: Ends the survey of an impossible step and returns its error.
    """

    def __init__(self, recorder: Recorder, take_error: Callable[[], BudgetError]) -> None:
        self._recorder = recorder
        self._take_error = take_error

    @contextlib.contextmanager
    def counting_only(self) -> Generator[None]:
        """Count the ops that a transform runs.

        If the budget cannot hold, the survey ends with the outermost transform: a loop without `backward()` would
        never end it, and would replace its parameters with tensors without content.

        Raises:
            BudgetError: The budget could not hold.
        """
        recorder = self._recorder
        was_inside, recorder.only_counts = recorder.only_counts, True
        had_survey = recorder.ledger.surveys
        error: Exception | None = None
        try:
            with without_saved_hooks():
                yield
        except Exception as raised:
            error = raised
            raise
        finally:
            recorder.only_counts = was_inside
            if not was_inside and recorder.ledger.surveys and not had_survey:
                raise self._take_error() from error

    def run_backward(self, original: Callable[..., Any], outputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Run a backward that is called inside a transform."""
        grads = args[0] if args else kwargs.get("grad_tensors")
        if any(isinstance(value, torch.Tensor) and is_in_transform(value) for value in (*outputs, *(grads or ()))):
            return original(outputs, *args, **kwargs)
        with without_mode(self._recorder):
            return original(outputs, *args, **kwargs)
