"""Parses and formats sizes: "8GiB", "512MB", "80%", 1073741824.

GiB is 2**30 and GB is 10**9, in upper or lower case. A final "b" never means bits. A bare float is refused, because 0.8
may mean "80 %" or "0.8 GiB".
"""

import math
import re
from fractions import Fraction
from numbers import Integral
from typing import Final

from torchdelta.errors import SizeError

__all__ = ["format_bytes", "parse_size"]

_UNIT_BYTES: Final = {
    "": 1,
    "b": 1,
    "byte": 1,
    "bytes": 1,
    **{prefix + "b": 1000**power for power, prefix in enumerate("kmgtp", start=1)},
    **{prefix + "ib": 1024**power for power, prefix in enumerate("kmgtp", start=1)},
}
_UNITS_TEXT: Final = "B, kB, MB, GB, TB, PB (powers of 1000), KiB, MiB, GiB, TiB, PiB (powers of 1024)"
# What people write without the final "B": "8G", "8Gi".
_SHORT_UNITS: Final = {
    **{prefix.lower(): (f"{prefix.upper()}iB", f"{prefix}B") for prefix in "kMGTP"},
    **{f"{prefix.lower()}i": (f"{prefix.upper()}iB",) for prefix in "kMGTP"},
}
_LEAST_WITHOUT_UNIT: Final = 2**16  # a smaller number without a unit was meant in another one
_LEAST_FLOAT_BYTES: Final = 1024  # a float from here on is a computed number of bytes
# Twenty digits on either side are more than a size needs; without a limit a long text would take long to parse.
_SIZE_PATTERN: Final = re.compile(r"(?P<number>[0-9]{1,20}(?:\.[0-9]{1,20})?|\.[0-9]{1,20})\s*(?P<unit>[a-z]*|%)")
# A file offset and a torch size are signed 64-bit numbers.
_MAX_BYTES: Final = 2**63 - 1
_BINARY_UNITS: Final = ("KiB", "MiB", "GiB", "TiB", "PiB")


def parse_size(size: object, *, total_bytes: int | None = None, name: str = "size", takes_shares: bool = True) -> int:
    """Parse a size into bytes.

    Args:
        size: An int of bytes, or text such as "8GiB", "512 MB", "1.5gib" or "80%". Fractions of a byte are cut off.
            Text without a unit is bytes, from 65536 on: "8" was hardly meant as 8 bytes, and is refused.
        total_bytes: The size that is 100 %. Without it a percentage is refused.
        name: The name of the option, for error messages.
        takes_shares: Whether a message may advise to write a percentage.

    Returns:
        A number of bytes, at least 1.

    Raises:
        SizeError: The size cannot be parsed, is a bare float, or is not positive. The message is one line.

    Example:
        >>> parse_size("8GiB")
        8589934592
        >>> parse_size("80%", total_bytes=1000)
        800
    """
    # In Python bool is an int, but True never means one byte.
    if not isinstance(size, bool) and isinstance(size, Integral):  # an int, or one of numpy's
        return _checked(int(size), size, name)
    if isinstance(size, float):
        raise SizeError(_float_message(size, name, takes_shares=takes_shares))
    if not isinstance(size, str):
        examples = _examples(takes_shares=takes_shares)
        raise SizeError(f"{name} must be an int of bytes or text such as {examples}, not {type(size).__name__}")
    match = _SIZE_PATTERN.fullmatch(size.strip().lower())
    if match is None:
        hint = " (a size is positive)" if size.strip().startswith("-") else ""
        raise SizeError(f"{name} {_shown(size)} is not a size{hint}: write a number and one of {_units(takes_shares)}")
    # Fraction is exact where a float would be off by bytes: "0.1GB" is 100000000.
    number, unit = Fraction(match["number"]), match["unit"]
    if unit == "%":
        return _checked(_share_bytes(number, total_bytes, size, name), size, name)
    if unit == "" and "." in match["number"]:
        raise SizeError(_float_message(size.strip(), name, takes_shares=takes_shares))
    if unit not in _UNIT_BYTES:
        use = f"use one of {_units(takes_shares)}"
        if unit in _SHORT_UNITS:
            use = f"did you mean {' or '.join(repr(match['number'] + full) for full in _SHORT_UNITS[unit])}?"
        raise SizeError(f"{name} {_shown(size)} has an unknown unit: {use}")
    if unit == "" and 0 < number < _LEAST_WITHOUT_UNIT:
        raise SizeError(f"{name} {_shown(size)} is {number} bytes: name the unit, such as '{number}GiB'")
    return _checked(int(number * _UNIT_BYTES[unit]), size, name)


