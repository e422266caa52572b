"""Loads the C++ modules of this folder: prebuilt ones, else built once per version of torch and Python.

[Note: which prebuilt module is loaded]
A wheel may hold modules that were built ahead (tools/native_wheel.py), in the folder `prebuilt` beside the sources,
under the file names that modules built here have. Such a name holds the digest of the source text, the suffix of this
Python, and torch's whole version, "+cpu" or "+cu130" included: that part names a build of torch, and torch promises no
C++ interface, neither between two releases nor between two builds of one, whose compilers and options may differ. A
prebuilt module has passed its self-test with that one build of torch, where the wheel was made, and is not tested
again. What does not match in every part is ignored, and the module is built here. So is one that cannot be imported,
because it was built for a newer glibc for example.

[Note: why not `cpp_extension.load`]
It needs ninja, and its lock file outlives a process that was killed while building: every later process would wait
forever. One small file needs neither. `torch.utils.cpp_extension` finds the compiler and the paths. The module is built
under a temporary name and must pass a self-test in a separate process (a broken extension crashes, it does not raise).
Only then it is renamed, so that a file under the final name is always complete and tested.

[Note: numbers in messages]
A compiler may have its standard library as an archive only. Then a module contains a second copy of what it uses of it,
and a stream that formats a number crashes: which part of it does that was numbered by torch's copy. So the modules put
messages together as strings, and give `TORCH_CHECK` one string.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.machinery
import importlib.util
import logging
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch

from torchdelta.cache_folder import user_cache_folder
from torchdelta.errors import NativeError

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = [
    "NativeModule",
    "NativeStatus",
    "build",
    "built_path",
    "cache_directory",
    "cuda_include_paths",
    "find",
    "has_cuda_headers",
    "import_module",
    "is_switched_off",
    "load",
    "loaded",
    "prebuilt_path",
    "self_test",
    "status_before_use",
    "status_in_use",
]

_logger = logging.getLogger("torchdelta")

_BUILD_TIME_S: Final = 300.0
_OWN_HEADER: Final = re.compile(rb'^#include "([^"]+)"', re.MULTILINE)  # beside the source
_CUDA_HEADERS: Final = ("cuda_runtime_api.h", "crt/host_config.h")
_STANDARDS: Final = ("c++20", "c++17")  # torch's headers need one or the other, depending on the version


@dataclass(frozen=True, kw_only=True, slots=True)
class NativeModule:
    """A module of C++.

    Attributes:
        source: The C++ file; it includes only headers of Python and torch, and headers beside it (in quotes).
        name: The name in its init function.
        self_test: Python code that a new module must pass, with `module` bound to it.
        needs_cuda: Whether it also includes headers of CUDA and links torch's library for CUDA.
        without: What happens where it cannot be built, for the log; "" if the caller logs that.
    """

    source: Path
    name: str
    self_test: str
    needs_cuda: bool = False
    without: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class NativeStatus:
    """Whether a native module is in use, or will be.

    Attributes:
        is_on: It is installed, or will be at the next budget.
        reason: Why it is or is not on, in a few words.
    """

    is_on: bool
    reason: str


def is_switched_off() -> bool:
    """Return whether the environment disables native modules."""
    return os.environ.get("TORCHDELTA_NATIVE", "1").lower() in {"0", "false", "off", "no"}


def status_before_use(module: NativeModule, when: str) -> NativeStatus:
    """Return whether a module will be used, and when. Builds and loads nothing."""
    if is_switched_off():
        return NativeStatus(is_on=False, reason="TORCHDELTA_NATIVE disables it")
    found = find(module.source)
    if found is not None:
        how = "prebuilt" if found == prebuilt_path(module.source) else "built"
        return NativeStatus(is_on=True, reason=f"{how}; installed {when}")
    compiler = os.environ.get("CXX", "c++")
    if shutil.which(_words(compiler)[0]) is None:
        return NativeStatus(is_on=False, reason=f"no C++ compiler ({compiler}) to build it: install one, or set CXX")
    return NativeStatus(is_on=True, reason=f"to be built with {compiler} {when}")


def status_in_use(module: Any, is_in_use: Callable[[Any], bool]) -> NativeStatus:
    """Return whether a module is in use that an allocator was installed from, or the error why it was not."""
    if isinstance(module, NativeError):
        return NativeStatus(is_on=False, reason=str(module))
    is_on = is_in_use(module)
    return NativeStatus(is_on=is_on, reason="installed" if is_on else "another CPU allocator has replaced it")


def cache_directory() -> Path:
    """Return the directory of built modules: TORCH_EXTENSIONS_DIR, else the user's cache."""
    named = os.environ.get("TORCH_EXTENSIONS_DIR")
    return (Path(named) if named else user_cache_folder()) / "torchdelta"


