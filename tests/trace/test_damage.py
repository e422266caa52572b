"""Damaged, foreign, hostile and newer files: each is one clear line that names the file and the line."""

import gzip
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.trace.strategies import example
from torchdelta.errors import TraceFileError
from torchdelta.trace import frame
from torchdelta.trace.file import read_header, read_trace
from torchdelta.trace.validate import find_fault

GOLDEN = Path(__file__).with_name("example.trace").read_bytes()
LINES = gzip.decompress(GOLDEN).splitlines()
NUM_LINES = len(LINES)

# The folder of a test is shared by its examples: each overwrites the file of the one before.
shared_folder = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


def message_of(path: Path, content: bytes) -> str | None:
    """Return the message that reading the content gives, None if it is read as the example.

    Whatever else comes back must be a valid trace: damage that nobody can tell from another step.
    """
    path.write_bytes(content)
    try:
        trace = read_trace(path)
    except TraceFileError as error:
        message = str(error)
        assert message.startswith(f"{path}: ")
        assert message.isprintable()
        return message.removeprefix(f"{path}: ")
    assert find_fault(trace) is None
    return None if trace == example() else "another trace"


def lines_of(*lines: bytes) -> bytes:
    """Return a file of these lines."""
    return gzip.compress(b"".join(line + b"\n" for line in lines), mtime=0)


def test_truncated_anywhere(tmp_path: Path) -> None:
    """A file that was cut short at any byte is noticed."""
    for size in range(len(GOLDEN)):
        message = message_of(tmp_path / "step.trace", GOLDEN[:size])
        assert message is not None
        assert ("cut short" in message) == (size > 1), message
    assert message_of(tmp_path / "step.trace", GOLDEN) is None


def test_text_truncated_anywhere(tmp_path: Path) -> None:
    """A whole gzip file around text that was cut short is noticed, too."""
    text = gzip.decompress(GOLDEN)
    for size in range(len(text) - 1):
        assert message_of(tmp_path / "step.trace", gzip.compress(text[:size], 1)) not in {None, "another trace"}


def test_any_flipped_bit(tmp_path: Path) -> None:
    """A flipped bit is an error unless the text is the same: in the gzip header, or in a distance to a twin."""
    text = gzip.decompress(GOLDEN)
    for place in range(len(GOLDEN)):
        for bit in range(8):
            damaged = bytearray(GOLDEN)
            damaged[place] ^= 1 << bit
            message = message_of(tmp_path / "step.trace", bytes(damaged))
            assert message != "another trace"
            if message is None:
                assert 3 <= place < 10 or gzip.decompress(bytes(damaged)) == text, (place, bit)


@shared_folder
@given(st.binary(max_size=200))
def test_any_bytes(tmp_path: Path, content: bytes) -> None:
    """Arbitrary bytes, bare, behind a gzip header and compressed, are never anything but our error."""
    path = tmp_path / "step.trace"
    for damaged in (content, GOLDEN[:10] + content, gzip.compress(content, 1), GOLDEN + content):
        message = message_of(path, damaged)
        assert message is not None or damaged.rstrip(b"\0") == GOLDEN.rstrip(b"\0")


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@settings(shared_folder, max_examples=300)
@given(data=st.data())
def test_any_value_in_any_field(tmp_path: Path, data: st.DataObject) -> None:
    """A field that holds any other JSON value is our error, or gives a trace that is valid all the same."""
    place = data.draw(st.integers(0, NUM_LINES - 1))
    record = json.loads(LINES[place])
    before = json.dumps(record)
    record[data.draw(st.sampled_from(sorted(record)))] = data.draw(json_values | st.integers(-2, 10))
    line = json.dumps(record)
    message = message_of(tmp_path / "step.trace", lines_of(*LINES[:place], line.encode(), *LINES[place + 1 :]))
    assert message is None or line != before


