"""What an online policy is asked while a step is played, and what it may look at."""

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from torchdelta.planners.literature.played_step import PlayedStep

__all__ = ["Policy", "State"]


class State(Protocol):
    """What a policy sees of a play.

    Attributes:
        step: What is played.
        clock_s: Time since the start, replays and waits included.
        last_access_s: When each buffer was last read, written or brought back.
    """

    step: PlayedStep
    clock_s: float
    last_access_s: NDArray[np.float64]


class Policy(Protocol):
    """Who leaves, and how.

    Attributes:
        can_swap: Whether a buffer may leave by a copy; else only by being dropped.
        keeps_dead: Whether what a replay makes, and what is dead in the step, stays while there is room.
        prefetch_count: So many swapped buffers are on their way ahead of their use, at most.
    """

    can_swap: bool
    keeps_dead: bool
    prefetch_count: int

    def scores(self, state: State, candidates: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return a score for each of these buffers: the lowest leaves."""
        ...

    def recomputes(self, state: State, buffer_id: int) -> bool:
        """Return whether a buffer that may leave either way is dropped, not swapped."""
        ...

    def dropped(self, buffer_id: int) -> None:
        """Take note that a buffer was dropped, or died."""
        ...

    def remade(self, buffer_id: int) -> None:
        """Take note that a replay made it again."""
        ...
