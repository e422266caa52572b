"""Building a native piece: whole or not at all, and never without its self-test."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import pytest

from torchdelta.errors import NativeError
from torchdelta.native.build import built_path, load

if TYPE_CHECKING:
    from pathlib import Path

SOURCE = """
#include <Python.h>
static PyObject* answer(PyObject*, PyObject*) { return PyLong_FromLong(42); }
static PyMethodDef methods[] = {{"answer", answer, METH_NOARGS, ""}, {nullptr, nullptr, 0, nullptr}};
static PyModuleDef module = {PyModuleDef_HEAD_INIT, "tiny_piece", nullptr, -1, methods};
PyMODINIT_FUNC PyInit_tiny_piece() { return PyModule_Create(&module); }
"""

pytestmark = pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler here")


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write a small extension, with a cache of its own."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "cache"))
    path = tmp_path / "tiny.cpp"
    path.write_text(SOURCE, encoding="ascii")
    return path


def left_over(source: Path) -> list[str]:
    """Name what lies in the cache beside the module."""
    cache = built_path(source).parent
    return sorted(path.name for path in cache.iterdir() if path != built_path(source)) if cache.exists() else []


def test_a_module_is_built_once(source: Path) -> None:
    """The second load compiles nothing."""
    assert load(source, "tiny_piece", "assert module.answer() == 42").answer() == 42
    made = built_path(source).stat().st_mtime_ns
    assert load(source, "tiny_piece", "raise SystemExit(1)").answer() == 42
    assert built_path(source).stat().st_mtime_ns == made
    assert left_over(source) == []


def test_a_changed_source_is_another_module(source: Path) -> None:
    """An update never meets the old build."""
    first = built_path(source)
    source.write_text(SOURCE.replace("42", "43"), encoding="ascii")
    assert built_path(source) != first


def test_a_changed_header_is_another_module(source: Path) -> None:
    """So are the headers beside a source that it includes, whatever their names."""
    source.write_text(f'#include "answer.h"\n{SOURCE}', encoding="ascii")
    (source.parent / "answer.h").write_text("// 42\n", encoding="ascii")
    first = built_path(source)
    (source.parent / "answer.h").write_text("// 43\n", encoding="ascii")
    assert built_path(source) != first


@pytest.mark.parametrize(
    ("code", "expected"),
    [("assert module.answer() == 41, 'wrong answer'", "wrong answer"), ("import os; os.abort()", "failed with status")],
)
def test_a_module_that_fails_its_self_test_is_not_used(source: Path, code: str, expected: str) -> None:
    """Whether it raises or takes the process down, nothing of it stays."""
    with pytest.raises(NativeError, match=expected):
        load(source, "tiny_piece", code)
    assert not built_path(source).exists()
    assert left_over(source) == []


def test_a_source_that_does_not_compile_is_one_line(source: Path) -> None:
    """The message names the compiler's first error."""
    source.write_text("int main( {", encoding="ascii")
    with pytest.raises(NativeError, match="error") as caught:
        load(source, "tiny_piece", "")
    assert "\n" not in str(caught.value)
    assert left_over(source) == []


def test_a_cache_that_cannot_be_written_is_one_line(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file where the directory should be: an error that names it, no traceback of ours."""
    blocked = tmp_path / "file"
    blocked.write_text("", encoding="ascii")
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(blocked))
    with pytest.raises(NativeError, match="cannot be built or loaded"):
        load(source, "tiny_piece", "")


def test_a_damaged_module_is_an_error(source: Path) -> None:
    """A file that is no extension raises, and does not crash."""
    built_path(source).parent.mkdir(parents=True)
    built_path(source).write_bytes(b"not an extension")
    with pytest.raises(NativeError, match="cannot be built or loaded"):
        load(source, "tiny_piece", "")
