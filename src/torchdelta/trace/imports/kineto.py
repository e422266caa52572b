"""Profiles of torch.profiler (Kineto): what ran, with its shapes, its time on the device, and what it allocated.

A profile is a JSON object (gzip-compressed or not) with `traceEvents`, as `prof.export_chrome_trace` and
`tensorboard_trace_handler` write it; the names of 2021 ("Operator", "Kernel") and those of today are read. Of a profile
on a GPU, recorded with `record_shapes=True` and `profile_memory=True`, all that is needed is in it.

[Note: which op a kernel belongs to]
A kernel has the `correlation` of the call that launched it; the call lies within the op on its thread. (The
"External id" of a kernel names the op in some versions and the call in others.) A kernel counts for all ops around its
launch. Ops that run on several streams at once count their kernels' times added up.

[Note: an op of a profile]
The outermost op of a library (`aten::conv2d`, and not what it calls) is one op: what lies between it and a step is
Python, autograd's nodes and annotations. An op is backward's if a node of autograd is around it, the optimizer's if
`Optimizer.step` is.
"""

import math
import os
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from torchdelta.errors import TraceFileError
from torchdelta.trace.imports.plain_or_gzip import read_whole
from torchdelta.trace.model import Phase

__all__ = ["Allocation", "Profile", "ProfiledOp", "Shape", "read_profile_file"]

MAX_FILE_BYTES: Final = 2**31
"""A larger file, decompressed, is refused."""

MAX_TENSORS: Final = 4096
"""What one op may name as its arguments."""

Shape = tuple[int, ...]

_OPS: Final = frozenset({"Operator", "cpu_op", "user_annotation"})
_CALLS: Final = frozenset({"Runtime", "cuda_runtime", "cuda_driver", "hip_runtime"})
_DEVICE: Final = frozenset({"Kernel", "kernel", "Memcpy", "gpu_memcpy", "Memset", "gpu_memset"})
_STEP: Final = re.compile(r"ProfilerStep#(\d{1,18})")
_LIBRARY: Final = re.compile(r"[A-Za-z_]\w*::\w[\w.]*")
_NODE: Final = re.compile(r"(autograd::engine::evaluate_function: )?(torch::autograd::\w+|\w+Backward\d*)")
_ACCELERATORS: Final = frozenset({1, 6, 20})  # c10::DeviceType: CUDA, HIP, PrivateUse1
_DTYPES: Final = {
    "float": "float32",
    "double": "float64",
    "c10::Half": "float16",
    "c10::BFloat16": "bfloat16",
    "int": "int32",
    "long": "int64",
    "long int": "int64",
    "long long": "int64",
    "short": "int16",
    "signed char": "int8",
    "unsigned char": "uint8",
    "bool": "bool",
}


