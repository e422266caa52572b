"""Finds the iteration of a training run in the stream of its memory events.

From Zhang, Yeung, Shu, He, Wang 2019 (arXiv 1903.06631; their released code for Apache SINGA): each event gets a
signature that does not depend on addresses, namely the size for an allocation, and for any other event how many events
ago its block was last touched. An iteration is the longest run of signatures that repeats, and later ones confirm it.

Where theirs watches a stream and guesses at growing lengths, here the whole log is at hand, so that:

1. Candidate lengths are the distances between neighbouring occurrences of a signature, those of rare signatures first
   (what happens once an iteration gives the iteration's length). The number of candidates is fixed: `MAX_CANDIDATES`.
2. Per candidate length L, the longest stretch in which every event has the signature of the event L later: one pass.
3. The candidate whose stretch covers most events wins, the shorter one of equals: so neither a network's repeated
   layers (short, but end with the iteration) nor two iterations at once (no longer stretch) are taken for one.
4. It has to be seen `MIN_REPEATS` times in a row: two make a repetition, and one more confirms it.

Linear in events times candidates. A log whose iterations differ in every event (shapes that never repeat) has none.
"""

from collections import Counter, defaultdict
from collections.abc import Hashable, Sequence
from itertools import pairwise
from typing import Final

import msgspec

__all__ = ["MAX_CANDIDATES", "MIN_REPEATS", "Iteration", "find_iteration", "signatures"]

MIN_REPEATS: Final = 3
MAX_CANDIDATES: Final = 32


class Iteration(msgspec.Struct, frozen=True, kw_only=True):
    """A stretch of events that repeats.

    Attributes:
        start: Index of the first event of the stretch.
        length: Events in one iteration.
        num_events: Events in the whole stretch, at least `MIN_REPEATS` times the length.
    """

    start: int
    length: int
    num_events: int


def signatures(events: Sequence[tuple[str, Hashable, int]]) -> list[tuple[str, int]]:
    """Return each event's signature.

    Args:
        events: Kind ("alloc", "free", "read", "write"), id of the block, and size of each event.
    """
    last: dict[Hashable, int] = {}
    found: list[tuple[str, int]] = []
    for index, (kind, id_, size_bytes) in enumerate(events):
        # -1 for a block that was there before the log began: its distance is not known the first time.
        found.append((kind, size_bytes if kind == "alloc" else index - last.get(id_, index + 1)))
        last[id_] = index
    return found


def find_iteration(sequence: Sequence[Hashable]) -> Iteration | None:
    """Return the repetition that covers most of a sequence of signatures, None if there is none."""
    best: Iteration | None = None
    for length in _candidates(sequence):
        start, num_events = _longest_stretch(sequence, length)
        if num_events < MIN_REPEATS * length:
            continue
        if best is None or (num_events, -length) > (best.num_events, -best.length):
            best = Iteration(start=start, length=length, num_events=num_events)
    return best


def _candidates(sequence: Sequence[Hashable]) -> list[int]:
    """Return lengths worth a look, at most `MAX_CANDIDATES`: each signature votes for its distances."""
    places: dict[Hashable, list[int]] = defaultdict(list)
    for index, signature in enumerate(sequence):
        places[signature].append(index)
    votes: Counter[int] = Counter()
    for indices in places.values():
        if len(indices) < MIN_REPEATS:
            continue
        # A signature's votes add up to one for each distance that it shows at all, so that the hundred equal
        # allocations of an iteration do not outvote what happens once in it.
        for distance, count in Counter(b - a for a, b in pairwise(indices)).items():
            if count >= MIN_REPEATS - 1:
                votes[distance] += 1
    # One half by votes, one half by length: a signature that is the only one of its kind may be outvoted.
    by_votes = sorted(votes, key=lambda length: (-votes[length], length))[: MAX_CANDIDATES // 2]
    by_length = sorted(set(votes) - set(by_votes), reverse=True)[: MAX_CANDIDATES // 2]
    return by_votes + by_length


def _longest_stretch(sequence: Sequence[Hashable], length: int) -> tuple[int, int]:
    """Return start and events of the longest stretch in which every event has the signature of the one `length` on."""
    best_start, best_run, start = 0, -1, 0
    for index in range(len(sequence) - length):
        if sequence[index] != sequence[index + length]:
            start = index + 1
        elif index + 1 - start > best_run:
            best_start, best_run = start, index + 1 - start
    return (best_start, best_run + length) if best_run >= 0 else (0, 0)