@settings(shared_folder, max_examples=300)
@given(data=st.data())
def test_any_bytes_in_any_line(tmp_path: Path, data: st.DataObject) -> None:
    """Any bytes in place of any part of the text are our error, or give a trace that is valid all the same."""
    text = gzip.decompress(GOLDEN)
    start = data.draw(st.integers(0, len(text)))
    stop = data.draw(st.integers(start, min(len(text), start + 40)))
    damaged = text[:start] + data.draw(st.binary(max_size=8)) + text[stop:]
    message = message_of(tmp_path / "step.trace", gzip.compress(damaged, 1))
    assert message is None or damaged != text


@pytest.mark.parametrize("place", range(NUM_LINES))
def test_lost_and_doubled_lines(tmp_path: Path, place: int) -> None:
    """No line can be left out, and none can occur twice."""
    lost = lines_of(*LINES[:place], *LINES[place + 1 :])
    doubled = lines_of(*LINES[: place + 1], *LINES[place:])
    for damaged in (lost, doubled):
        assert message_of(tmp_path / "step.trace", damaged) not in {None, "another trace"}


def changed(place: int, old: bytes, new: bytes) -> bytes:
    """Return the example's file with some text of one line, counted from 1, replaced."""
    assert old in LINES[place - 1]
    return lines_of(*LINES[: place - 1], LINES[place - 1].replace(old, new, 1), *LINES[place:])


DAMAGED = {
    "empty": (b"", "the file is empty"),
    "empty inside": (gzip.compress(b""), "the file is empty"),
    "plain text": (b"\n".join(LINES), "not a trace: the file is not gzip-compressed"),
    "flipped checksum": (
        GOLDEN[:-8] + b"\0" + GOLDEN[-7:],
        f"line {NUM_LINES + 1}: the compressed data are damaged: CRC check failed",
    ),
    "bytes after the end": (
        GOLDEN + b"garbage",
        f"line {NUM_LINES + 1}: the compressed data are damaged: Not a gzipped file (b'ga')",
    ),
    "cut between gzip members": (
        lines_of(*LINES[:5]),
        "line 6: the file ends without an end record: it was cut short",
    ),
    "two files joined": (
        GOLDEN + GOLDEN,
        f"line {NUM_LINES + 1}: there is a record after the end record",
    ),
    "lost op": (
        lines_of(*LINES[:16], *LINES[17:]),
        "line 19: the end record announces 9 buffers, 7 ops and 2 saved tensors; the file has 9 buffers, 6 ops and",
    ),
    "not JSON": (lines_of(LINES[0], b"hello"), "line 2: JSON is malformed: invalid character (byte 0)"),
    "not UTF-8": (
        changed(11, b"aten.mm", b"aten.\xff"),
        "line 11: 'utf-8' codec can't decode byte 0xff in position 5: invalid start byte",
    ),
    "blank line": (lines_of(LINES[0], b""), "line 2: Input data was truncated"),
    "a list": (lines_of(LINES[0], b"[]"), "line 2: Expected `object`, got `array`"),
    "unknown record": (changed(2, b"buffer", b"bufer"), "line 2: Invalid value 'bufer' - at `$.record`"),
    "header again": (lines_of(LINES[0], LINES[0]), "line 2: Invalid value 'header' - at `$.record`"),
    "unknown field": (
        changed(2, b'"saved"', b'"sawed"'),
        "line 2: Object contains unknown field `sawed`",
    ),
    "lost field": (changed(2, b'"id":0,', b""), "line 2: Object missing required field `id`"),
    "text for a number": (changed(2, b'"id":0', b'"id":"0"'), "line 2: Expected `int`, got `str` - at `$.id`"),
    "a float for bytes": (changed(2, b":24", b":24.5"), "line 2: Expected `int`, got `float` - at `$.size_bytes`"),
    "unknown kind": (changed(2, b'"parameter"', b'"wait"'), "line 2: Invalid enum value 'wait' - at `$.kind`"),
    "huge number": (
        changed(2, b":24", b":" + b"9" * 5000),
        "line 2: Integer value out of range - at `$.size_bytes`",
    ),
    "deep nesting": (
        changed(11, b"[1,0]", b"[" * 100_000),
        "line 11: Expected `int`, got `array` - at `$.reads[0]`",
    ),
    "deep nesting in what is skipped": (
        changed(11, b'{"record"', b'{"x":' + b"[" * 100_000 + b"]" * 100_000 + b',"record"'),
        "line 11: maximum recursion depth exceeded",
    ),
    "deep nesting in the header": (
        changed(1, b'{"record"', b'{"x":' + b'{"a":' * 100_000 + b"1" + b"}" * 100_000 + b',"record"'),
        "line 1: not the header of a trace: maximum recursion depth exceeded",
    ),
    "no time": (changed(11, b"3e-6", b"null"), "line 11: Expected `float`, got `null` - at `$.time_s`"),
    "no header": (lines_of(*LINES[1:]), "line 1: not the header of a trace: Object missing required field `format`"),
    "foreign header": (
        lines_of(b'{"format":"other","version":1}'),
        "line 1: not a trace: its format is 'other', not 'torchdelta-trace'",
    ),
    "incomplete header": (
        lines_of(b'{"record":"header","format":"torchdelta-trace","version":2}'),
        "line 1: not the header of a trace: Object missing required field `torch_version`",
    ),
    "newer version": (
        lines_of(b'{"record":"header","format":"torchdelta-trace","version":4,"colour":"blue"}'),
        "line 1: written by a newer torchdelta: format version 4, this one reads 3",
    ),
    "impossible version": (
        changed(1, b'"version":3', b'"version":0'),
        "line 1: unknown format version 0, this torchdelta reads 1, 2, 3",
    ),
    "negative size": (changed(4, b":48", b":-48"), "line 4: buffer 2: negative size_bytes -48"),
    "negative life": (
        changed(6, b'"death_op":7', b'"death_op":1'),
        "line 6: buffer 4: negative or empty life, death_op 1 is not above birth_op 2",
    ),
    "cyclic reads": (
        changed(13, b'"reads":[3]', b'"reads":[5]'),
        "line 13: op 2 'aten.sum.default': reads buffer 5 before its birth at op 3",
    ),
    "unordered ops": (
        lines_of(*LINES[:10], LINES[11], LINES[10], *LINES[12:]),
        "line 11: op 1 'aten.relu_.default': ops must be dense and in order, 0 expected",
    ),
    "overlapping versions": (
        changed(2, b'"death_op":6', b'"death_op":7'),
        "line 10: buffer 8: versions 0 and 8 of storage 0 overlap, one dies at op 7 and the next is born at 6",
    ),
    "view outside": (
        changed(18, b'"offset":0', b'"offset":1'),
        "line 18: saved tensor 0: its view ends at byte 36, but buffer 1 has 32 bytes",
    ),
    "no ops": (
        lines_of(LINES[0], b'{"record":"end","num_buffers":0,"num_ops":0,"num_saved_tensors":0}'),
        "line 1: header: the trace has no ops, so it is not a training step",
    ),
}