def built_path(source: Path) -> Path:
    """Return the path of a source's module in the cache; it changes with the source text, torch and Python."""
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in _with_own_headers(source))).hexdigest()[:12]
    suffix = importlib.machinery.EXTENSION_SUFFIXES[0]
    return cache_directory() / f"{source.stem}-{digest}-torch{torch.__version__}{suffix}"


def _with_own_headers(source: Path) -> list[Path]:
    """Return a source and the headers beside it that it includes, also through one another, in a fixed order."""
    paths = [source]
    for path in paths:  # grows while it is walked
        names = _OWN_HEADER.findall(path.read_bytes())
        headers = [source.parent / name.decode() for name in names]
        paths += [header for header in dict.fromkeys(headers) if header.exists() and header not in paths]
    return paths


def prebuilt_path(source: Path) -> Path:
    """Return the path of a source's module that came with the package. See [Note: which prebuilt module is loaded]."""
    return source.parent / "prebuilt" / built_path(source).name


def find(source: Path) -> Path | None:
    """Return the path of the module of a source, prebuilt or built before; None if it is still to be built."""
    return next((path for path in (prebuilt_path(source), built_path(source)) if _exists(path)), None)


def _exists(path: Path) -> bool:
    """Return whether a file exists; False where its folder cannot be searched, which `Path.exists` raises for."""
    return os.path.exists(path)  # noqa: PTH110


def load(module: NativeModule) -> Any:
    """Import a module; build it first if needed, or if the one in the cache cannot be imported.

    The latter may have been built with another compiler, whose C++ library is not here.

    Raises:
        NativeError: It cannot be built, or fails its self-test; one line states the reason.
    """
    prebuilt, path = prebuilt_path(module.source), built_path(module.source)
    if _exists(prebuilt):
        try:
            return import_module(prebuilt, module.name)
        except (OSError, ImportError) as error:
            _logger.warning(
                "the prebuilt module of %s cannot be loaded and is built here: %s", module.source.name, error
            )
    if _exists(path):
        try:
            return import_module(path, module.name)
        except (OSError, ImportError) as error:
            _logger.warning("the cached module of %s cannot be loaded and is built anew: %s", module.source.name, error)
    try:
        build(module, path)
        return import_module(path, module.name)
    except (OSError, ImportError) as error:
        raise NativeError(f"{module.source.name} cannot be built or loaded: {error}") from error


@functools.cache
def loaded(module: NativeModule) -> Any:
    """Return the module as `load` does, or the NativeError that explains why there is none; once per process.

    The error is logged as a warning, if the module says what happens without it.
    """
    try:
        return load(module)
    except NativeError as error:
        if module.without:
            _logger.warning("%s (%s)", module.without, error)
        return error


def build(module: NativeModule, path: Path) -> None:
    """Build a module and run its self-test; only then is there a file under this path.

    Raises:
        NativeError: It cannot be compiled, or fails its self-test; one line states the reason.
        OSError: The directory cannot be written.
    """
    _logger.info("building %s for torch %s, once", module.source.name, torch.__version__)
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as directory:
        made = Path(directory) / path.name
        _compile(module, made)
        self_test(made, module.name, module.self_test)
        made.replace(path)


