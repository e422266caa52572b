"""A pytest plugin: a test fails when a change makes a training step outgrow a machine.

    @pytest.mark.fits("8GiB", machine="rtx4090")
    def test_finetuning_fits():
        return model, inputs          # as `torchdelta trace` takes them

pytest finds it where torchdelta is installed (`pip install torchdelta[pytest]`); `-p no:torchdelta` leaves it out. The
test's function builds model and inputs, and takes fixtures and parameters as other tests do. It allocates nothing and
needs no GPU: the step runs on fake tensors. See docs/howto/test-the-memory.md.

[Note: a plugin that every run loads]
pytest imports it at the start of each run in such an environment, whatever is tested: it imports no torch until a test
has the marker.
"""

from __future__ import annotations

import inspect
import unittest
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["pytest_collection_modifyitems", "pytest_configure", "pytest_pyfunc_call"]

_MARKER = "fits"
_USAGE = (
    "fits(size=None, *, machine, inside_budget=False, num_steps=1000, optimizer='adamw'): the test returns a model and "
    "its inputs, and fails if a training step of it takes more than that size on that machine"
)


def pytest_configure(config: pytest.Config) -> None:
    """Make the marker known."""
    config.addinivalue_line("markers", _USAGE)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Refuse the marker where it would do nothing: on what is no function that pytest itself calls."""
    for item in items:
        if item.get_closest_marker(_MARKER) is None:
            continue
        owner = getattr(item, "cls", None)
        is_unittest = isinstance(owner, type) and issubclass(owner, unittest.TestCase)
        if not isinstance(item, pytest.Function) or is_unittest:
            raise pytest.UsageError(
                f"{item.nodeid}: the marker fits is for functions and methods, not for {_kind(item)}"
            )


def _kind(item: pytest.Item) -> str:
    return "those of a unittest.TestCase" if isinstance(item, pytest.Function) else type(item).__name__


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> object | None:
    """Run a test that has the marker, once for each one."""
    markers = list(pyfuncitem.iter_markers(_MARKER))
    if not markers:
        return None
    build = _build(pyfuncitem)
    for marker in reversed(markers):  # the topmost one last, as decorators run
        _check(pyfuncitem, build, marker)
    return True


def _build(item: pytest.Function) -> Callable[[], Any]:
    """Return the test's function with its fixtures and parameters filled in."""
    function: Any = item.obj
    names = inspect.signature(function).parameters
    arguments = {name: value for name, value in item.funcargs.items() if name in names}  # others are fixtures in use

    def build() -> Any:
        return function(**arguments)

    build.__module__, build.__qualname__ = function.__module__, item.name
    return build


def _check(item: pytest.Function, build: Callable[[], Any], marker: pytest.Mark) -> None:
    wrong = _wrong(item, build, marker)
    if wrong is not None:  # outside of all handlers: pytest shows what an exception was raised from
        pytest.fail(wrong, pytrace=False)


def _wrong(item: pytest.Function, build: Callable[[], Any], marker: pytest.Mark) -> str | None:
    """Return why a test fails, None if its step fits."""
    from torchdelta.errors import TorchdeltaError
    from torchdelta.integrations.fits import limit_of, message, size_of

    try:
        limit = limit_of(*marker.args, **marker.kwargs)
    except TypeError as error:
        return f"{str(error).replace('limit_of()', f'@pytest.mark.{_MARKER}')}: use {_USAGE}"
    except TorchdeltaError as error:
        return str(error)
    try:
        size = size_of(build, limit)
    except TorchdeltaError as error:
        return str(error)
    except ModuleNotFoundError as error:
        if error.name not in {"numpy", "numba"}:
            raise
        return f"inside_budget=True needs {error.name}: pip install 'torchdelta[pytest]'"
    # For reports, such as that of `--junitxml`.
    item.user_properties += [("peak_bytes", size.plain_peak.size_bytes), ("limit_bytes", limit.size_bytes)]
    return None if size.fits else message(size, limit)
