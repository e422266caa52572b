"""Sizes are read as they were meant, or refused in one line."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchdelta.errors import SizeError, TorchdeltaError
from torchdelta.units import format_bytes, parse_size

DECIMAL_UNITS = ("kB", "MB", "GB", "TB", "PB")
BINARY_UNITS = ("KiB", "MiB", "GiB", "TiB", "PiB")


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("8GiB", 8 * 2**30),
        ("512MB", 512 * 10**6),
        (" 1.5 gib ", 3 * 2**29),
        (".5MiB", 2**19),
        ("0.1GB", 10**8),
        ("100000", 100_000),
        ("65536", 65536),
        ("7 b", 7),
        ("7 bytes", 7),
        ("1kb", 1000),
        ("1KB", 1000),
        (4096, 4096),
        (2**63 - 1, 2**63 - 1),
    ],
)
def test_reads_what_people_write(text, size_bytes):
    """Units of 1000 and of 1024, fractions, blanks and plain ints are read exactly."""
    assert parse_size(text) == size_bytes


@given(number=st.integers(1, 4000), power=st.integers(1, 5), binary=st.booleans(), data=st.data())
def test_the_case_of_letters_does_not_matter(number, power, binary, data):
    """Every spelling of a unit by upper and lower case gives the same bytes: a lower-case b is no bit."""
    unit = (BINARY_UNITS if binary else DECIMAL_UNITS)[power - 1]
    spelled = "".join(data.draw(st.sampled_from([letter.lower(), letter.upper()])) for letter in unit)
    assert parse_size(f"{number}{spelled}") == number * (1024 if binary else 1000) ** power


@given(total_bytes=st.integers(1000, 2**60), percent=st.integers(1, 100))
def test_a_percentage_is_a_share_of_the_total(total_bytes, percent):
    """A share is exact to the byte, and never more than the whole."""
    share_bytes = parse_size(f"{percent}%", total_bytes=total_bytes)
    assert share_bytes == total_bytes * percent // 100
    assert share_bytes <= total_bytes


@given(
    st.one_of(
        st.text(max_size=80),
        st.floats(),
        st.integers(),
        st.booleans(),
        st.none(),
        st.binary(max_size=8),
        st.from_regex(r"\s*-?[0-9.]{0,30}\s*[a-zA-Z%]{0,5}\s*", fullmatch=True),
    )
)
def test_anything_else_is_one_clear_line(size):
    """Whatever comes in, the answer is a positive number of bytes or a SizeError of one line that names the option."""
    try:
        size_bytes = parse_size(size, total_bytes=10**9, name="memory budget")
    except SizeError as error:
        message = str(error)
        assert message.isprintable()
        assert message.startswith("memory budget ")
        assert len(message) < 300
    else:
        assert 0 < size_bytes < 2**63
        assert not isinstance(size, (float, bool))


@pytest.mark.parametrize(
    ("size", "parts"),
    [
        (0.8, ["0.8", "is ambiguous", "'80%'", "'0.8GiB'"]),
        (1.0, ["'100%'", "'1.0GiB'"]),
        ("0.8", ["'80%'", "'0.8GiB'"]),
        (8.0, ["is ambiguous", "'8.0GiB'", "percentage"]),
        (float("nan"), ["nan is not a size"]),
        (float("inf"), ["inf is not a size"]),
        (-0.5, ["-0.5", "at least 1 byte"]),
        ("-1GiB", ["'-1GiB'", "positive"]),
        (0, ["at least 1 byte"]),
        (-5, ["-5 bytes"]),
        ("0.4B", ["0 bytes", "at least 1 byte"]),
        (2**63, ["largest"]),
        ("9000000000GiB", ["largest"]),
        ("8Gib/s", ["is not a size"]),
        ("8 Gbit", ["unknown unit", "GiB"]),
        ("8G", ["'8G' has an unknown unit: did you mean '8GiB' or '8GB'?"]),
        ("1.5 k", ["did you mean '1.5KiB' or '1.5kB'?"]),
        ("8gi", ["did you mean '8GiB'?"]),
        ("80", ["'80' is 80 bytes: name the unit, such as '80GiB'"]),
        ("65535", ["name the unit"]),
        ("0", ["at least 1 byte"]),
        (0.5 * 24e9, ["12000000000.0 is a float", "int(...)", "12000000000 bytes"]),
        (1024.0, ["1024 bytes"]),
        (1023.0, ["'1023.0GiB'"]),
        ("", ["is not a size"]),
        ("101%", ["more than 100%"]),
        (True, ["not bool"]),
        (None, ["not NoneType"]),
    ],
)
def test_a_refusal_says_what_would_work(size, parts):
    """The message names what was written and what to write instead."""
    with pytest.raises(SizeError) as caught:
        parse_size(size, total_bytes=10**9)
    for part in parts:
        assert part in str(caught.value)


def test_numbers_of_numpy_are_bytes():
    """What a program has computed with numpy need not be converted; its floats and bools are refused like others."""
    assert type(parse_size(np.int64(2**33))) is int
    assert parse_size(np.uint32(7)) == 7
    for size in (np.float32(0.5), np.float64(0.5), np.True_, np.int64(-1)):
        with pytest.raises(SizeError):
            parse_size(size)


@pytest.mark.parametrize("size", [0.8, 8.0, 8e9, "0.8", "auto", "8 Gbit", float("nan"), None])
def test_no_percentage_is_advised_where_none_is_taken(size):
    """It would be refused in turn."""
    with pytest.raises(SizeError) as caught:
        parse_size(size, takes_shares=False)
    assert "%" not in str(caught.value)


def test_a_percentage_of_nothing_is_refused():
    """Where there is no whole, a percentage has no meaning."""
    with pytest.raises(SizeError, match="a percentage of an unknown total"):
        parse_size("80%")


def test_a_size_error_is_a_value_error():
    """Callers that know nothing of torchdelta catch it as ValueError."""
    assert issubclass(SizeError, (ValueError, TorchdeltaError))


@given(st.integers(1, 2**62))
def test_written_sizes_read_back_to_about_the_same(size_bytes):
    """What format_bytes writes, parse_size reads to within its two decimals."""
    again_bytes = parse_size(format_bytes(size_bytes))
    assert abs(again_bytes - size_bytes) <= max(1, size_bytes * 0.00501)


@given(st.integers(1, 2**50))
def test_sizes_that_are_rounded_up_are_enough(size_bytes):
    """What is written with `rounds_up` is read as no less, and as hardly more."""
    again_bytes = parse_size(format_bytes(size_bytes, rounds_up=True))
    assert 0 <= again_bytes - size_bytes <= max(1, size_bytes * 0.0101)


@given(st.integers(1, 2**50))
def test_sizes_that_are_rounded_down_are_there(size_bytes):
    """What is written with `rounds_down` is read as no more, and as hardly less: two decimals and a byte."""
    again_bytes = parse_size(format_bytes(size_bytes, rounds_down=True))
    assert 0 <= size_bytes - again_bytes <= size_bytes * 0.01 + 1


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (-(2**31), "-2.00 GiB"),
        (2**20 - 1, "1.00 MiB"),
        (2**50 * 5000, "5000.00 PiB"),
    ],
)
def test_written_sizes(size_bytes, text):
    """Signs, the ends of a unit's range, and more than the largest unit."""
    assert format_bytes(size_bytes) == text