class _Event(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    ph: str = ""
    cat: str = ""
    name: str = ""
    pid: int | float | str = 0
    tid: int | float | str = 0
    ts: float | str = 0.0
    dur: float | None = None
    args: msgspec.Raw = msgspec.Raw(b"{}")


class _File(msgspec.Struct, frozen=True, kw_only=True):
    traceEvents: tuple[_Event, ...]  # noqa: N815 - the file's name for it
    deviceProperties: Any = None  # noqa: N815


class _OpArguments(msgspec.Struct, frozen=True, kw_only=True):
    dims: Any = msgspec.field(default=(), name="Input Dims")
    types: Any = msgspec.field(default=(), name="Input type")


class _Call(msgspec.Struct, frozen=True, kw_only=True):
    correlation: int | None = None


class _Memory(msgspec.Struct, frozen=True, kw_only=True):
    size_bytes: int = msgspec.field(default=0, name="Bytes")
    device: int = msgspec.field(default=0, name="Device Type")
    address: int | None = msgspec.field(default=None, name="Addr")
    total_bytes: int | None = msgspec.field(default=None, name="Total Allocated")


class ProfiledOp(msgspec.Struct, kw_only=True):
    """An op that a profile shows: see [Note: an op of a profile].

    Attributes:
        name: As the profile has it: `"aten::conv2d"`.
        shapes: Shapes of the tensors among its arguments, those in lists too.
        dtypes: Their dtypes by torch's names, `""` if unknown.
        phase: The part of the step.
        start_us: When the host began it, on the profile's clock.
        end_us: When the host had left it.
        device_s: Seconds of the kernels and copies that it launched.
    """

    name: str
    shapes: tuple[Shape, ...]
    dtypes: tuple[str, ...]
    phase: Phase
    start_us: float
    end_us: float
    device_s: float = 0.0


class Allocation(msgspec.Struct, frozen=True, kw_only=True):
    """Memory of the device that was allocated, or freed.

    Attributes:
        time_us: When.
        size_bytes: Below 0 where it was freed.
        address: Where; None in profiles of old versions, which do not say.
        total_bytes: What was allocated in all after it, None if the profile does not say.
    """

    time_us: float
    size_bytes: int
    address: int | None
    total_bytes: int | None


class Profile(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of one step.

    Attributes:
        device_name: Model of the first GPU in words, `""` if unknown.
        step: Number of the step that it is, None where the profile has no marks and all of it was taken.
        num_steps: Steps that the profile has marks of.
        ops: The ops, in the order in which the host began them.
        times_s: Seconds on the device of each run of every op, those within others too, by its name and the sorted
            shapes of its tensors.
        allocations: Of the device's memory, in order.
        time_s: Wall-clock seconds of the step, with what the profiler itself costs.
    """

    device_name: str
    step: int | None
    num_steps: int
    ops: list[ProfiledOp]
    times_s: dict[tuple[str, tuple[Shape, ...]], list[float]]
    allocations: list[Allocation]
    time_s: float


def read_profile_file(path: str | os.PathLike[str], *, whole: bool = False) -> Profile:
    """Read one step of a profile: the middle one of those that `prof.step()` has marked, or all of it (`whole`).

    Raises:
        TraceFileError: It cannot be read, is cut short, is no profile, or has no marked steps or no ops in them.
    """
    try:
        file = msgspec.json.decode(read_whole(path, "profile", max_bytes=MAX_FILE_BYTES), type=_File)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        text = " ".join(str(error).split())[:200] or "nested too deeply"
        raise TraceFileError(f"{path}: not a profile of torch.profiler, or one that is cut short: {text}") from error
    events = sorted(_timed(file.traceEvents, path), key=lambda pair: pair[0])
    marks = [(start_us, event) for start_us, event in events if _is_mark(event)]
    first_us, end_us, step = -math.inf, math.inf, None
    if not whole:
        if not marks:
            raise TraceFileError(
                f"{path}: the profile has no marks of steps (ProfilerStep#1): call prof.step() after each step when "
                f"you record it, or take all of it as one step with --whole"
            )
        first_us, mark = marks[len(marks) // 2 if len(marks) > 2 else 0]
        end_us = first_us + (mark.dur or 0.0)
        step = int(mark.name.partition("#")[2])
    inside = [(start_us, event) for start_us, event in events if first_us <= start_us < end_us]
    kernels = [(event.dur or 0.0, event) for _, event in events if event.cat in _DEVICE]
    reader = _Reader(_kernel_times(kernels))
    for events_of_thread in _threads(inside):
        reader.read(events_of_thread)
    ops = sorted(reader.ops, key=lambda op: op.start_us)
    if not ops:
        raise TraceFileError(
            f"{path}: no ops in its step: record it with activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]"
        )
    last_us = max((start_us + (event.dur or 0.0) for start_us, event in inside), default=0.0)
    begin_us = first_us if math.isfinite(first_us) else inside[0][0]
    return Profile(
        device_name=_device_name(file.deviceProperties),
        step=step,
        num_steps=len(marks),
        ops=ops,
        times_s=dict(reader.times_s),
        allocations=list(_allocations(inside)),
        time_s=(end_us - begin_us if math.isfinite(end_us) else last_us - begin_us) * 1e-6,
    )


def _timed(events: tuple[_Event, ...], path: str | os.PathLike[str]) -> Iterator[tuple[float, _Event]]:
    """Yield the events that matter, with their start in microseconds."""
    for event in events:
        is_wanted = event.ph == "X" and event.cat in _OPS | _CALLS | _DEVICE
        if not is_wanted and not (event.ph == "i" and event.name == "[memory]"):
            continue
        try:
            start_us = float(event.ts)
        except ValueError as error:
            raise TraceFileError(
                f"{path}: {event.name[:60]!r} has the time {event.ts!r}, which is no number"
            ) from error
        if not math.isfinite(start_us) or not 0 <= (event.dur or 0.0) < math.inf:
            raise TraceFileError(f"{path}: {event.name[:60]!r} has the time {start_us} and takes {event.dur}")
        yield start_us, event


def _is_mark(event: _Event) -> bool:
    return event.cat in _OPS and _STEP.fullmatch(event.name) is not None


def _kernel_times(kernels: list[tuple[float, _Event]]) -> dict[int, float]:
    """Return the microseconds on the device by the number of the call that launched it."""
    times_us: dict[int, float] = defaultdict(float)
    for dur_us, event in kernels:
        number = _arguments(event, _Call).correlation
        if number is not None:
            times_us[number] += dur_us
    return times_us


def _arguments(event: _Event, kind: type[Any]) -> Any:
    """Return the arguments of an event; those of a wrong type count as left out."""
    try:
        return msgspec.json.decode(event.args, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return kind()


def _threads(inside: list[tuple[float, _Event]]) -> Iterable[list[tuple[float, _Event]]]:
    threads: dict[Any, list[tuple[float, _Event]]] = defaultdict(list)
    for start_us, event in inside:
        if event.cat in _OPS | _CALLS:
            threads[event.pid, event.tid].append((start_us, event))
    return threads.values()


@dataclass(slots=True)
class _Around:
    """An event while what lies within it is read."""

    event: _Event
    end_us: float
    device_s: float = 0.0


class _Reader:
    """Reads the ops of a step off its threads."""

    def __init__(self, kernels_us: dict[int, float]) -> None:
        self._kernels_us = kernels_us
        self.ops: list[ProfiledOp] = []
        self.times_s: dict[tuple[str, tuple[Shape, ...]], list[float]] = defaultdict(list)

    def read(self, events: list[tuple[float, _Event]]) -> None:
        """Read a thread, with the times of the kernels that it launched."""
        events.sort(key=lambda pair: (pair[0], -(pair[1].dur or 0.0)))
        around: list[_Around] = []
        current: ProfiledOp | None = None
        for start_us, event in events:
            while around and around[-1].end_us <= start_us:
                self._left(around.pop())
            if current is not None and current.end_us <= start_us:
                current = None
            if event.cat in _CALLS:
                number = _arguments(event, _Call).correlation
                device_s = 0.0 if number is None else self._kernels_us.get(number, 0.0) * 1e-6
                if device_s:
                    for outer in around:
                        outer.device_s += device_s
                    if current is not None:
                        current.device_s += device_s
                continue
            end_us = start_us + (event.dur or 0.0)
            if current is None and _is_op(event):
                shapes, dtypes = _tensors(_arguments(event, _OpArguments))
                current = ProfiledOp(
                    name=event.name,
                    shapes=shapes,
                    dtypes=dtypes,
                    phase=_phase([outer.event for outer in around]),
                    start_us=start_us,
                    end_us=end_us,
                )
                self.ops.append(current)
            around.append(_Around(event, end_us))
        for outer in around:
            self._left(outer)

    def _left(self, one: _Around) -> None:
        if one.device_s and _is_op(one.event):
            shapes, _ = _tensors(_arguments(one.event, _OpArguments))
            self.times_s[one.event.name, tuple(sorted(shapes))].append(one.device_s)


def _is_op(event: _Event) -> bool:
    return _LIBRARY.fullmatch(event.name) is not None and _NODE.fullmatch(event.name) is None


def _phase(around: list[_Event]) -> Phase:
    if any(event.name.startswith(("Optimizer.step", "Optimizer.zero_grad")) for event in around):
        return "optimizer"
    return "backward" if any(_NODE.fullmatch(event.name) for event in around) else "forward"


def _tensors(arguments: _OpArguments) -> tuple[tuple[Shape, ...], tuple[str, ...]]:
    """Return the shapes and dtypes of an op's tensors. Of a list of tensors the profile has all or no shapes."""
    shapes: list[Shape] = []
    dtypes: list[str] = []
    dims: list[Any] = list(arguments.dims) if isinstance(arguments.dims, list) else []
    types: list[Any] = list(arguments.types) if isinstance(arguments.types, list) else []
    for place, one in enumerate(dims[:MAX_TENSORS]):
        word = types[place] if place < len(types) else ""
        dtype = _DTYPES.get(word, "") if isinstance(word, str) else ""
        if not isinstance(one, list):
            continue
        inner: list[Any] = one
        if inner and all(isinstance(item, int) and item >= 0 for item in inner):
            shapes.append(tuple(inner))
            dtypes.append(dtype)
        elif inner and all(isinstance(item, list) for item in inner):
            for tensor in inner[: MAX_TENSORS - len(shapes)]:
                if all(isinstance(item, int) and item >= 0 for item in tensor):
                    shapes.append(tuple(tensor))
                    dtypes.append(dtype)
    return tuple(shapes), tuple(dtypes)


def _allocations(inside: list[tuple[float, _Event]]) -> Iterator[Allocation]:
    for start_us, event in inside:
        if event.ph != "i":
            continue
        memory: _Memory = _arguments(event, _Memory)
        if memory.device in _ACCELERATORS and memory.size_bytes:
            yield Allocation(
                time_us=start_us,
                size_bytes=memory.size_bytes,
                address=memory.address,
                total_bytes=memory.total_bytes,
            )


def _device_name(properties: Any) -> str:
    """Return the name of the first device; old versions write the list as a text that is no JSON."""
    if isinstance(properties, list) and properties:
        name = properties[0].get("name") if isinstance(properties[0], dict) else None
        return str(name)[:100] if isinstance(name, str) else ""
    found = re.search(r"['\"]name['\"]: ['\"]([^'\"]{1,100})['\"]", properties) if isinstance(properties, str) else None
    return found[1] if found else ""
