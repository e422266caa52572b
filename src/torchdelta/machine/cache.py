"""The measured machine, kept between runs: one JSON file a device under the user's cache directory.

`$TORCHDELTA_CACHE_DIR`, else `torchdelta` in the folder of the user's caches (cache_folder.py).
"""

import datetime as dt
import os
from pathlib import Path
from typing import Final

import msgspec

from torchdelta.cache_folder import user_cache_folder
from torchdelta.errors import MachineError
from torchdelta.machine.model import Machine, validate_machine
from torchdelta.whole_file import write_whole

__all__ = [
    "CachedMachine",
    "cache_directory",
    "circumstances",
    "difference",
    "load_per_core",
    "read_cached",
    "write_cached",
]

_AGES: Final = ((86400, "days"), (3600, "hours"), (60, "minutes"))

_VERSION: Final = 2


class CachedMachine(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A measured machine, and what it was measured with.

    Attributes:
        version: Of this file's form.
        torch_version: Of the torch that measured.
        measured_at: When, in ISO 8601 with its offset.
        load: Processes that ran or wanted to, on average of the minute before, for each core; None: not known.
        disk_directory: Whose disk was measured; None: not known.
        num_threads: With which a CPU was measured; None: not known, or on another device.
        processor: Name of the CPU or GPU; None: not known.
        machine: The result.
    """

    version: int = _VERSION
    torch_version: str
    measured_at: str
    load: float | None = None
    disk_directory: str | None = None
    num_threads: int | None = None
    processor: str | None = None
    machine: Machine


def circumstances(cached: CachedMachine, *, now: dt.datetime | None = None) -> str:
    """Return how old a measurement is, and how busy the machine was: "measured 3 days ago, at a load of 0.1 a core"."""
    try:
        then = dt.datetime.fromisoformat(cached.measured_at)
        seconds = ((now or dt.datetime.now(tz=dt.UTC)) - then).total_seconds()
    except (ValueError, TypeError):  # no date, or one without its offset
        age = "at an unknown time"
    else:
        age = next(
            (f"{int(seconds // unit)} {name} ago" for unit, name in _AGES if seconds >= 2 * unit), "a moment ago"
        )
    return f"measured {age}, at " + (
        "an unknown load" if cached.load is None else f"a load of {cached.load:.2f} a core"
    )


def difference(
    cached: CachedMachine,
    *,
    torch_version: str,
    num_threads: int | None,
    processor: str | None,
    disk_directory: str | None,
) -> str:
    """Return what a stored measurement was made with that is not so here, such as "on 2 threads, not 4"; else "".

    None stands for any. If an old file does not say its threads or its processor, these are taken to be the same.
    """
    facts = (
        ("with torch ", "", cached.torch_version, torch_version),
        ("on ", " threads", cached.num_threads or num_threads, num_threads),
        ("on ", "", cached.processor or processor, processor),
        ("with the disk of ", "", cached.disk_directory or "an unknown directory", disk_directory),
    )
    return next(
        (f"{before}{was}{after}, not {now}" for before, after, was, now in facts if now is not None and was != now),
        "",
    )


def load_per_core() -> float | None:
    """Return the load of the last minute for each core of this machine, None where the system does not say."""
    try:
        return os.getloadavg()[0] / (os.cpu_count() or 1)
    except (AttributeError, OSError):
        return None


def cache_directory() -> Path:
    """Return where files are kept; it need not exist."""
    own = os.environ.get("TORCHDELTA_CACHE_DIR")
    return Path(own) if own else user_cache_folder() / "torchdelta"


def read_cached(device: str) -> CachedMachine | None:
    """Return what was measured of a device, "cpu" or "cuda"; None if nothing was, or nothing that can be used."""
    try:
        text = _path(device).read_bytes()
        cached = msgspec.json.decode(text, type=CachedMachine)
        validate_machine(cached.machine)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, MachineError):
        return None  # a cache: what cannot be used is measured again
    return cached if cached.version == _VERSION else None


def write_cached(device: str, cached: CachedMachine) -> Path:
    """Keep what was measured of a device, in place of what was kept before; returns the file.

    Raises:
        MachineError: The file cannot be written.
    """
    path = _path(device)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, msgspec.json.format(msgspec.json.encode(cached), indent=2) + b"\n")
    except OSError as error:
        raise MachineError(f"{path}: cannot keep the measured machine: {error.strerror or error}") from error
    return path


def _path(device: str) -> Path:
    return cache_directory() / f"machine-{device}.json"
