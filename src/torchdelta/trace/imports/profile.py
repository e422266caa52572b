"""A profile of torch.profiler as a trace: the ops with their measured times, and what the device's memory held.

[Note: what a profile leaves open]
A profile says when memory was allocated and freed, and which shapes an op was given, but not which tensor is which. So
the load of the step, its ops and their times are the measured ones, and who reads what is our reading:

- An op writes what is allocated while it runs. What is allocated between two ops belongs to the later one.
- An op's buffers count together, also where it frees one before it allocates the next: the peak is a little higher.
- A block is freed by its address; where a profile has none (before 2022), by its size, the youngest first. The load is
  the same whichever of them it is.
- An op reads, for each tensor that it is given, the living block of that size (in the allocator's steps of 512 bytes)
  that was used last; each block for one tensor of an op.
- The op before a block's release has read it: autograd lets go of what it saved when its node has run.

A buffer that is born in the forward and read in the backward counts as saved. No op is recomputable, because its inputs
are not known for certain: a plan swaps. Ops without time on the device and without memory are left out.
"""

import os
from bisect import bisect_right
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Final

from torchdelta.errors import TraceFileError
from torchdelta.trace.frame import one_line
from torchdelta.trace.imports.events import whole_buffer
from torchdelta.trace.imports.kineto import Allocation, Profile, ProfiledOp, read_profile_file
from torchdelta.trace.model import BEFORE_STEP, Buffer, Header, Op, Phase, SavedTensor, Trace
from torchdelta.trace.validate import ITEM_SIZE_BYTES, MAX_BYTES, validate

__all__ = ["read_profile", "trace_of_profile"]

_BLOCK_BYTES: Final = 512  # what CUDA's caching allocator rounds sizes up to
_PHASES: Final[tuple[Phase, ...]] = ("forward", "backward", "optimizer")


def read_profile(path: str | os.PathLike[str], *, whole: bool = False) -> Trace:
    """Return the step of a profile: see [Note: what a profile leaves open].

    Args:
        path: The JSON file, gzip-compressed or not.
        whole: Take all of it as one step, and look for no marks of steps.

    Raises:
        TraceFileError: The file cannot be read, is no profile, has no step, or says nothing of the device's memory.
    """
    return trace_of_profile(read_profile_file(path, whole=whole), source=str(path))


def trace_of_profile(profile: Profile, *, source: str) -> Trace:
    """Return a profile as a trace.

    Args:
        profile: One step.
        source: Where it is from, for messages and the trace's comment.

    Raises:
        TraceFileError: It says nothing of the device's memory, or more than can be added up.
    """
    if not profile.allocations:
        raise TraceFileError(
            f"{source}: the profile has no allocations of the device: record it with profile_memory=True, or use only "
            f"its op times: torchdelta trace MODULE:FUNCTION --profile {source}"
        )
    if sum(abs(one.size_bytes) for one in profile.allocations) > MAX_BYTES:
        raise TraceFileError(f"{source}: the sum of its allocations is too large: the profile is damaged")
    step = _Builder(profile).trace(source)
    try:
        validate(step)
    except TraceFileError as error:
        raise TraceFileError(f"{source}: {error}") from error
    return step


@dataclass(slots=True, eq=False)
class _Block:
    """An allocation while the step is built."""

    buffer_id: int
    size_bytes: int
    birth_op: int
    last_use: int
    death_op: int = -1
    reads: list[int] = field(default_factory=list[int])


