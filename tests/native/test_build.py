"""Building a native piece: whole or not at all, never without its self-test, and not where it is prebuilt."""

from __future__ import annotations

import os
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from torchdelta.errors import NativeError
from torchdelta.native import build, device_watch
from torchdelta.native.build import (
    NativeModule,
    built_path,
    find,
    load,
    loaded,
    prebuilt_path,
    status_before_use,
)
from torchdelta.native.modules import NATIVE_MODULES

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


def tiny(source: Path, code: str = "") -> NativeModule:
    """Return the extension with a self-test."""
    return NativeModule(source=source, name="tiny_piece", self_test=code)


def left_over(source: Path) -> list[str]:
    """Name what lies in the cache beside the module."""
    cache = built_path(source).parent
    return sorted(path.name for path in cache.iterdir() if path != built_path(source)) if cache.exists() else []


def test_a_module_is_built_once(source: Path) -> None:
    """The second load compiles nothing."""
    assert load(tiny(source, "assert module.answer() == 42")).answer() == 42
    made = built_path(source).stat().st_mtime_ns
    assert load(tiny(source, "raise SystemExit(1)")).answer() == 42
    assert built_path(source).stat().st_mtime_ns == made
    assert left_over(source) == []


def test_a_changed_source_is_another_module(source: Path) -> None:
    """An update never meets the old build."""
    first = built_path(source)
    source.write_text(SOURCE.replace("42", "43"), encoding="ascii")
    assert built_path(source) != first


@pytest.mark.parametrize("through", ["", "between.h"])
def test_a_changed_header_is_another_module(source: Path, through: str) -> None:
    """So are the headers beside a source that it includes, itself or through another header."""
    source.write_text(f'#include "{through or "answer.h"}"\n{SOURCE}', encoding="ascii")
    (source.parent / "between.h").write_text('#include "answer.h"\n#include "between.h"\n', encoding="ascii")
    (source.parent / "answer.h").write_text("// 42\n", encoding="ascii")
    first = built_path(source)
    (source.parent / "answer.h").write_text("// 43\n", encoding="ascii")
    assert built_path(source) != first


