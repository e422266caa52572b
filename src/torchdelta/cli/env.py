"""`torchdelta env`: facts about this machine for a bug report."""

import importlib.metadata
import json
import os
import platform
import shutil
import sys
from pathlib import Path
from typing import Any

import torchdelta
from torchdelta.cli.errors import print_result
from torchdelta.cli.options import JsonOption
from torchdelta.errors import ConfigError, TierError
from torchdelta.host import processor_name, read_host_memory
from torchdelta.settings import Settings, resolve_settings, unknown_variables
from torchdelta.units import format_bytes

__all__ = ["env", "file_system_type", "read_env"]

_PACKAGES = ("transformers", "accelerate", "lightning", "trl", "numpy", "msgspec", "typer")
_VARIABLES = (
    "TORCHDELTA_MEMORY_BUDGET",
    "TORCHDELTA_SWAP_DIR",
    "TORCHDELTA_LOG_LEVEL",
    "OMP_NUM_THREADS",
    "TORCHDELTA_NATIVE",
    "CXX",
    "CUDA_VISIBLE_DEVICES",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
)


def env(*, as_json: JsonOption = False) -> None:
    """Print what a bug report needs: versions, memory, device, swap directory; and the settings that `run` finds here.

    Each setting stands beside where it comes from: an environment variable, a file, or the default.
    """
    facts = read_env()
    if as_json:
        print_result(json.dumps(facts))
        return
    settings = facts.pop("settings")
    lines = {name: _text(name, value) for name, value in facts.items()}
    lines |= {f"setting {key}": f"{_text(key, one['value'])} ({one['from']})" for key, one in settings.items()}
    width = max(len(name) for name in lines)
    print_result("\n".join(f"{name:<{width}}  {text}" for name, text in lines.items()))


def read_env() -> dict[str, Any]:
    """Return the facts by name; sizes are ints of bytes under names that end in `_bytes`."""
    memory = read_host_memory()
    settings = _read_settings()
    return {
        "torchdelta": torchdelta.__version__,
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "platform": platform.platform(),
        "processor": processor_name(),
        "num_cores": os.cpu_count(),
        "num_usable_cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "ram_bytes": memory.ram_bytes,
        "available_bytes": memory.available_bytes,
        "cgroup_limit_bytes": memory.cgroup_limit_bytes,
        **_torch_facts(),
        **_native_facts(),
        **{name: _version(name) for name in _PACKAGES},
        **_swap_facts(settings),
        **{name: os.environ[name] for name in _VARIABLES if name in os.environ},
        **unknown_variables(os.environ),
        **_settings_facts(settings),
    }


def file_system_type(path: Path, mountinfo: Path = Path("/proc/self/mountinfo")) -> str | None:
    """Return the type of the file system of a path ("ext4", "tmpfs"); None if the kernel does not report it."""
    try:
        lines = mountinfo.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    real = path.resolve()
    best: tuple[int, str] | None = None
    for line in lines:
        # "36 35 98:0 /root /mount/point options [tags] - type device options"; blanks in paths are written as \040.
        left, _, right = line.partition(" - ")
        mount_point = Path(left.split()[4].replace("\\040", " "))
        depth = len(mount_point.parts)
        # Of two mounts on one directory the later one is visible.
        if real.is_relative_to(mount_point) and (best is None or depth >= best[0]):
            best = (depth, right.split()[0])
    return None if best is None else best[1]


def _torch_facts() -> dict[str, Any]:
    try:
        import torch
    except Exception as error:  # noqa: BLE001 - a library of CUDA that is missing is an OSError
        return {"torch": f"cannot be imported: {error}"}
    facts: dict[str, Any] = {
        "torch": torch.__version__,
        "torch_git": torch.version.git_version,
        "torch_cuda": torch.version.cuda,
        "torch_hip": torch.version.hip,
        "torch_debug": torch.version.debug,
        "torch_num_threads": torch.get_num_threads(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
    }
    if not torch.cuda.is_available():
        return facts | {"device": "cpu"}
    devices = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return facts | {
        "device": ", ".join(device.name for device in devices),
        "device_memory_bytes": [device.total_memory for device in devices],
    }


def _native_facts() -> dict[str, Any]:
    try:
        from torchdelta.native.arena import arena_status
        from torchdelta.native.caching import caching_status
        from torchdelta.native.counting import counting_status
    except Exception:  # noqa: BLE001
        return {}  # torch cannot be imported, which _torch_facts reports
    statuses = {
        "counting_allocator": counting_status(),
        "caching_allocator": caching_status(),
        "arena_allocator": arena_status(),
    }
    return {name: f"{'on' if status.is_on else 'off'}: {status.reason}" for name, status in statuses.items()}


def _read_settings() -> Settings | ConfigError:
    try:
        return resolve_settings()
    except ConfigError as error:
        return error


def _swap_facts(settings: Settings | ConfigError) -> dict[str, Any]:
    try:
        from torchdelta.runtime.tiers.scratch import open_scratch_file, swap_directory
    except Exception:  # noqa: BLE001
        return {}  # torch cannot be imported, which _torch_facts reports
    facts: dict[str, Any] = {}
    try:
        directory = swap_directory(settings.config.swap_dir if isinstance(settings, Settings) else None)
        facts = {"swap_dir": str(directory), "swap_dir_file_system": file_system_type(directory)}
        scratch = open_scratch_file(directory, capacity_bytes=None)
    except TierError as error:
        return facts | {"swap_dir_error": str(error)}
    os.close(scratch.descriptor)
    return facts | {
        "swap_dir_free_bytes": shutil.disk_usage(directory).free,
        "swap_dir_is_direct": scratch.is_direct,
        "swap_dir_write_bytes_per_s": round(scratch.write_bytes_per_s),
        "swap_dir_read_bytes_per_s": round(scratch.read_bytes_per_s),
    }


def _settings_facts(settings: Settings | ConfigError) -> dict[str, Any]:
    if isinstance(settings, ConfigError):
        return {"settings_error": str(settings), "settings": {}}
    return {
        "settings": {key: {"value": value, "from": settings.origins[key]} for key, value in settings.values.items()}
    }


def _version(package: str) -> str | None:
    # The metadata has it without importing the package, which can take seconds.
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _text(name: str, value: Any) -> str:
    if value is None:
        return "-"
    if name == "python":
        return f"{value} ({sys.executable})"
    if isinstance(value, str):  # also of a variable that is not read, whatever its name ends in
        return value
    if name.endswith("_bytes"):
        sizes = value if isinstance(value, list) else [value]
        return ", ".join(f"{format_bytes(size_bytes)} ({size_bytes})" for size_bytes in sizes)
    if name.endswith("_bytes_per_s"):
        return f"{format_bytes(value)}/s"
    return str(value)
