"""Trace files: round trips, the documented bytes, streaming, and writes that fail."""

import errno
import gzip
import os
import re
import stat
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from tests.trace.strategies import example, traces
from torchdelta.errors import TraceFileError
from torchdelta.trace import frame
from torchdelta.trace.file import TraceWriter, read_header, read_records, read_trace, write_trace
from torchdelta.trace.model import Buffer, Trace

ROOT = Path(__file__).parents[2]
GOLDEN = Path(__file__).with_name("example.trace")

# The folder of a test is shared by its examples: each overwrites the file of the one before, which is itself a case.
shared_folder = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


@shared_folder
@given(trace=traces(resize=True))
def test_round_trip(trace: Trace, tmp_path: Path) -> None:
    """A trace that is written and read is the same trace."""
    write_trace(trace, tmp_path / "step.trace")
    assert read_trace(tmp_path / "step.trace") == trace
    assert read_header(tmp_path / "step.trace") == trace.header


@pytest.mark.rest
@shared_folder
@given(trace=traces(), data=st.data())
def test_round_trip_of_a_stream(trace: Trace, data: st.DataObject, tmp_path: Path) -> None:
    """Buffers may come in any order and anywhere among the others, as a recorder meets their deaths."""
    records = [*trace.ops, *trace.saved_tensors]
    for buffer in data.draw(st.permutations(trace.buffers)):
        records.insert(data.draw(st.integers(0, len(records))), buffer)
    with TraceWriter(tmp_path / "step.trace", trace.header) as writer:
        for record in records:
            writer.add(record)
    assert [record for _, record in read_records(tmp_path / "step.trace")] == [trace.header, *records]
    assert read_trace(tmp_path / "step.trace") == trace


def test_large_trace_in_several_flushes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the writer flushes between the lines makes no difference."""
    write_trace(example(), tmp_path / "once.trace")
    monkeypatch.setattr(frame, "_FLUSH_BYTES", 1)
    write_trace(example(), tmp_path / "often.trace")
    once, often = (gzip.decompress((tmp_path / name).read_bytes()) for name in ("once.trace", "often.trace"))
    assert once == often


def test_documented_lines() -> None:
    """The page of the format shows the example's file line by line as it is."""
    page = (ROOT / "docs/trace-format.md").read_text(encoding="utf-8")
    block = re.search(r"```json\n(.*?)```", page, re.DOTALL)
    assert block is not None
    assert gzip.decompress(GOLDEN.read_bytes()).decode() == block[1]


def test_golden_file_is_read_and_written(tmp_path: Path) -> None:
    """A file of this version is read forever, and written to the same text behind the same gzip header."""
    assert read_trace(GOLDEN) == example()
    write_trace(example(), tmp_path / "step.trace")
    written = (tmp_path / "step.trace").read_bytes()
    # The compressed part depends on the zlib at hand. The header does not: no flags, no time, any system.
    assert written[:10] == GOLDEN.read_bytes()[:10] == b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\xff"
    assert gzip.decompress(written) == gzip.decompress(GOLDEN.read_bytes())


def test_files_of_older_versions_are_read() -> None:
    """An older file gives the same trace, without what its version did not know."""
    trace = example()
    ops = tuple(replace(op, product=None) for op in trace.ops)
    assert read_trace(GOLDEN.with_name("example-2.trace")) == replace(trace, ops=ops)
    ops = tuple(replace(op, flops=0, dtype="", moved_bytes=0) for op in ops)
    assert read_trace(GOLDEN.with_name("example-1.trace")) == replace(trace, ops=ops)


def test_documented_load() -> None:
    """The table of the worked example holds the load curve, with and without workspaces."""
    page = (ROOT / "docs/trace-format.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| \d+ \| \w+ \| ([^|]*) \| \**(\d+)\** \| \**(\d+)\** \|$", page, re.MULTILINE)
    assert [int(load) for _, load, _ in rows] == [104, 104, 108, 112, 160, 132, 84]
    assert [int(load) for _, _, load in rows] == [104, 104, 108, 112, 160, 196, 84]
    for alive, load, _ in rows:
        assert sum(int(size) for size in re.findall(r": (\d+)", alive)) == int(load)


def test_same_trace_same_bytes(tmp_path: Path) -> None:
    """Neither the time nor the name of the file changes its bytes."""
    write_trace(example(), tmp_path / "one.trace")
    write_trace(example(), tmp_path / "two.trace")
    assert (tmp_path / "one.trace").read_bytes() == (tmp_path / "two.trace").read_bytes()


def test_appears_when_it_is_complete(tmp_path: Path) -> None:
    """While a trace is written, its name still shows the file before it; afterwards nothing else is left."""
    path = tmp_path / "step.trace"
    path.write_bytes(b"the file before")
    writer = TraceWriter(path, example().header)
    writer.add(example().buffers[0])
    assert path.read_bytes() == b"the file before"
    assert len(list(tmp_path.iterdir())) == 2
    writer.close()
    writer.close()
    assert [line for line, _ in read_records(path)] == [1, 2]
    assert list(tmp_path.iterdir()) == [path]


