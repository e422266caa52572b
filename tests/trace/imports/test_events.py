"""Event logs become traces: the iteration in the middle, with lives, load and times of the step that was logged."""

import gzip
import json
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.trace.imports.logs import played
from tests.trace.strategies import example, traces
from torchdelta.errors import TraceFileError
from torchdelta.trace.file import read_trace, write_trace
from torchdelta.trace.imports.events import Event, read_event_log, trace_of_events
from torchdelta.trace.model import BEFORE_STEP, counts, load_curve, peak, storage_versions
from torchdelta.trace.validate import validate


def write(path: Path, events: list[Event]) -> Path:
    """Write a log."""
    path.write_bytes(b"".join(msgspec.json.encode(event) + b"\n" for event in events))
    return path


def test_the_iteration_of_a_log(tmp_path):
    """Four steps of the documented example: the step found has its peak, its storages and its duration."""
    events = played(example(), 4)
    trace = read_event_log(write(tmp_path / "log.jsonl", events))
    validate(trace)
    per_step = (len(events) - 2) // 4
    assert f"iteration of {per_step} events" in trace.header.comment
    assert peak(trace).size_bytes == peak(example()).size_bytes
    assert len(storage_versions(trace)) == len(storage_versions(example()))
    assert counts(trace).time_s == pytest.approx(per_step * 1e-3)
    assert {op.name for op in trace.ops} == {"torchdelta.alloc", "torchdelta.read", "torchdelta.write"}
    (tmp_path / "log.gz").write_bytes(gzip.compress((tmp_path / "log.jsonl").read_bytes()))
    assert read_event_log(tmp_path / "log.gz").ops == trace.ops


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(traces(max_ops=6), st.integers(3, 5))
def test_any_log_gives_a_valid_step_or_none(trace, num_steps):
    """Whatever is played, the outcome is valid, and as a whole its highest load is that of the play."""
    sized = [msgspec.structs.replace(b, size_bytes=max(b.size_bytes, 1)) for b in trace.buffers]
    sizes = {}
    for buffer in sized:  # a log knows one size of a block
        sizes.setdefault(buffer.storage_id, buffer.size_bytes)
    sized = [msgspec.structs.replace(b, size_bytes=sizes[b.storage_id]) for b in sized]
    events = played(msgspec.structs.replace(trace, buffers=tuple(sized)), num_steps)
    if not any(event.op != "free" for event in events):
        return
    whole = trace_of_events(events, source="log", whole=True)
    validate(whole)
    live, highest = 0, 0
    now: dict[int | str, int] = {}
    for event in events:
        if event.op == "alloc":
            now[event.id] = event.size_bytes
            live += event.size_bytes
        elif event.op == "free":
            live -= now.pop(event.id)
        highest = max(highest, live)
    assert max(load_curve(whole)) == highest
    try:
        step = trace_of_events(events, source="log")
    except TraceFileError as error:
        assert "no iteration" in str(error)  # noqa: PT017 - a step of one event repeats nothing
        return
    validate(step)
    assert max(load_curve(step)) <= highest


def test_blocks_that_cross_the_end_of_a_step():
    """What is made in one step and freed in the next is alive at both ends, and counted once."""
    events = []
    for step in range(5):
        clock = 10.0 * step
        events.append(Event(op="alloc", id=f"loss{step}", size_bytes=8, time_s=clock))
        events.append(Event(op="alloc", id="work", size_bytes=100, time_s=clock + 1))
        events.append(Event(op="free", id="work", time_s=clock + 2))
        if step:
            events.append(Event(op="free", id=f"loss{step - 1}", time_s=clock + 3))
    trace = trace_of_events(events, source="log")
    assert sorted(load_curve(trace)) == [16, 116]
    assert sum(buffer.birth_op == BEFORE_STEP for buffer in trace.buffers) == 1


def test_a_log_whose_name_is_not_utf8(tmp_path):
    """The trace says where it is from, in characters that its file can hold."""
    path = tmp_path / os.fsdecode(b"caf\xe9.jsonl")
    with path.open("w") as log:
        for step in range(4):
            log.writelines(
                json.dumps({"op": op, "id": 1, "size_bytes": 8, "time_s": 3 * step + place}) + "\n"
                for place, op in enumerate(("alloc", "write", "free"))
            )
    write_trace(read_event_log(path), tmp_path / "step.trace")
    assert "caf\\udce9.jsonl: iteration" in read_trace(tmp_path / "step.trace").header.comment


def test_what_is_read_after_the_peak_is_saved():
    """Up to the highest load is forward, the rest backward; what is born before and read after counts as saved."""
    events = []
    for step in range(4):
        script = ("alloc a", "write a", "alloc b", "write b", "read a", "alloc c", "read b", "free c", "read a")
        for place, text in enumerate((*script, "free a", "free b")):
            op, id_ = text.split()
            events.append(Event(op=op, id=id_, size_bytes=8, time_s=step + place / 100))  # type: ignore[arg-type]
    trace = trace_of_events(events, source="log")
    assert [op.phase for op in trace.ops] == ["forward"] * 6 + ["backward"] * 2
    saved = [buffer for buffer in trace.buffers if buffer.saved]
    assert [(buffer.birth_op, buffer.death_op) for buffer in saved] == [(1, 8), (3, 8)]
    assert len(trace.saved_tensors) == 2
    assert [op.time_s for op in trace.ops][:2] == pytest.approx([0.01, 0.01])


