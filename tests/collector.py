"""Keeps old objects out of the collections in tests: what is imported is a million objects, each visited every time."""

import gc

_GROWTH = 1.25
_MANY = 100_000  # objects that a test's collections may visit; an import of torch's compiler makes more


class _LeftOut:
    """How many objects are left out, and how many were when everything had been given back last.

    The first number is added up and never too low: what dies meanwhile is not taken off. Python itself goes through all
    objects to count them, which takes a twentieth of a second: too long to ask before and after each test.
    """

    num_objects = 0
    num_after_all = 0


def leave_out() -> None:
    """Collect garbage, and leave what remains out of further collections, and of the scans for tensors."""
    gc.collect()
    _LeftOut.num_objects += len(gc.get_objects())
    gc.freeze()
    if not _LeftOut.num_after_all:
        _LeftOut.num_after_all = _LeftOut.num_objects


def leave_out_many() -> None:
    """Leave out what there is if it is much: what a test imported, or what one gave back by `gc.unfreeze()`."""
    if len(gc.get_objects()) > _MANY:
        leave_out()


def give_back() -> None:
    """Give all that was left out back to the collector if it has grown by a quarter since the last time.

    What has died in circles since then can only be collected now; but the next collection visits every object, which
    takes half a second and more: too long to do it after each file.
    """
    if _LeftOut.num_objects > _GROWTH * _LeftOut.num_after_all:
        _LeftOut.num_objects = gc.get_freeze_count()
    if _LeftOut.num_objects > _GROWTH * _LeftOut.num_after_all:
        gc.unfreeze()
        _LeftOut.num_objects = _LeftOut.num_after_all = 0
