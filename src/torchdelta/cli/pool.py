"""`torchdelta pool`: places buffers, and compares the footprint with what other allocators need."""

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from torchdelta.cli.errors import EXIT_FAILED, check_input, check_output, fail, note, print_result
from torchdelta.cli.options import JsonOption, number_or_text, progress
from torchdelta.units import format_bytes, parse_size
from torchdelta.whole_file import write_whole

if TYPE_CHECKING:
    from torchdelta.pool.model import Instance

__all__ = ["pool"]

_TRACE_SUFFIXES = (".trace",)
_SNAPSHOT_SUFFIXES = (".pickle", ".pkl")
_EVENT_SUFFIXES = (".jsonl", ".json", ".ndjson")


def pool(
    file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE",
            help="Lives as CSV (id,lower,upper,size), a trace, an event log (.jsonl) or a CUDA snapshot (.pickle).",
            show_default=False,
        ),
    ],
    *,
    capacity: Annotated[
        str | None, typer.Option(help="Footprint that is small enough, such as 8GiB.", show_default=False)
    ] = None,
    solver: Annotated[str, typer.Option(help="Name of the solver.")] = "torchdelta",
    fast: Annotated[bool, typer.Option("--fast", help="The first solution only: the same as --solver fast.")] = False,
    time_limit: Annotated[
        float | None,
        typer.Option(help="Seconds after which the search ends: 4.5, or 14 for large files.", show_default=False),
    ] = None,
    alignment: Annotated[int, typer.Option(help="Bytes that every offset is a multiple of.")] = 1,
    seed: Annotated[int, typer.Option(help="The same seed gives the same placement.")] = 0,
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", help="Write the placement, as CSV with offsets.", show_default=False),
    ] = None,
    picture: Annotated[
        Path | None, typer.Option("--svg", help="Draw the placement: time against address.", show_default=False)
    ] = None,
    validate: Annotated[
        Path | None, typer.Option(help="Only check this placement (CSV with offsets).", show_default=False)
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Assign offsets. Print the footprint, its distance from the lower bound, and what other pools would need."""
    for path in (file, validate):
        check_input(path)
    check_output(output, others={"the input": file, "the picture": picture})
    check_output(picture, others={"the input": file})
    capacity_bytes = (
        None if capacity is None else parse_size(number_or_text(capacity), name="capacity", takes_shares=False)
    )
    with progress() as say:
        from torchdelta.pool.csv_file import read_offsets, write_placement
        from torchdelta.pool.model import footprint_bytes
        from torchdelta.pool.picture import svg
        from torchdelta.pool.solvers import BASELINES, check_options, compile_solvers, solve
        from torchdelta.pool.validate import check

        chosen = "fast" if fast else solver
        check_options(chosen, seed=seed, time_limit_s=time_limit)
        say("reading")
        instance = dataclasses.replace(_read(file, alignment_bytes=alignment), capacity_bytes=capacity_bytes)
        if validate is not None:
            offsets = read_offsets(validate, instance)
            check(instance, offsets)
            _show(
                {"valid": True, "footprint_bytes": footprint_bytes(instance, offsets), **_size(instance)}, [], as_json
            )
            return
        say("compiling the solvers (only once)")
        compile_solvers()
        say("placing")
        placement = solve(instance, chosen, seed=seed, time_limit_s=time_limit)
        check(dataclasses.replace(instance, capacity_bytes=None), placement.offsets_bytes)
        if output is not None:
            write_placement(output, instance, placement.offsets_bytes)
        if picture is not None:
            drawing = svg(
                instance, placement.offsets_bytes, lower_bound_bytes=placement.lower_bound_bytes, title=file.name
            )
            write_whole(picture, drawing.encode())
        say("comparing")
        rows = _baselines(instance, {placement.solver: placement.footprint_bytes})
    facts = {
        "footprint_bytes": placement.footprint_bytes,
        "lower_bound_bytes": placement.lower_bound_bytes,
        "fragmentation": placement.fragmentation,
        "proved_optimal": placement.proved_optimal,
        "solver": placement.solver,
        "time_s": placement.time_s,
        **_size(instance),
    }
    _show(facts, rows, as_json)
    shown = {row["solver"] for row in rows}
    for name in BASELINES:
        if name not in shown:
            note(
                f"{name} is left out: it would take long, so many of the {len(instance)} lives overlap; use --solver "
                f"{name} to run it"
            )
    if capacity_bytes is not None and placement.footprint_bytes > capacity_bytes:
        best_bytes = placement.footprint_bytes
        exactly = f"{best_bytes} bytes, " if best_bytes >= 1024 else ""
        fail(
            f"no placement within {format_bytes(capacity_bytes)} was found: the best needs "
            f"{format_bytes(best_bytes, rounds_up=True)} ({exactly}{format_bytes(best_bytes - capacity_bytes)} more), "
            f"none needs less than {format_bytes(placement.lower_bound_bytes, rounds_down=True)}",
            EXIT_FAILED,
        )


def _read(file: Path, *, alignment_bytes: int) -> "Instance":
    """Read lives from a file; the suffix gives its format."""
    from torchdelta.pool.csv_file import read_instance
    from torchdelta.pool.lives import lives_of_trace

    kind = file.name.removesuffix(".gz")
    if kind.endswith(_EVENT_SUFFIXES):
        from torchdelta.trace.imports.events import read_event_log

        trace = read_event_log(file)
    elif kind.endswith(_SNAPSHOT_SUFFIXES):
        from torchdelta.trace.imports.snapshot import read_snapshot

        trace = read_snapshot(file)
    elif kind.endswith(_TRACE_SUFFIXES):
        from torchdelta.trace.file import read_trace

        trace = read_trace(file)
    else:
        return read_instance(file, alignment_bytes=alignment_bytes)
    return lives_of_trace(trace, alignment_bytes=alignment_bytes)


def _size(instance: "Instance") -> dict[str, Any]:
    return {"num_lives": len(instance), "alignment_bytes": instance.alignment_bytes}


def _baselines(instance: "Instance", footprints: dict[str, int]) -> list[dict[str, Any]]:
    """Return one row per pool that places so many lives in some seconds, the smallest footprint first."""
    from torchdelta.pool.online import reserve_like_torch
    from torchdelta.pool.solvers import quick_baselines, solve

    footprints = dict(footprints)
    for name in quick_baselines(instance):
        footprints.setdefault(name, solve(instance, name).footprint_bytes)
    footprints["torch-caching"] = reserve_like_torch(instance.starts, instance.ends, instance.sizes_bytes)
    ordered = sorted(footprints.items(), key=lambda item: item[1])
    return [{"solver": name, "footprint_bytes": footprint} for name, footprint in ordered]


def _show(facts: dict[str, Any], rows: list[dict[str, Any]], as_json: bool) -> None:
    if as_json:
        print_result(json.dumps(facts | ({"pools": rows} if rows else {})))
        return
    bound = facts.get("lower_bound_bytes")
    lines: list[str] = []
    for name, value in facts.items():
        shown = value
        if name.endswith("_bytes"):
            shown = f"{format_bytes(value)} ({value} bytes)" if value >= 1024 else format_bytes(value)
        elif name == "fragmentation":
            shown = f"{value:.4%}"
        elif name == "time_s":
            shown = f"{value:.3f} s"
        elif isinstance(value, bool):
            shown = "yes" if value else "no"
        lines.append(f"{name.removesuffix('_bytes').removesuffix('_s').replace('_', ' '):<16} {shown}")
    if rows:
        lines.append(f"\n{'pool':<20} {'footprint':>12} {'over the bound':>15}")
        for row in rows:
            over = row["footprint_bytes"] / bound - 1 if bound else 0.0
            lines.append(f"{row['solver']:<20} {format_bytes(row['footprint_bytes']):>12} {over:>15.3%}")
    print_result("\n".join(lines))
