"""Builds a stand-in accelerator from C++ once, and puts it on torch as a device: standin.cpp as "standin".

tests/racecheck/device.py does the same with an accelerator that computes late.

It must be loaded before the first backward of a process: then the autograd engine starts its threads for devices.
"""

from __future__ import annotations

import hashlib
import importlib.machinery
import importlib.util
import os
import shutil
import subprocess
import sysconfig
import tempfile
import types
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

NUM_DEVICES = 2
_SOURCE = Path(__file__).with_name("standin.cpp")


def compiler() -> str | None:
    """Return the C++ compiler, None where there is none."""
    return shutil.which(os.environ.get("CXX", "g++"))


def built_path(source: Path = _SOURCE) -> Path:
    """Return the path of the extension module of a source; it changes with the source, what it includes, and torch."""
    digest = hashlib.sha256()
    for file in sorted({source, _SOURCE.with_name("shared.h"), *source.parent.glob("*.h")}):
        digest.update(file.read_bytes())
    suffix = importlib.machinery.EXTENSION_SUFFIXES[0]
    directory = Path(tempfile.gettempdir()) / f"torchdelta-standin-{os.getuid()}"
    return directory / f"{source.stem}-{digest.hexdigest()[:12]}-torch{torch.__version__}{suffix}"


def built(source: Path = _SOURCE) -> Path:
    """Return the extension module, building it where that is still to be done (about 20 seconds)."""
    path = built_path(source)
    if not path.exists():
        path.parent.mkdir(mode=0o700, exist_ok=True)
        _build(source, path)
    return path


def _build(source: Path, path: Path) -> None:
    from torch.utils.cpp_extension import include_paths, library_paths

    found = compiler()
    assert found is not None
    with tempfile.TemporaryDirectory(dir=path.parent) as directory:
        made = Path(directory) / path.name
        command = [
            *(found, "-std=c++20", "-O1", "-DNDEBUG", "-shared", "-fPIC"),
            *(f"-I{place}" for place in (*include_paths(device_type="cpu"), sysconfig.get_path("include"))),
            f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
            *(str(source), "-o", str(made)),
            *(f"-L{place}" for place in library_paths(device_type="cpu")),
            *("-lc10", "-ltorch", "-ltorch_cpu", "-ltorch_python"),
        ]
        subprocess.run(command, check=True, capture_output=True)
        made.replace(path)


def load() -> Any:
    """Put the stand-in on torch and on torchdelta; returns torch's module for it."""
    return put_on_torch("standin", _SOURCE, _engine)[0]


def put_on_torch(name: str, source: Path, engine: Callable[[torch.device], Any]) -> tuple[Any, Any]:
    """Put an accelerator on torch and on torchdelta under a name; returns torch's module for it, and the extension."""
    loader = importlib.machinery.ExtensionFileLoader(name, str(built(source)))
    spec = importlib.util.spec_from_file_location(name, loader.path, loader=loader)
    assert spec is not None
    extension = importlib.util.module_from_spec(spec)
    loader.exec_module(extension)
    torch.utils.rename_privateuse1_backend(name)
    module = types.ModuleType(name)
    generators = tuple(extension.default_generator(index) for index in range(NUM_DEVICES))
    vars(module).update(
        default_generators=generators,
        is_available=lambda: True,
        is_initialized=lambda: True,
        device_count=lambda: NUM_DEVICES,
        current_device=torch._C._accelerator_getDeviceIndex,
        manual_seed_all=lambda seed: [generator.manual_seed(seed) for generator in generators],
        get_amp_supported_dtype=lambda: [torch.bfloat16, torch.float16],
        _is_in_bad_fork=lambda: False,
        watch=extension,  # what tests/accelerator/watch.py reads
    )
    torch._register_device_module(name, module)
    torch.utils.generate_methods_for_privateuse1_backend()
    from torchdelta.runtime import tiers
    from torchdelta.runtime.device import memory

    memory.ACCELERATORS.add(name)
    tiers.ENGINES[name] = engine
    return module, extension


def _engine(device: torch.device) -> Any:
    """Return what drives the stand-in's transfers; every host memory is as good as pinned to it."""
    from torchdelta.runtime.tiers.accelerator import AcceleratorEngine

    class StandinEngine(AcceleratorEngine):
        def pin(self, address: int, size_bytes: int) -> None:
            """Do nothing."""

    return StandinEngine(device)