def test_what_cannot_be_encoded_leaves_no_file(tmp_path: Path) -> None:
    """A header with a value of a foreign type is an error before anything is written."""
    with pytest.raises(TypeError):
        TraceWriter(tmp_path / "step.trace", replace(example().header, comment=object()))
    assert not list(tmp_path.iterdir())


def test_has_ordinary_permissions(tmp_path: Path) -> None:
    """A trace is as readable for others as any file that the user makes."""
    ordinary = tmp_path / "ordinary"
    ordinary.touch()
    write_trace(example(), tmp_path / "step.trace")
    assert stat.S_IMODE((tmp_path / "step.trace").stat().st_mode) == stat.S_IMODE(ordinary.stat().st_mode)


def test_exception_leaves_nothing(tmp_path: Path) -> None:
    """A step that fails while it is recorded leaves no file, and the exception is the step's own."""

    def failing_step() -> None:
        with TraceWriter(tmp_path / "step.trace", example().header) as writer:
            writer.add(example().ops[0])
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        failing_step()
    assert not list(tmp_path.iterdir())


def test_closed_writer_refuses_records(tmp_path: Path) -> None:
    """A record after the end is an error, not a silent loss."""
    writer = TraceWriter(tmp_path / "step.trace", example().header)
    writer.close()
    with pytest.raises(TraceFileError, match=r"its writer is closed$"):
        writer.add(example().ops[0])
    writer.abort()
    assert (tmp_path / "step.trace").exists()


def test_invalid_trace_is_not_written(tmp_path: Path) -> None:
    """A trace that no reader would accept is refused before a file exists."""
    trace = example()
    broken = Trace(header=trace.header, buffers=trace.buffers[1:], ops=trace.ops)
    with pytest.raises(TraceFileError, match=r"not written: buffer 1: ids must be dense and in order, 0 expected$"):
        write_trace(broken, tmp_path / "step.trace")
    assert not list(tmp_path.iterdir())


def test_missing_folder(tmp_path: Path) -> None:
    """A place that does not exist is one clear line."""
    path = tmp_path / "nowhere" / "step.trace"
    with pytest.raises(TraceFileError) as caught:
        write_trace(example(), path)
    assert str(caught.value) == f"{path}: cannot write the trace: No such file or directory"


def test_name_of_a_folder(tmp_path: Path) -> None:
    """A name that is taken by a folder is one clear line, and no temporary file stays."""
    path = tmp_path / "step.trace"
    path.mkdir()
    with pytest.raises(TraceFileError, match=r"cannot write the trace: Is a directory$"):
        write_trace(example(), path)
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("flush_bytes", [200, 2**30], ids=["while it is written", "at the end"])
def test_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flush_bytes: int) -> None:
    """A disk that fills up is one clear line, and no temporary file stays."""

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(frame, "_FLUSH_BYTES", flush_bytes)
    monkeypatch.setattr(gzip.GzipFile, "write", full)
    with pytest.raises(TraceFileError, match=r"cannot write the trace: No space left on device$"):
        write_trace(example(), tmp_path / "step.trace")
    assert not list(tmp_path.iterdir())


def test_hundred_thousand_buffers(tmp_path: Path) -> None:
    """A large trace goes through in bounded lines and comes back the same."""
    trace = example()
    more = tuple(
        Buffer(id=9 + i, storage_id=7 + i, size_bytes=i, kind="constant", birth_op=-1, death_op=7)
        for i in range(100_000)
    )
    large = Trace(header=trace.header, buffers=trace.buffers + more, ops=trace.ops, saved_tensors=trace.saved_tensors)
    write_trace(large, tmp_path / "step.trace")
    assert read_trace(tmp_path / "step.trace") == large


@pytest.mark.parametrize(
    ("name", "message"), [("a" * 300, "File name too long"), ("a\0b", "embedded null byte")], ids=["long", "null"]
)
def test_impossible_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, message: str) -> None:
    """A name that no file can have is one clear line, to write and to read."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(TraceFileError, match=f"cannot write the trace: {message}"):
        write_trace(example(), name)
    with pytest.raises(TraceFileError, match=f"cannot read the trace: {message}"):
        read_trace(name)
    assert not list(tmp_path.iterdir())


def test_text_that_is_not_unicode(tmp_path: Path) -> None:
    """A lone surrogate, as a file's name may have it, is one clear line, and no file stays."""
    odd = "caf\udce9"
    for trace in (
        replace(example(), header=replace(example().header, comment=odd)),
        replace(example(), ops=(replace(example().ops[0], name=odd), *example().ops[1:])),
    ):
        with pytest.raises(TraceFileError, match="cannot write the trace: 'utf-8' codec can't encode"):
            write_trace(trace, tmp_path / "step.trace")
    assert not list(tmp_path.iterdir())


def test_what_is_no_file_is_not_replaced(tmp_path: Path) -> None:
    """A pipe (or "/dev/null") stays what it is; a link is followed, and stays a link."""
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(TraceFileError, match="pipe: cannot write the trace: the path exists and is not a regular file"):
        write_trace(example(), tmp_path / "pipe")
    assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)
    (tmp_path / "link").symlink_to(tmp_path / "step.trace")
    write_trace(example(), tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert read_trace(tmp_path / "step.trace") == example()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "pipe", "step.trace"]
