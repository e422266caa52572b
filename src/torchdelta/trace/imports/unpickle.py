"""Reads a pickle that holds plain data, and refuses every other.

A pickle is a program: unpickling one from a stranger runs what the stranger likes. Forbidding its imports alone
(`Unpickler.find_class`) leaves ways to fill the memory (the C unpickler makes an array as long as the largest memo
number that a file names). So this is an interpreter of its own for the few instructions that dicts, lists, tuples,
texts and numbers need; any other one is an error that names it. Nothing that it makes is larger than the file. Keys
of dicts are no tuples: to hash one takes as long as all that is inside it, a shared part as often as it occurs there.

Slower than `pickle` (a few microseconds an instruction), which a file of other people is worth.
"""

import io
import pickletools
from collections.abc import Iterator
from typing import Any, Final

from torchdelta.errors import TraceFileError

__all__ = ["load_plain"]

_MARK: Final = object()
_CONSTANTS: Final[dict[str, Any]] = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_EMPTY: Final[dict[str, type]] = {"EMPTY_DICT": dict, "EMPTY_LIST": list, "EMPTY_TUPLE": tuple}
_VALUES: Final = frozenset(
    "BININT BININT1 BININT2 LONG1 LONG4 INT LONG BINFLOAT FLOAT BINUNICODE SHORT_BINUNICODE BINUNICODE8 UNICODE".split()  # noqa: SIM905 - names of instructions
)
_TUPLES: Final = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_KEYS: Final = frozenset({str, int, float, bool, type(None)})
_IGNORED: Final = frozenset({"PROTO", "FRAME"})


def load_plain(data: bytes) -> Any:
    """Return what a pickle holds: dicts, lists, tuples, texts, numbers, True, False and None.

    Raises:
        TraceFileError: It is no pickle, is cut short, or asks for anything else. Nothing was run.
    """
    try:
        return _interpret(data)
    except TraceFileError:
        raise
    except RecursionError as error:
        raise TraceFileError("the pickle is nested too deeply") from error
    # Whatever a damaged program does wrong: values that are missing, of the wrong type, or not to be read.
    except (ValueError, IndexError, KeyError, TypeError, AttributeError, EOFError, OverflowError) as error:
        text = " ".join(str(error).split())[:200]
        raise TraceFileError(f"not a pickle, or a damaged one: {text or type(error).__name__}") from error


def _interpret(data: bytes) -> Any:
    stack: list[Any] = []
    memo: dict[int, Any] = {}
    for opcode, value, at in pickletools.genops(io.BytesIO(data)):
        name, position = opcode.name, at or 0
        argument: Any = value
        if name in _VALUES:
            stack.append(argument)
        elif name == "MEMOIZE":
            memo[len(memo)] = stack[-1]
        elif name in {"BINPUT", "LONG_BINPUT", "PUT"}:
            memo[int(argument)] = stack[-1]
        elif name in {"BINGET", "LONG_BINGET", "GET"}:
            stack.append(memo[int(argument)])
        elif name == "MARK":
            stack.append(_MARK)
        elif name in _EMPTY:
            stack.append(_EMPTY[name]())
        elif name in _CONSTANTS:
            stack.append(_CONSTANTS[name])
        elif name in {"SETITEMS", "SETITEM"}:
            items = _to_mark(stack) if name == "SETITEMS" else [stack.pop(-2), stack.pop()]
            _expect(stack[-1], dict, position).update(_pairs(items, position))
        elif name in {"APPENDS", "APPEND"}:
            items = _to_mark(stack) if name == "APPENDS" else [stack.pop()]
            _expect(stack[-1], list, position).extend(items)
        elif name in _TUPLES:
            count = _TUPLES[name]
            items = stack[-count:]
            if len(items) < count or any(item is _MARK for item in items):
                raise ValueError(f"a tuple of {count} without its items at byte {position}")
            stack[-count:] = [tuple(items)]
        elif name == "TUPLE":
            stack.append(tuple(_to_mark(stack)))
        elif name == "LIST":
            stack.append(_to_mark(stack))
        elif name == "DICT":
            items = _to_mark(stack)
            stack.append(dict(_pairs(items, position)))
        elif name == "STOP":
            if len(stack) != 1 or stack[0] is _MARK:
                raise ValueError(f"it leaves {len(stack)} values")
            return stack[0]
        elif name not in _IGNORED:
            raise TraceFileError(
                f"the pickle has the instruction {name} at byte {position}, which plain data do not need: refused"
            )
    raise ValueError("it has no end")


def _pairs(items: list[Any], position: int) -> Iterator[tuple[Any, Any]]:
    """Return keys and values, given one after the other."""
    for key in items[::2]:
        if type(key) not in _KEYS:
            raise TypeError(f"a {type(key).__name__} is the key of a dict at byte {position}")
    return zip(items[::2], items[1::2], strict=True)


def _to_mark(stack: list[Any]) -> list[Any]:
    """Take off what lies above the last mark, and the mark."""
    place = len(stack) - 1
    while stack[place] is not _MARK:
        place -= 1
        if place < 0:
            raise ValueError("it has no mark")
    items = stack[place + 1 :]
    del stack[place:]
    return items


def _expect(value: Any, kind: type, position: int) -> Any:
    if type(value) is not kind:
        raise TypeError(f"no {kind.__name__} at byte {position}")
    return value