def test_a_module_that_cannot_be_built_is_one_line_of_the_log(source: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It says what happens without the module, once for the process."""
    source.write_text("int main( {", encoding="ascii")
    module = replace(tiny(source), without="every step is recorded")
    for _ in range(2):
        assert isinstance(loaded(module), NativeError)
    (warning,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert warning.startswith("every step is recorded (")
    assert "\n" not in warning


@pytest.mark.parametrize(
    ("code", "expected"),
    [("assert module.answer() == 41, 'wrong answer'", "wrong answer"), ("import os; os.abort()", "failed with status")],
)
def test_a_module_that_fails_its_self_test_is_not_used(source: Path, code: str, expected: str) -> None:
    """Whether it raises or takes the process down, nothing of it stays."""
    with pytest.raises(NativeError, match=expected):
        load(tiny(source, code))
    assert not built_path(source).exists()
    assert left_over(source) == []


def test_a_source_that_does_not_compile_is_one_line(source: Path) -> None:
    """The message names the compiler's first error."""
    source.write_text("int main( {", encoding="ascii")
    with pytest.raises(NativeError, match="error") as caught:
        load(tiny(source))
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
        load(tiny(source))


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each compilation fail; asked for after what is to be prebuilt."""
    monkeypatch.setenv("CXX", "/bin/false")


@pytest.mark.rest
def test_a_cached_module_that_cannot_be_imported_is_built_anew(source: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Another compiler may have built it, whose C++ library is not here, or it is damaged."""
    built_path(source).parent.mkdir(parents=True)
    built_path(source).write_bytes(b"not an extension")
    assert load(tiny(source)).answer() == 42
    (record,) = (record for record in caplog.records if record.levelname == "WARNING")
    assert "the cached module of tiny.cpp cannot be loaded and is built anew" in record.getMessage()


@pytest.mark.usefixtures("no_compiler")
def test_a_damaged_module_is_an_error_without_a_compiler(source: Path) -> None:
    """A file that is no extension raises, and does not crash."""
    built_path(source).parent.mkdir(parents=True)
    built_path(source).write_bytes(b"not an extension")
    with pytest.raises(NativeError, match="failed with status"):
        load(tiny(source))


def test_the_compiler_may_be_a_command_of_several_words(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As make takes it: CXX="ccache g++"."""
    monkeypatch.setenv("CXX", f"env {os.environ.get('CXX', 'c++')} -Wall")
    status = build.status_before_use(tiny(source), "now")
    assert status.is_on, status.reason
    assert load(tiny(source)).answer() == 42


@pytest.fixture
def prebuilt(source: Path) -> Path:
    """Build the extension ahead, into the folder of the package."""
    path = prebuilt_path(source)
    build.build(tiny(source), path)
    return path


@pytest.mark.usefixtures("prebuilt", "no_compiler")
def test_a_prebuilt_module_is_loaded_without_a_compiler(source: Path) -> None:
    """Nothing is compiled, and nothing is written into the cache."""
    module = load(tiny(source, "raise SystemExit(1)"))
    assert module.answer() == 42
    assert Path(module.__file__) == prebuilt_path(source)
    assert not built_path(source).parent.exists()


@pytest.mark.rest
def test_a_prebuilt_module_that_cannot_be_imported_is_built_here(
    source: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """One line of the log names it."""
    prebuilt_path(source).parent.mkdir()
    prebuilt_path(source).write_bytes(b"not an extension")
    module = load(tiny(source))
    assert module.answer() == 42
    assert Path(module.__file__) == built_path(source)
    (record,) = (record for record in caplog.records if record.levelname == "WARNING")
    assert "the prebuilt module of tiny.cpp cannot be loaded" in record.getMessage()


@pytest.mark.parametrize("version", ["2.0.1+cpu", torch.__version__.partition("+")[0] + "+another.build"])
def test_a_module_prebuilt_for_another_torch_is_ignored(
    source: Path, prebuilt: Path, no_compiler: None, monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    """Another release, or another build of this release."""
    del no_compiler
    with monkeypatch.context() as patch:
        patch.setattr(torch, "__version__", version)
        prebuilt.rename(prebuilt_path(source))
    assert find(source) is None
    with pytest.raises(NativeError, match="failed with status"):
        load(tiny(source))


@pytest.mark.rest
@pytest.mark.usefixtures("prebuilt", "no_compiler")
def test_the_status_says_that_a_module_is_prebuilt(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What `torchdelta env` prints; TORCHDELTA_NATIVE=0 disables a prebuilt module like all others."""
    monkeypatch.delenv("TORCHDELTA_NATIVE", raising=False)
    status = status_before_use(tiny(source), "at the first budget")
    assert (status.is_on, status.reason) == (True, "prebuilt; installed at the first budget")
    monkeypatch.setenv("TORCHDELTA_NATIVE", "0")
    status = status_before_use(tiny(source), "at the first budget")
    assert (status.is_on, status.reason) == (False, "TORCHDELTA_NATIVE disables it")


def test_the_list_of_modules_is_complete() -> None:
    """Each source of the package is in it once; the one for CUDA where it can be built."""
    sources = {module.source for module in NATIVE_MODULES}
    assert len(sources) == len(NATIVE_MODULES)
    assert torch.version.cuda is not None or device_watch.MODULE.source not in sources
    assert sources | {device_watch.MODULE.source} == set(Path(build.__file__).parent.glob("*.cpp"))


def test_messages_are_put_together_as_strings() -> None:
    """See [Note: numbers in messages] in build.py: a check has a condition and one message."""
    for source in Path(build.__file__).parent.glob("*.[ch]*"):
        text = source.read_text(encoding="utf-8")
        assert not re.search(r"#include <\w*stream>", text), source.name
        for check in re.findall(r"TORCH_CHECK(?:_WITH)?\((.*?)\);", text, re.DOTALL):
            assert not re.search(r'"\s*,|,\s*"[^"]*"\s*,', check), f"{source.name}: {check}"
