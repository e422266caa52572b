"""What one op needs: output bytes, workspace bytes and time, learned from its runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import weakref

    from torchdelta.runtime.state.buffer import OpEntry

__all__ = ["Need", "Timing", "VaryingNeed"]


class Timing:
    """The known time of all ops that share a `Need`."""

    __slots__ = ("is_known", "num_samples", "time_s", "waiting")

    def __init__(self) -> None:
        self.num_samples = 0
        self.is_known = False
        self.time_s = 0.0  # the largest launch time until a device time is known
        self.waiting: list[weakref.ref[OpEntry]] = []  # entries that have only a launch time so far

    def learn(self, time_s: float) -> None:
        """Learn a measured time, and set it in the entries that wait for it."""
        self.time_s = min(self.time_s, time_s) if self.is_known else time_s
        self.is_known = True
        for reference in self.waiting:
            entry = reference()
            if entry is not None:
                entry.time_s = self.time_s
        self.waiting.clear()


class Need:
    """What one op on tensors of given shapes needs. Shared by all runs with that key, so learning hashes nothing."""

    __slots__ = ("is_guess", "is_workspace_known", "output_bytes", "possible_bytes", "timing", "workspace_bytes")

    def __init__(self, output_bytes: int, workspace_bytes: int) -> None:
        self.output_bytes = output_bytes  # of the new storages that it returns
        self.workspace_bytes = workspace_bytes  # what it allocates and frees again; an estimate until it is measured
        self.possible_bytes = 0  # what it may allocate beyond that; 0 once the workspace was measured
        self.is_workspace_known = False
        self.is_guess = False  # `output_bytes` is an upper estimate, which a measurement may lower
        self.timing: Timing | None = None  # set by the timer of an accelerator (device/op_timer.py)

    @property
    def total_bytes(self) -> int:
        """Outputs and workspace together."""
        return self.output_bytes + self.workspace_bytes

    def learn_growth(self, size_bytes: int) -> None:
        """Learn by how much the storages that an op wrote have grown. Keeps the maximum."""
        self.output_bytes = size_bytes if self.is_guess else max(self.output_bytes, size_bytes)
        self.is_guess = False

    def learn_workspace(self, size_bytes: int) -> int:
        """Learn the workspace of one run. Return the maximum so far.

        Strides are not part of the key, so the most expensive layout counts.
        """
        if not self.is_workspace_known or size_bytes > self.workspace_bytes:
            self.is_workspace_known = True
            self.workspace_bytes = size_bytes
            self.possible_bytes = 0
        return self.workspace_bytes


class VaryingNeed(Need):
    """What an op needs whose output size depends on the content of its inputs: one run does not tell the next.

    Room for the size of the latest output is required. Up to the most that the op may take, room is made only as far as
    anything can leave (`possible_bytes`), because a bound that is never reached must not refuse a budget.

    Args:
        output_bytes: A guess, until the first output is measured.
        most_output_bytes: The most that the outputs may be; 0 if nothing limits them: then the largest one so far.
        most_workspace_bytes: The most that the op may allocate besides.
    """

    __slots__ = ("_estimated_bytes", "_latest_bytes", "_most_output_bytes", "_most_workspace_bytes")

    def __init__(self, output_bytes: int, most_output_bytes: int, most_workspace_bytes: int) -> None:
        self._most_output_bytes = 0
        self._most_workspace_bytes = most_workspace_bytes
        super().__init__(output_bytes, 0)
        self._most_output_bytes = most_output_bytes  # a guess is not among the outputs so far
        self.is_guess = True

    @property
    def output_bytes(self) -> int:
        """The bytes of the latest output."""
        return self._latest_bytes

    @output_bytes.setter
    def output_bytes(self, size_bytes: int) -> None:
        self._latest_bytes = size_bytes
        self._most_output_bytes = max(self._most_output_bytes, size_bytes)

    @property
    def possible_bytes(self) -> int:
        """What the next run may take beyond the latest output and the largest workspace so far."""
        more_bytes = self._most_output_bytes - self.output_bytes
        return max(0, more_bytes) + max(self._estimated_bytes, self._most_workspace_bytes - self.workspace_bytes)

    @possible_bytes.setter
    def possible_bytes(self, size_bytes: int) -> None:
        self._estimated_bytes = size_bytes