def import_module(path: Path, module_name: str) -> Any:
    """Import an extension module from a file."""
    loader = importlib.machinery.ExtensionFileLoader(module_name, str(path))
    spec = importlib.util.spec_from_file_location(module_name, path, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def self_test(path: Path, module_name: str, code: str) -> None:
    """Run a module's self-test in a separate process.

    Raises:
        NativeError: It failed or crashed; the message ends with a line of its output.
    """
    program = (
        "import sys; from pathlib import Path; import torch; from torchdelta.native.build import import_module; "
        "module = import_module(Path(sys.argv[1]), sys.argv[2]); exec(sys.argv[3])"
    )
    package_root = Path(__file__).parents[2]
    paths = [str(package_root), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    _run([sys.executable, "-c", program, str(path), module_name, code], "self-test", environment)


def has_cuda_headers() -> bool:
    """Return whether modules that need CUDA's headers can be built for this build of torch."""
    if torch.version.cuda is None:
        return False
    try:
        cuda_include_paths()
    except (NativeError, ImportError):  # torch's list of paths needs setuptools
        return False
    return True


def cuda_include_paths() -> list[Path]:
    """Return the folders that may have CUDA's headers: of a toolkit, else of packages.

    Raises:
        NativeError: Some are missing.
    """
    from torch.utils.cpp_extension import CUDA_HOME

    packages = Path(torch.__file__).parents[1] / "nvidia"
    version = (torch.version.cuda or "").partition(".")[0]
    toolkit = [Path(CUDA_HOME) / "include"] if CUDA_HOME else []
    single = [packages / f"cu{version}" / "include"]  # of the packages of CUDA 13 and later
    several = [packages / name / "include" for name in ("cuda_runtime", "cuda_nvcc")]  # of those of CUDA 12
    for folders in (toolkit, single, several):
        if all(any((folder / name).exists() for folder in folders) for name in _CUDA_HEADERS):
            return folders
    raise NativeError(
        f"the headers of CUDA {torch.version.cuda} are missing: install its toolkit, or the package "
        f"{'nvidia-cuda-nvcc-cu12' if version == '12' else 'nvidia-cuda-crt'}"
    )


def _compile(module: NativeModule, target: Path) -> None:
    # Not at the top: it imports setuptools, which may be missing and is slow to import.
    from torch.utils.cpp_extension import get_cxx_compiler, include_paths, library_paths

    source = module.source
    folders = [*include_paths(device_type="cpu"), sysconfig.get_path("include")]
    if module.needs_cuda:
        folders += cuda_include_paths()
    arguments = [
        *(f"-I{path}" for path in folders),
        *("-O2", "-DNDEBUG", "-shared", "-fPIC", "-fvisibility=hidden"),
        # Messages name source files: as torch/include/c10/..., not with the folders of the machine that built them.
        *(f"-ffile-prefix-map={folder}/=" for folder in (Path(torch.__file__).parents[1], source.parent)),
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
        *(str(source), "-o", str(target)),
        *(f"-L{path}" for path in library_paths(device_type="cpu")),
        *("-Wl,--as-needed", "-lc10", "-ltorch_cpu", "-ltorch_python"),
        *(["-lc10_cuda"] if module.needs_cuda else []),
    ]
    failure: NativeError | None = None
    for standard in _STANDARDS:
        try:
            _run([*_words(get_cxx_compiler()), f"-std={standard}", *arguments], "the C++ compiler", dict(os.environ))
        except NativeError as error:
            failure = failure or error
        else:
            return
    assert failure is not None
    raise failure


def _words(compiler: str) -> list[str]:
    """Return the words of a command such as "ccache g++"; a path may contain spaces."""
    if shutil.which(compiler) is not None:
        return [compiler]
    try:
        return shlex.split(compiler) or [compiler]
    except ValueError:  # an open quote
        return [compiler]


def _run(command: list[str], what: str, environment: dict[str, str]) -> None:
    try:
        done = subprocess.run(  # noqa: S603 - the compiler that torch names, and this interpreter
            command, env=environment, capture_output=True, text=True, timeout=_BUILD_TIME_S, check=False
        )
    except FileNotFoundError:
        raise NativeError(f"{what} {command[0]!r} is not installed") from None
    except subprocess.TimeoutExpired:
        raise NativeError(f"{what} took longer than {_BUILD_TIME_S:.0f} s") from None
    if done.returncode != 0:
        lines = (done.stderr or done.stdout).strip().splitlines() or ["it printed nothing"]
        said = next((line for line in lines if "error" in line.lower()), lines[-1])
        raise NativeError(f"{what} failed with status {done.returncode}: {said.strip()[:200]}")