@pytest.mark.parametrize(("content", "expected"), DAMAGED.values(), ids=DAMAGED.keys())
def test_each_damage_is_one_clear_line(tmp_path: Path, content: bytes, expected: str) -> None:
    """Every kind of damage has a message of one line with the file, the line and the reason."""
    message = message_of(tmp_path / "step.trace", content)
    assert message is not None
    assert message.startswith(expected)  # and then perhaps numbers that depend on the zlib at hand


@pytest.mark.parametrize("read", [read_trace, read_header])
def test_files_that_cannot_be_opened(tmp_path: Path, read: Callable[[Path], object]) -> None:
    """A file that is not there, and a folder, are one clear line."""
    with pytest.raises(TraceFileError) as caught:
        read(tmp_path / "no.trace")
    assert str(caught.value) == f"{tmp_path / 'no.trace'}: cannot read the trace: No such file or directory"
    with pytest.raises(TraceFileError) as caught:
        read(tmp_path)
    assert str(caught.value) == f"{tmp_path}: cannot read the trace: Is a directory"


def test_endless_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A line that would fill the memory is refused when it passes the limit."""
    monkeypatch.setattr(frame, "MAX_LINE_BYTES", 1000)
    assert message_of(tmp_path / "step.trace", GOLDEN) is None
    hostile = lines_of(LINES[0], b" " * 1001)
    assert message_of(tmp_path / "step.trace", hostile) == "line 2: longer than 1000 bytes"