class _Builder:
    """Turns ops and allocations into records."""

    def __init__(self, profile: Profile) -> None:
        self._profile = profile
        self._blocks: list[_Block] = []  # by buffer
        self._by_address: dict[int, _Block] = {}
        self._by_size: dict[int, list[_Block]] = defaultdict(list)  # living ones, oldest first
        self._ops = _kept(profile)
        self._writes: list[list[int]] = [[] for _ in self._ops]

    def trace(self, source: str) -> Trace:
        before = self._there_before()
        starts = [op.start_us for op in self._ops]
        events = self._profile.allocations
        place = 0
        while place < len(events) and events[place].time_us < starts[0]:
            self._apply(events[place], 0 if events[place].size_bytes > 0 else BEFORE_STEP, before)
            place += 1
        for index, op in enumerate(self._ops):
            # What comes before the next op's start happens in this one or right after it.
            following_us = starts[index + 1] if index + 1 < len(starts) else float("inf")
            self._read(index, op)
            while place < len(events) and events[place].time_us < following_us:
                # What is allocated between two ops is the later one's; what is freed there outlived the earlier one.
                is_between = events[place].time_us > op.end_us and index + 1 < len(self._ops)
                self._apply(events[place], index + 1 if is_between and events[place].size_bytes > 0 else index, before)
                place += 1
        return self._records(source)

    def _there_before(self) -> dict[int, list[_Block]]:
        """Make a block for all that is freed in the step without being allocated in it, and one for the rest."""
        before: dict[int, list[_Block]] = defaultdict(list)
        alive: dict[int, int] = defaultdict(int)
        addresses: set[int] = set()
        for one in self._profile.allocations:
            size_bytes = abs(one.size_bytes)
            if one.size_bytes > 0:
                alive[size_bytes] += 1
                if one.address is not None:
                    addresses.add(one.address)
            elif one.address is not None and one.address not in addresses:
                self._by_address[one.address] = self._new(size_bytes, BEFORE_STEP)
            elif one.address is None and alive[size_bytes] > 0:
                alive[size_bytes] -= 1
            elif one.address is None:
                before[size_bytes].append(self._new(size_bytes, BEFORE_STEP))
        first = self._profile.allocations[0]
        if first.total_bytes is not None:
            known_bytes = sum(block.size_bytes for block in self._blocks)
            rest_bytes = first.total_bytes - first.size_bytes - known_bytes
            if rest_bytes > 0:
                self._blocks.append(_Block(len(self._blocks), rest_bytes, BEFORE_STEP, BEFORE_STEP))
        return before

    def _new(self, size_bytes: int, birth_op: int) -> _Block:
        block = _Block(len(self._blocks), size_bytes, birth_op, birth_op)
        self._blocks.append(block)
        self._by_size[_rounded(size_bytes)].append(block)
        return block

    def _read(self, index: int, op: ProfiledOp) -> None:
        taken: set[int] = set()
        for shape, dtype in zip(op.shapes, op.dtypes, strict=True):
            size_bytes = ITEM_SIZE_BYTES.get(dtype, 0)
            for length in shape:
                size_bytes = min(size_bytes * length, MAX_BYTES)
            living = self._by_size.get(_rounded(size_bytes)) if size_bytes else None
            found = max(
                (block for block in living or () if block.buffer_id not in taken and block.birth_op < index),
                key=lambda block: (block.last_use, block.buffer_id),
                default=None,
            )
            if found is not None:
                taken.add(found.buffer_id)
                found.last_use = index
                found.reads.append(index)

    def _apply(self, event: Allocation, index: int, before: dict[int, list[_Block]]) -> None:
        size_bytes = abs(event.size_bytes)
        if event.size_bytes > 0:
            block = self._new(size_bytes, index)
            self._writes[index].append(block.buffer_id)
            if event.address is not None:
                self._by_address[event.address] = block
            return
        if event.address is not None:
            block = self._by_address.pop(event.address, None)
        else:
            living = self._by_size[_rounded(size_bytes)]
            same = (one for one in reversed(living) if one.size_bytes == size_bytes and one.birth_op > BEFORE_STEP)
            block = next(same, None) or (before[size_bytes].pop() if before[size_bytes] else None)
        if block is None or block.death_op >= 0:
            return
        block.death_op = max(index + 1, block.birth_op + 1)
        self._by_size[_rounded(block.size_bytes)].remove(block)

    def _records(self, source: str) -> Trace:
        profile, num_ops = self._profile, len(self._ops)
        reads: list[list[int]] = [[] for _ in self._ops]
        saved: list[SavedTensor] = []
        buffers: list[Buffer] = []
        for block in self._blocks:
            death_op = min(block.death_op, num_ops) if block.death_op >= 0 else num_ops
            read_by = set(block.reads)
            if block.death_op >= 0 and block.birth_op < death_op - 1:
                read_by.add(death_op - 1)
            for index in sorted(read_by):
                reads[index].append(block.buffer_id)
            is_forward = block.birth_op > BEFORE_STEP and self._ops[block.birth_op].phase == "forward"
            is_saved = is_forward and any(self._ops[index].phase == "backward" for index in read_by)
            if is_saved:
                saved.append(whole_buffer(block.buffer_id, block.size_bytes, block.birth_op))
            buffers.append(
                Buffer(
                    id=block.buffer_id,
                    storage_id=block.buffer_id,
                    size_bytes=block.size_bytes,
                    kind="constant" if block.birth_op == BEFORE_STEP else "activation" if is_forward else "temporary",
                    birth_op=block.birth_op,
                    death_op=death_op,
                    saved=is_saved,
                )
            )
        records = tuple(
            Op(
                index=index,
                name=op.name.replace("::", ".", 1),
                phase=op.phase,
                reads=tuple(reads[index]),
                writes=tuple(self._writes[index]),
                time_s=op.device_s,
            )
            for index, op in enumerate(self._ops)
        )
        step = "all of it" if profile.step is None else f"step #{profile.step} of {profile.num_steps} that are marked"
        if profile.allocations[0].total_bytes is None:
            step += ", without what was in memory before it, which old profiles do not say"
        header = Header(
            torch_version="",
            device="cuda",
            device_name=profile.device_name,
            created_by="torchdelta profile",
            phases=_PHASES,
            comment=f"{one_line(source)}: {step}, {profile.time_s * 1e3:.1f} ms with the profiler on",
        )
        return Trace(
            header=header,
            buffers=tuple(buffers),
            ops=records,
            saved_tensors=tuple(sorted(saved, key=lambda one: (one.op, one.buffer_id))),
        )


def _rounded(size_bytes: int) -> int:
    return -(-size_bytes // _BLOCK_BYTES) * _BLOCK_BYTES


def _kept(profile: Profile) -> list[ProfiledOp]:
    """Return the ops with time on the device, and those that allocate."""
    starts = [op.start_us for op in profile.ops]
    owners: set[int] = set()
    for one in profile.allocations:
        place = bisect_right(starts, one.time_us) - 1
        if place >= 0:
            owners.add(place)
    kept = [op for index, op in enumerate(profile.ops) if op.device_s or index in owners]
    return kept or profile.ops[:1]
