"""Makes a wheel whose native modules are prebuilt, for the torch of this interpreter: `python -m tools.native_wheel`.

Where it is installed beside the same build of torch, no C++ compiler is needed; beside any other torch it works as the
pure wheel does. Its version is the pure wheel's with torch's as the local part (0.1.0+torch2.13.0.cpu), so that wheels
for several builds of torch can lie in one folder.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Final

import torch
from packaging.tags import sys_tags

from torchdelta.errors import NativeError
from torchdelta.native.build import NativeModule, build, cuda_include_paths, prebuilt_path
from torchdelta.native.modules import NATIVE_MODULES

__all__ = ["main"]

ROOT: Final = Path(__file__).parents[1]
_FOLDER: Final = Path("torchdelta", "native")  # in the wheel


def build_parser() -> argparse.ArgumentParser:
    """Build the command line."""
    parser = argparse.ArgumentParser(prog="python -m tools.native_wheel", description=__doc__)
    parser.add_argument("--output", type=Path, default=ROOT / "dist", help="directory for the wheel (dist)")
    parser.add_argument("--wheel", type=Path, help="the pure wheel to start from; by default it is built first")
    return parser


def make(pure: Path, output: Path, directory: Path) -> Path:
    """Make the wheel from the pure one.

    Args:
        pure: The pure wheel.
        output: Where the result goes.
        directory: An empty directory to work in.
    """
    run("wheel", "unpack", "--dest", directory / "unpacked", pure)
    (unpacked,) = (directory / "unpacked").iterdir()
    build_modules(unpacked / _FOLDER)
    mark_as_platform_wheel(unpacked)
    packed = directory / "packed"
    packed.mkdir()
    run("wheel", "pack", "--dest-dir", packed, "--local-version", local_version(torch.__version__), unpacked)
    (wheel,) = packed.iterdir()
    run("wheel", "tags", "--remove", *tags(), wheel)
    (wheel,) = packed.iterdir()
    output.mkdir(parents=True, exist_ok=True)
    return Path(shutil.move(wheel, output / wheel.name))


def build_modules(folder: Path) -> None:
    """Build every native module from the sources in a folder, two at a time, and run its self-test."""

    def prebuild(module: NativeModule) -> None:
        print(f"building {module.source.name} for torch {torch.__version__}", file=sys.stderr, flush=True)
        # From the wheel's own sources: their digest is in the file name.
        module = dataclasses.replace(module, source=folder / module.source.name)
        build(module, prebuilt_path(module.source))

    if torch.version.cuda is not None:
        cuda_include_paths()  # raises where headers are missing: without them, the wheel would lack a module
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        list(pool.map(prebuild, NATIVE_MODULES))


def mark_as_platform_wheel(unpacked: Path) -> None:
    """Say in an unpacked wheel that it holds more than Python."""
    (path,) = unpacked.glob("*.dist-info/WHEEL")
    text, count = re.subn(r"(?m)^Root-Is-Purelib: true$", "Root-Is-Purelib: false", path.read_text(encoding="utf-8"))
    assert count == 1, text
    path.write_text(text, encoding="utf-8")


def local_version(torch_version: str) -> str:
    """Return the local part of the wheel's version: "torch2.13.0.cpu" for torch "2.13.0+cpu"."""
    return "torch" + re.sub(r"[^a-z0-9]+", ".", torch_version.lower())


def tags() -> list[str]:
    """Return options of `wheel tags` that name this Python and this platform."""
    # The first tag is the most specific one. Its platform claims an old glibc ("manylinux"), which nobody has checked.
    own = next(iter(sys_tags()))
    platform = re.sub(r"[-.]", "_", sysconfig.get_platform())
    return ["--python-tag", own.interpreter, "--abi-tag", own.abi, "--platform-tag", platform]


def run(module: str, *arguments: str | Path) -> None:
    """Run a Python module as a command in this repository; end the program if it fails."""
    done = subprocess.run(
        [sys.executable, "-m", module, *map(str, arguments)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        sys.exit(f"{done.stdout}python -m {module} failed with status {done.returncode}")


def main(arguments: list[str]) -> int:
    """Make the wheel and print its path; 1 if a native module cannot be built."""
    options = build_parser().parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="torchdelta-native-wheel-") as name:
        directory = Path(name)
        if options.wheel is None:
            run("build", "--wheel", "--outdir", directory / "pure")
        pure = options.wheel or next((directory / "pure").glob("*.whl"))
        try:
            wheel = make(pure.resolve(), options.output.resolve(), directory)
        except NativeError as error:
            print(error, file=sys.stderr)
            return 1
    print(wheel)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
