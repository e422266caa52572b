"""Sizes on the command line."""

__all__ = ["number_or_text"]

_MOST_DIGITS = 30  # Python refuses to read numbers of thousands


def number_or_text(size: str) -> int | str:
    """Convert an argument for `units.parse_size`: digits alone become an int of bytes."""
    return int(size) if size.isdecimal() and len(size) < _MOST_DIGITS else size
