"""The tables of a run, and the files that stand in the documents: made from the raw JSON, never from memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.following.contenders import PEERS, RECORD_ONLY, in_budget
from benchmarks.following.figures import Cell, Data, blocks_of, cell, ratio, step_s
from benchmarks.following.picture import svg
from benchmarks.launch import REPOSITORY
from benchmarks.outcome import format_table
from benchmarks.turns import BESIDE, PLAIN, name_of_interval

if TYPE_CHECKING:
    from collections.abc import Sequence

IMAGES = REPOSITORY / "docs" / "images"
HEADER = (
    "budget",
    "of plain's peak",
    "peer",
    "reactive",
    "followed",
    "no prefetch",
    "bound",
    "peak of budget",
    "predicted time, slowdown, peak",
    "unplanned",
)


def tables(models: dict[str, Data]) -> str:
    """Return the Markdown of all models: one line a budget, step times over plain's."""
    parts: list[str] = []
    for model, data in models.items():
        plain_bytes = data["peaks"][PLAIN]
        plain_s = min(map(step_s, blocks_of(data, PLAIN)))
        recorded = ratio(data, RECORD_ONLY)
        parts.append(
            f"**{model}**, {data['optimizer']}: plain {plain_bytes / 2**20:.0f} MiB, {plain_s:.2f} s a step "
            f"(best round); recording alone {recorded or '-'}{_control(data)}; {len(data['rounds'])} rounds\n"
        )
        rows = [_row(data, cell(data, label)) for label in data["budgets"]]
        rows += [_idle_row(data, peer) for peer in PEERS if peer in data["peaks"] and peer not in data["budgets"]]
        parts.append(format_table(HEADER, rows) + "\n")
    return "\n".join(parts)


def _control(data: Data) -> str:
    """Return what plain steps of the measured process take over those of the second process, where there is one.

    It is 1 if nothing but the measured way to train makes a difference.
    """
    if not all(BESIDE in block for block in blocks_of(data, PLAIN)):
        return ""
    return f"; plain steps of the measured process {ratio(data, PLAIN)}"


def _row(data: Data, found: Cell) -> list[str]:
    label = found.label
    refused = data["refused"].get(in_budget("followed", label))
    least_bytes = refused["least_budget_bytes"] if refused else None
    followed = str(found.followed or "-")
    if refused is not None:
        followed = f"least {least_bytes / data['peaks'][PLAIN]:.1%}" if least_bytes else "no plan"
    predicted = "-"
    if found.predicted_time is not None and found.predicted_peak is not None:
        predicted = f"{found.predicted_time}, {found.predicted_slowdown or '-'}, {found.predicted_peak:.4f}"
    return [
        f"{label}, {found.budget_bytes / 2**20:.0f} MiB",
        f"{found.budget_bytes / data['peaks'][PLAIN]:.1%}",
        str(ratio(data, label) or "-") if label in PEERS else "",
        str(found.reactive or "-"),
        followed,
        str(found.no_prefetch or "-"),
        f"{found.bound:.3f}" if found.bound is not None else "-",
        f"{found.peak_share:.4f}" if found.peak_share is not None else "-",
        predicted,
        str(found.num_unplanned),
    ]


def _idle_row(data: Data, peer: str) -> list[str]:
    """Return the line of a peer that needs no less memory than plain."""
    share = data["peaks"][peer] / data["peaks"][PLAIN]
    return [peer, f"{share:.1%}", str(ratio(data, peer) or "-"), *["-"] * (len(HEADER) - 3)]


def write(paths: Sequence[str]) -> None:
    """Write each results file's table beside it, and one picture of each model into docs/images."""
    for path in map(Path, paths):
        document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        models = {model: data for model, data in document["data"].items() if isinstance(data.get("rounds"), list)}
        if not models:
            print(f"{path.name}: no rounds of this benchmark's present form; left out")
            continue
        machine = document["environment"]
        caption = f"{machine['cpu']}, {machine['threads']} threads, torch {machine['torch']}, {machine['commit'][:12]}"
        brackets = name_of_interval(min(len(data["rounds"]) for data in models.values()))
        text = f"Step times over plain's: {brackets}. {caption}. `{document['command']}`\n\n"
        table_path = path.with_suffix(".md")
        table_path.write_text(text + tables(models), encoding="utf-8")
        print(f"{table_path.name}")
        for model, data in models.items():
            picture_path = IMAGES / f"following-{model}.svg"
            picture_path.write_text(svg(model, data, caption), encoding="utf-8")
            print(f"{picture_path.relative_to(REPOSITORY)}")
