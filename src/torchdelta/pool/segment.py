"""How large a single segment of torch's CUDA allocator has to be for the large tensors of a step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from torchdelta.pool.lives import lives_of_trace
from torchdelta.pool.online import place_like_cnmem

if TYPE_CHECKING:
    from torchdelta.trace.model import Trace

LEAST_LARGE_BYTES: Final = (1 << 20) + 1  # torch serves smaller requests from segments of another kind
_ALIGNMENT_BYTES: Final = 512


def segment_bytes(trace: Trace) -> int:
    """Return the bytes in which best fit places the large tensors of a step; 0 if there are none.

    What lives all the time is not among them.

    Raises:
        PoolError: As `make_instance`.
    """
    instance = lives_of_trace(trace, alignment_bytes=_ALIGNMENT_BYTES)
    is_always = (instance.starts == instance.starts.min(initial=0)) & (instance.ends == instance.ends.max(initial=0))
    is_placed = (instance.sizes_bytes >= LEAST_LARGE_BYTES) & instance.is_placed & ~is_always
    if not is_placed.any():
        return 0
    sizes = instance.padded_bytes[is_placed]
    footprint, _ = place_like_cnmem(instance.starts[is_placed], instance.ends[is_placed], sizes)
    return int(footprint)
