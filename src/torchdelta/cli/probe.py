"""`torchdelta probe`: measures the speed of this machine and stores it."""

import datetime as dt
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from torchdelta.cli.errors import EXIT_FAILED, check_output, fail, note, one_of, prefix, print_result
from torchdelta.cli.options import JsonOption
from torchdelta.cli.stderr import is_terminal, print_on_stderr
from torchdelta.errors import MachineError
from torchdelta.host import processor_name
from torchdelta.machine.cache import (
    CachedMachine,
    circumstances,
    difference,
    load_per_core,
    read_cached,
    write_cached,
)
from torchdelta.machine.model import Machine
from torchdelta.settings import resolve_settings
from torchdelta.units import format_bytes
from torchdelta.whole_file import write_whole

__all__ = ["probe"]

DEVICES = ("cpu", "cuda")


def probe(
    *,
    device: Annotated[
        str | None, typer.Option(help="cpu or cuda; by default cuda if there is one.", show_default=False)
    ] = None,
    disk: Annotated[
        Path | None,
        typer.Option(
            envvar="TORCHDELTA_SWAP_DIR",
            help="Directory whose disk is measured; by default the swap_dir of a settings file, else /tmp.",
            show_default=False,
        ),
    ] = None,
    again: Annotated[bool, typer.Option("--again", help="Measure again, even if there is a stored result.")] = False,
    quick: Annotated[bool, typer.Option("--quick", help="Measure roughly, and store nothing.")] = False,
    share: Annotated[
        Path | None,
        typer.Option(help="Time a dozen kernels, too, and write all into a small file to send.", show_default=False),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Measure this machine: arithmetic, memory, links to host and disk. Other commands call it 'local'."""
    check_output(share)
    named = disk or resolve_settings().config.swap_dir
    directory = Path(named or tempfile.gettempdir()).absolute()
    if device is not None:
        one_of("device", device, DEVICES)
    if not os.path.isdir(directory):  # noqa: PTH112 - `Path.is_dir` raises where the path cannot be read
        fail(f"the disk of {str(directory)!r} cannot be measured: there is no such directory")
    import torch

    chosen = device or ("cuda" if torch.cuda.is_available() else "cpu")
    torch_version = str(torch.__version__)
    num_threads = torch.get_num_threads() if chosen == "cpu" else None
    processor = _processor(chosen)
    cached = None if again or quick else read_cached(chosen)
    if cached is not None:
        other = difference(
            cached,
            torch_version=torch_version,
            num_threads=num_threads,
            processor=processor,
            disk_directory=None if named is None else str(directory),
        )
        if other:
            note(f"measuring again: the stored result was measured {other}")
            cached = None
    is_kept = True
    if cached is None:
        if is_terminal(sys.stderr):
            print_on_stderr("measuring, a few seconds ...")
        from torchdelta.machine.probe import probe as measure

        load = load_per_core()  # before: what is measured makes a load of its own
        try:
            machine = measure(chosen, directory=directory, quick=quick)
        except MachineError as error:  # implausible: the machine is too busy, and nobody asked for the wrong thing
            fail(str(error), EXIT_FAILED)
        now = dt.datetime.now(tz=dt.UTC).isoformat(timespec="seconds")
        cached = CachedMachine(
            torch_version=torch_version,
            measured_at=now,
            load=load,
            disk_directory=str(directory),
            num_threads=num_threads,
            processor=processor,
            machine=machine,
        )
        if not quick:
            is_kept = _keep(chosen, cached)
    if share is not None:
        _write_share(share, chosen, cached, quick=quick)
    facts = msgspec.to_builtins(cached)
    print_result(
        json.dumps(facts["machine"] | {name: facts[name] for name in ("measured_at", "load", "disk_directory")})
        if as_json
        else _text(cached)
    )
    if not is_kept:
        raise typer.Exit(EXIT_FAILED)


def _keep(device: str, cached: CachedMachine) -> bool:
    """Store what was measured. Return whether that worked; if not, say so: the result is still printed."""
    try:
        path = write_cached(device, cached)
    except MachineError as error:
        print_on_stderr(f"{prefix('probe')}: {error}; set TORCHDELTA_CACHE_DIR to a directory that can be written")
        return False
    if is_terminal(sys.stderr):
        print_on_stderr(f"stored in {path}")
    return True


def _write_share(path: Path, device: str, cached: CachedMachine, *, quick: bool) -> None:
    """Write what the ledger of predictions (docs/fidelity.md) takes: see [Note: what is shared] in machine/share.py."""
    from torchdelta.machine.share import measure_share

    shared = measure_share(device, cached.machine, measured_at=cached.measured_at, quick=quick)
    write_whole(path, msgspec.json.encode(shared) + b"\n")
    note(f"wrote {path}, {path.stat().st_size} bytes: rates and times, no names of persons or hosts")


def _processor(device: str) -> str | None:
    """Return the name of what is measured, None if there is none."""
    import torch

    if device == "cpu":
        return processor_name()
    return torch.cuda.get_device_name() if torch.cuda.is_available() else None


def _text(cached: CachedMachine) -> str:
    machine = cached.machine
    rows: list[tuple[str, str]] = [
        ("memory", format_bytes(machine.memory_bytes)),
        *((f"products in {dtype}", f"{rate / 1e12:.3g} TFLOP/s") for dtype, rate in machine.flops_per_s.items()),
        ("memory rate", _rate(machine.memory_bytes_per_s)),
        ("smallest op", f"{machine.op_latency_s * 1e6:.1f} us"),
        *_tier_rows(machine),
        ("both at once", f"{machine.both_ways_factor:.0%} of each"),
        ("smallest transfer", f"{machine.link_latency_s * 1e6:.1f} us"),
        *_disk_rows(machine),
        *([("disk of", cached.disk_directory)] if cached.disk_directory else []),
    ]
    width = max(len(name) for name, _ in rows)
    head = f"{machine.description}, {circumstances(cached)} ({cached.measured_at})"
    return "\n".join([head, *(f"  {name:<{width}}  {value}" for name, value in rows)])


def _tier_rows(machine: Machine) -> list[tuple[str, str]]:
    """Return what the first tier is and carries."""
    if machine.swaps_to == "disk" and not machine.host_memory_bytes:
        return [("swaps", "none: no disk was measured")]
    how = f" ({machine.sources.get('host_in_bytes_per_s', '')})" if machine.swaps_to == "disk" else ""
    return [
        (f"to the {machine.swaps_to}", _rate(machine.host_out_bytes_per_s) + how),
        (f"from the {machine.swaps_to}", _rate(machine.host_in_bytes_per_s) + how),
    ]


def _disk_rows(machine: Machine) -> list[tuple[str, str]]:
    if not machine.disk_read_bytes_per_s:
        return []
    how = machine.sources.get("disk_read_bytes_per_s", "")
    return [
        ("to the disk", f"{_rate(machine.disk_write_bytes_per_s)} ({how})"),
        ("from the disk", f"{_rate(machine.disk_read_bytes_per_s)} ({how})"),
    ]


def _rate(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e9:.2f} GB/s"