def format_bytes(size_bytes: float, *, rounds_up: bool = False, rounds_down: bool = False) -> str:
    """Format bytes with a unit (a power of 1024) and two decimals.

    Args:
        size_bytes: The bytes.
        rounds_up: Whether the text stands for at least so many bytes, and not for the nearest two decimals. A budget
            that a person is told to set has to be enough when they type it as it is shown.
        rounds_down: Whether it stands for at most so many bytes: what there is has to be there as it is shown.

    Example:
        >>> format_bytes(4_617_089_843)
        '4.30 GiB'
        >>> format_bytes(-2048)
        '-2.00 KiB'
        >>> format_bytes(4_620_000_000), format_bytes(4_620_000_000, rounds_up=True)
        ('4.30 GiB', '4.31 GiB')
        >>> format_bytes(4_617_089_843, rounds_down=True)
        '4.29 GiB'
    """
    if size_bytes < 0:
        return "-" + format_bytes(-size_bytes)
    if size_bytes < 1024:
        return f"{size_bytes:.0f} B"
    # From there on, two decimals would round up to 1024.00 of this unit.
    most = 1024 if rounds_down else 1023.99 if rounds_up else 1023.995
    power = 1
    while size_bytes / 1024**power >= most and power < len(_BINARY_UNITS):
        power += 1
    number = size_bytes / 1024**power
    if rounds_up:
        number = math.ceil(100 * number) / 100
    elif rounds_down:
        number = math.floor(100 * number) / 100
    return f"{number:.2f} {_BINARY_UNITS[power - 1]}"


def _share_bytes(percent: Fraction, total_bytes: int | None, size: str, name: str) -> int:
    if percent > 100:
        raise SizeError(f"{name} {_shown(size)} is more than 100%: use a percentage up to 100%")
    if total_bytes is None:
        raise SizeError(f"{name} {_shown(size)} is a percentage of an unknown total: write bytes, such as '8GiB'")
    return int(percent * total_bytes / 100)


def _checked(size_bytes: int, size: object, name: str) -> int:
    if size_bytes <= 0:
        raise SizeError(f"{name} {_shown(size)} is {size_bytes} bytes: a size is at least 1 byte")
    if size_bytes > _MAX_BYTES:
        raise SizeError(f"{name} {_shown(size)} is more than {_MAX_BYTES} bytes, the largest that can be counted here")
    return size_bytes


def _examples(*, takes_shares: bool) -> str:
    return "'8GiB' or '80%'" if takes_shares else "'8GiB'"


def _units(takes_shares: bool) -> str:
    return f"{_UNITS_TEXT} or %" if takes_shares else _UNITS_TEXT


def _float_message(number: float | str, name: str, *, takes_shares: bool) -> str:
    if isinstance(number, float) and not math.isfinite(number):
        examples = _examples(takes_shares=takes_shares)
        return f"{name} {number} is not a size: write bytes as an int, or text such as {examples}"
    if isinstance(number, float) and number <= 0:
        return f"{name} {number} is not a size: a size is at least 1 byte, written as an int or as text such as '8GiB'"
    if isinstance(number, float) and _LEAST_FLOAT_BYTES <= number <= _MAX_BYTES:
        return f"{name} {number} is a float: write the bytes as an int, int(...) around it: {int(number)} bytes"
    if not takes_shares:
        return f"{name} {number} is ambiguous: write '{number}GiB' for an amount"
    if float(number) > 1:
        return f"{name} {number} is ambiguous: write '{number}GiB' for an amount, or a percentage such as '80%'"
    percent = f"{float(Fraction(str(number)) * 100):.6g}%"
    return f"{name} {number} is ambiguous: write '{percent}' for a share of the memory, or '{number}GiB' for an amount"


def _shown(size: object) -> str:
    text = repr(size)
    return text if len(text) <= 60 else text[:57] + "..."