BAD = {
    "no json": (b"alloc 7\n", "line 1: no event: JSON is malformed"),
    "unknown op": (b'{"op":"move","id":1}\n', "line 1: no event: Invalid enum value 'move'"),
    "no id": (b'{"op":"free"}\n', "line 1: no event: Object missing required field `id`"),
    "no size": (b'{"op":"alloc","id":1}\n', "line 1: block 1 is allocated without size_bytes"),
    "negative size": (b'{"op":"alloc","id":1,"size_bytes":-4}\n', "line 1: negative size_bytes -4"),
    "never allocated": (b'\n{"op":"read","id":"x"}\n', "line 2: read of block 'x', which was never allocated"),
    "allocated twice": (
        b'{"op":"alloc","id":1,"size_bytes":4}\n' * 2,
        "line 2: block 1 is allocated, but it was not freed",
    ),
    "freed twice": (
        b'{"op":"alloc","id":1,"size_bytes":4}\n' + b'{"op":"free","id":1}\n' * 2,
        "line 3: free of block 1, which is freed",
    ),
    "other size": (
        b'{"op":"alloc","id":1,"size_bytes":4}\n{"op":"read","id":1,"size_bytes":8}\n',
        "line 2: block 1 has 4 bytes and not 8",
    ),
    "time goes back": (
        b'{"op":"alloc","id":1,"size_bytes":4,"time_s":2}\n{"op":"free","id":1,"time_s":1}\n',
        "line 2: time_s 1.0 is before 2.0",
    ),
    "nothing": (b"", "the log has no allocation, read or write"),
    "no iteration": (b'{"op":"alloc","id":1,"size_bytes":4}\n', "no iteration in 1 events"),
    "more bytes than there are": (
        b'{"op":"alloc","id":1,"size_bytes":1%s}\n{"op":"free","id":1}\n' % (b"0" * 400) * 4,
        "a block of 2**1328 or more bytes is larger than any memory",
    ),
    "more than can be added up": (
        b'{"op":"alloc","id":1,"size_bytes":9223372036854775808}\n{"op":"free","id":1}\n' * 4,
        "9223372036854775808 bytes",
    ),
    "nested": (b"[" * 100_000 + b"\n", "line 1: no event"),
    "half a gzip": (gzip.compress(b"{}" * 999)[:20], "cannot read the event log"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_logs_are_one_line(tmp_path, case):
    """The file, the line and what is wrong with it."""
    content, message = BAD[case]
    path = tmp_path / "log.jsonl"
    path.write_bytes(content)
    with pytest.raises(TraceFileError) as caught:
        read_event_log(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_log(tmp_path):
    """As any file that is not there."""
    with pytest.raises(TraceFileError, match="cannot read the event log: No such file"):
        read_event_log(tmp_path / "missing.jsonl")


def layered(num_steps: int, *, num_layers: int = 24) -> list[Event]:
    """Steps of equal layers: a forward that saves, a backward that frees, and a gradient in between."""
    events: list[Event] = []

    def note(op: Any, id_: str, size_bytes: int = 0) -> None:
        events.append(Event(op=op, id=id_, size_bytes=size_bytes, time_s=1e-3 * len(events)))

    note("alloc", "weights", 10_000)
    for _ in range(num_steps):
        for layer in range(num_layers):
            note("alloc", f"saved {layer}", 100)
            note("alloc", f"work {layer}", 50)
            note("free", f"work {layer}")
        note("alloc", "loss", 8)
        for layer in reversed(range(num_layers)):
            note("alloc", f"gradient {layer}", 60)
            note("free", f"saved {layer}")
            note("alloc", f"work {layer}", 50)
            note("free", f"work {layer}")
            note("free", f"gradient {layer}")
        note("free", "loss")
    return events


def test_layers_of_one_step_are_refused():
    """In a log of one step its layers repeat: that is no step, and the error says how it is known."""
    with pytest.raises(TraceFileError) as caught:
        trace_of_events(layered(1), source="log")
    assert str(caught.value) == (
        "log: no iteration found: what repeats, 3 events 24 times, is 37% of the log and reaches 10.99 KiB of its peak "
        "of 12.18 KiB, each time with 100 B more than before; log more steps, or take the whole log as one"
    )
    assert peak(trace_of_events(layered(1), source="log", whole=True)).size_bytes == 10_000 + 2400 + 8 + 60
    assert peak(trace_of_events(layered(4), source="log")).size_bytes == 10_000 + 2400 + 8 + 60


def test_releases_alone_are_no_step():
    """Blocks that are freed one after the other repeat as well."""
    names = "abcdef"
    events = [Event(op="alloc", id=name, size_bytes=8 + place) for place, name in enumerate(names)]
    events += [Event(op="free", id=name) for name in names]
    with pytest.raises(TraceFileError, match="log: no iteration found: what repeats, 1 events, is releases alone"):
        trace_of_events(events, source="log")


def test_a_short_stretch_that_reaches_the_peak_is_a_step():
    """Evaluations in between break the stretch; what is left of it is a step all the same."""
    step, weights = layered(1)[1:], layered(1)[:1]
    events = list(weights)
    for part in range(6):
        events += step * 3
        events += [Event(op=op, id=f"evaluated {part}", size_bytes=part + 1) for op in ("alloc", "free")]
    events = [msgspec.structs.replace(event, time_s=1e-3 * index) for index, event in enumerate(events)]
    found = trace_of_events(events, source="log")
    assert f"iteration of {len(step)} events" in found.header.comment
    assert peak(found).size_bytes == 10_000 + 2400 + 8 + 60
