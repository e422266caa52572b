"""Positive controls: offloaders with the races that others have shipped, written anew, each beside its mended form.

Each is a few lines on streams, events and pinned memory, as a program would write them, and uses nothing of torchdelta.
A control that the checker does not find would mean that a clean run of our own paths says nothing about that kind.
"""

from __future__ import annotations

import contextlib
import mmap
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch

from torchdelta._torch.storages import storage_over
from torchdelta.runtime.tiers.arena import Segment

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.racecheck.paths import Bench

SIZE: Final = 256


class Pinned:
    """Host memory that the device copies from and to while the host goes on."""

    def __init__(self, bench: Bench, num_bytes: int = SIZE * 4) -> None:
        self._bench = bench
        self._segment = Segment(mmap.mmap(-1, num_bytes))
        bench.extension.pin(self._segment.address, num_bytes)
        storage = storage_over(self._segment.address, num_bytes, torch.device("cpu"))
        self.tensor = torch.empty(0).set_(storage, 0, (num_bytes // 4,), (1,))

    def write(self, value: float) -> None:
        """Write as the host does."""
        self._bench.extension.on_host(self._segment.address, SIZE * 4, True, "new content")
        self.tensor.fill_(value)

    def close(self) -> None:
        """Unpin, once nothing copies."""
        torch.accelerator.synchronize()
        self._bench.extension.unpin(self._segment.address)


class Rig:
    """A compute stream, a stream for copies out and one for copies in, and a pinned buffer."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.device = bench.device
        self.compute = torch.accelerator.current_stream(0)
        self.out = torch.Stream(self.device)
        self.into = torch.Stream(self.device)
        self.pinned = Pinned(bench)

    def made(self, number: int = 1) -> torch.Tensor:
        """Compute a content."""
        return torch.arange(SIZE, device=self.device, dtype=torch.float32).sin_().mul_(number)

    def copy_out(self, tensor: torch.Tensor, *, waits: bool = True) -> None:
        """Copy to the pinned buffer on the stream for copies out."""
        if waits:
            self.out.wait_stream(self.compute)
        with self.out:
            self.pinned.tensor.copy_(tensor, non_blocking=True)

    def copy_in(self, target: torch.Tensor) -> None:
        """Copy from the pinned buffer on the stream for copies in."""
        with self.into:
            target.copy_(self.pinned.tensor, non_blocking=True)


def reload_races_its_copy_out(rig: Rig, *, mends: bool) -> None:
    """A tensor is brought back before its copy to the host has ended (Megatron-LM #7398)."""
    x, target = rig.made(), rig.made(2)
    rig.copy_out(x)
    rig.into.wait_stream(rig.compute)
    if mends:
        rig.into.wait_stream(rig.out)
    rig.copy_in(target)
    rig.compute.wait_stream(rig.into)
    rig.compute.wait_stream(rig.out)
    target.exp()


def pinned_buffer_reused_by_the_host(rig: Rig, *, mends: bool) -> None:
    """The host fills a staging buffer again while the copy to the device still reads it."""
    target = rig.made()
    rig.pinned.write(1.0)
    rig.into.wait_stream(rig.compute)
    rig.copy_in(target)
    if mends:
        rig.into.synchronize()
    rig.pinned.write(2.0)
    rig.compute.wait_stream(rig.into)


def pinned_buffer_reused_by_a_copy(rig: Rig, *, mends: bool) -> None:
    """One pinned buffer for two tensors: the second is copied out while the first is read back."""
    first, second, target = rig.made(), rig.made(2), rig.made(3)
    rig.copy_out(first)
    rig.into.wait_stream(rig.out)
    rig.copy_in(target)
    if mends:
        rig.out.wait_stream(rig.into)
    rig.copy_out(second)
    rig.compute.wait_stream(rig.into)
    rig.compute.wait_stream(rig.out)


def saved_view_skipped(rig: Rig, *, mends: bool) -> None:
    """An offloader frees a storage that it has copied, but skips its views: backward reads them (DeepSpeed #8387)."""
    x = rig.made().requires_grad_()
    hidden = x * 2
    kept: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> Any:
        if tensor._is_view() and not mends:  # noqa: SLF001
            return tensor
        copy = tensor.detach().clone()
        kept.append(tensor.detach())
        return copy

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda packed: packed):
        out = hidden.view(16, 16).exp() * hidden.view(16, 16)
    hidden.untyped_storage().resize_(0)
    kept.clear()
    with contextlib.suppress(RuntimeError):  # on CUDA it would read what is there now
        out.sum().backward()


def compute_does_not_wait_for_the_reload(rig: Rig, *, mends: bool) -> None:
    """Backward reads what a side stream brings, without a wait for its event (TRL #7195, DeepSpeed #8186)."""
    x = rig.made().requires_grad_()

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        rig.copy_out(tensor)
        rig.compute.wait_stream(rig.out)
        return torch.empty_like(tensor)

    def unpack(target: torch.Tensor) -> torch.Tensor:
        rig.into.wait_stream(torch.accelerator.current_stream(0))
        rig.into.wait_stream(rig.out)
        rig.copy_in(target)
        if mends:
            torch.accelerator.current_stream(0).wait_stream(rig.into)
        return target

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        out = x.sin()
    out.sum().backward()
    rig.into.synchronize()


def copy_out_does_not_wait_for_compute(rig: Rig, *, mends: bool) -> None:
    """A side stream copies what the compute stream has not written yet."""
    x = rig.made()
    rig.copy_out(x, waits=mends)
    rig.compute.wait_stream(rig.out)


def freed_before_the_copy_out_has_read(rig: Rig, *, mends: bool) -> None:
    """The last reference to a tensor is dropped while a side stream still copies it, without `record_stream`."""
    x = rig.made()
    rig.copy_out(x)
    if mends:
        x.record_stream(rig.out)
    del x
    rig.made(2)
    rig.out.synchronize()


def freed_on_the_side_stream_before_compute_has_read(rig: Rig, *, mends: bool) -> None:
    """Memory of the side stream's pool goes back to it while compute still reads (TRL #7195)."""
    with rig.into:
        x = torch.empty(SIZE, device=rig.device)
        x.copy_(rig.pinned.tensor, non_blocking=True)
    rig.compute.wait_stream(rig.into)
    y = x.exp()
    if mends:
        x.record_stream(rig.compute)
    del x
    with rig.into:
        torch.zeros(SIZE, device=rig.device)
    y.exp()


def target_still_in_use(rig: Rig, *, mends: bool) -> None:
    """A reload fills memory that the compute stream's earlier work still reads: no wait for compute before it."""
    old = rig.made()
    old.exp()
    del old
    target = torch.empty(SIZE, device=rig.device)  # the same memory, at once
    if mends:
        rig.into.wait_stream(rig.compute)
    rig.copy_in(target)
    rig.compute.wait_stream(rig.into)


def double_buffer_overwritten(rig: Rig, *, mends: bool) -> None:
    """Two device buffers in turn for the weights of the next layer: the third overwrites what the first still feeds."""
    buffers = [torch.zeros(SIZE, device=rig.device) for _ in range(2)]
    rig.into.wait_stream(rig.compute)
    for layer in range(4):
        buffer = buffers[layer % 2]
        if mends:
            rig.into.wait_stream(rig.compute)
        rig.copy_in(buffer)
        rig.compute.wait_stream(rig.into)
        buffer.exp()


def recompute_on_another_stream(rig: Rig, *, mends: bool) -> None:
    """A replay runs on a side stream, and compute reads its result without a wait."""
    x = rig.made()
    rig.into.wait_stream(rig.compute)
    with rig.into:
        again = x.sin()
    if mends:
        rig.compute.wait_stream(rig.into)
        again.record_stream(rig.compute)
    again.exp()
    rig.into.wait_stream(rig.compute)


def an_event_recorded_too_early(rig: Rig, *, mends: bool) -> None:
    """The event that compute waits for was recorded before the copy was queued."""
    target = rig.made()
    rig.into.wait_stream(rig.compute)
    event = torch.Event(rig.device)
    if not mends:
        event.record(rig.into)
    rig.copy_in(target)
    if mends:
        event.record(rig.into)
    event.wait(rig.compute)
    target.exp()
    rig.into.synchronize()


def unpinned_during_a_copy(rig: Rig, *, mends: bool) -> None:
    """Pinned memory goes back to the system while a copy out still writes to it."""
    pinned, rig.pinned = rig.pinned, Pinned(rig.bench)
    x = rig.made()
    rig.out.wait_stream(rig.compute)
    with rig.out:
        pinned.tensor.copy_(x, non_blocking=True)
    if mends:
        rig.out.synchronize()
    rig.bench.extension.unpin(pinned.tensor.data_ptr())
    rig.out.synchronize()


CONTROLS: Final[tuple[Callable[..., None], ...]] = (
    reload_races_its_copy_out,
    pinned_buffer_reused_by_the_host,
    pinned_buffer_reused_by_a_copy,
    saved_view_skipped,
    compute_does_not_wait_for_the_reload,
    copy_out_does_not_wait_for_compute,
    freed_before_the_copy_out_has_read,
    freed_on_the_side_stream_before_compute_has_read,
    target_still_in_use,
    double_buffer_overwritten,
    recompute_on_another_stream,
    an_event_recorded_too_early,
    unpinned_during_a_copy,
)


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What the checker says of a control.

    Attributes:
        found: Of the faulty form.
        found_mended: Of the mended form; must be empty.
    """

    found: list[str]
    found_mended: list[str]


def judge(bench: Bench, control: Callable[..., None], seed: int) -> Verdict:
    """Run both forms of a control in one schedule each."""
    verdicts: list[list[str]] = []
    for mends in (False, True):
        with bench.schedule(seed) as (found, _):
            rig = Rig(bench)
            bench.extension.set_mode(1, seed)
            control(rig, mends=mends)
            rig.pinned.close()
            del rig
        verdicts.append(found)
    return Verdict(found=verdicts[0], found_mended=verdicts[1])
