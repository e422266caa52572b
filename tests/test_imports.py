"""Imports run one way, and what needs no torch brings none along."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import torchdelta

ROOT = Path(torchdelta.__file__).parent

# For each room (a module or a package right under torchdelta): the rooms it may import, beside itself.
BASE = {"units", "errors", "config"}
MAY_IMPORT = {
    "errors": set(),
    "units": {"errors"},
    "config": {"errors", "units"},
    "host": BASE,
    "summary": BASE,
    "aten": BASE,
    "modules": {*BASE, "_torch"},
    "trace": {*BASE, "_torch", "_torch_symbolic", "aten", "modules"},  # for its symbolic part
    "machine": {*BASE, "host", "trace"},
    "plan": {*BASE, "trace", "machine"},
    "simulate": {*BASE, "trace", "machine", "plan"},
    "planners": {*BASE, "trace", "machine", "plan", "simulate"},
    "pool": {*BASE, "trace", "plan"},
    "_torch": BASE,
    "_torch_device": BASE,
    "_torch_symbolic": BASE,
    "native": BASE,
    "runtime": {
        *BASE,
        "host",
        "summary",
        "_torch",
        "_torch_device",
        "native",
        "aten",
        "modules",
        "trace",
        "plan",
        "pool",
    },
    "budget": {*BASE, "host", "summary", "runtime", "trace"},
    "__init__": {*BASE, "summary", "runtime", "budget"},
    # Leaves: nothing above imports them.
    "cli": {
        *BASE,
        "__init__",
        "host",
        "summary",
        "native",
        "runtime",
        "budget",
        "trace",
        "machine",
        "plan",
        "simulate",
        "planners",
        "pool",
    },
    "__main__": {"cli"},
}
# Rooms that must start without torch; a module or package in one may be named as "room.module" in NEEDS_TORCH.
TORCH_FREE = {
    "__init__",
    "units",
    "errors",
    "config",
    "host",
    "summary",
    "trace",
    "machine",
    "plan",
    "simulate",
    "planners",
    "pool",
}
NEEDS_TORCH = {"trace.symbolic", "machine.probe"}
NEEDS_NUMPY = {"simulate", "planners", "pool"}  # the extra `plan`


def module_files() -> dict[str, Path]:
    """Every module of the package by its name below torchdelta, "runtime.tiers.base" for example."""
    found = {}
    for path in sorted(ROOT.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        name = ".".join(parts[:-1] if len(parts) > 1 and parts[-1] == "__init__" else parts)
        found[name] = path
    return found


MODULES = module_files()


def imported_rooms(module: str) -> set[str]:
    """The rooms that a module imports anywhere in its text, also inside functions and under TYPE_CHECKING."""
    rooms = set()
    for node in ast.walk(ast.parse(MODULES[module].read_text(encoding="ascii"))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module} line {node.lineno}: relative import"
            base = node.module or ""
            names = [f"{base}.{alias.name}" for alias in node.names] if base == "torchdelta" else [base]
        else:
            continue
        for name in names:
            top, _, rest = name.partition(".")
            if top == "torchdelta":
                room = rest.split(".")[0]
                rooms.add(room if room and ((ROOT / room).is_dir() or (ROOT / f"{room}.py").is_file()) else "__init__")
    return rooms


@pytest.mark.parametrize("module", MODULES)
def test_imports_run_one_way(module):
    """A module imports only the rooms that the table allows to its own."""
    room = module.split(".")[0]
    assert room in MAY_IMPORT, f"{room} has no rule yet: add it to MAY_IMPORT"
    forbidden = imported_rooms(module) - MAY_IMPORT[room] - {room}
    assert not forbidden, f"torchdelta.{module} must not import {sorted(forbidden)}"


def test_the_table_has_no_circle():
    """The allowed directions can be put in one order."""
    seen = set()

    def visit(room, path):
        assert room not in path, f"circle: {' -> '.join([*path, room])}"
        if room not in seen:
            for below in MAY_IMPORT[room]:
                visit(below, [*path, room])
            seen.add(room)

    for room in MAY_IMPORT:
        visit(room, [])
    assert seen == set(MAY_IMPORT)


def test_torch_free_modules_bring_no_torch():
    """Importing all of them in a fresh interpreter leaves torch and the optional packages out of sys.modules."""
    names = [m for m in MODULES if m.split(".")[0] in TORCH_FREE and ".".join(m.split(".")[:2]) not in NEEDS_TORCH]
    without_numpy = [name for name in names if name.split(".")[0] not in NEEDS_NUMPY]
    for modules, forbidden in ((names, set()), (without_numpy, {"numpy", "numba"})):
        lines = ["import importlib, sys", "before = set(sys.modules)"]
        lines += [f"importlib.import_module('torchdelta{'' if m == '__init__' else '.' + m}')" for m in modules]
        lines += ["print(sorted({m.split('.')[0] for m in sys.modules if m not in before}))"]
        result = subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, check=True)
        loaded = set(ast.literal_eval(result.stdout))
        assert "torchdelta" in loaded
        assert not loaded & {"torch", "typer", "rich", "tqdm", "transformers", *forbidden}


def test_private_torch_is_named_in_one_place():
    """Only _torch.py, _torch_device.py and _torch_symbolic.py name torch._C, torch._ops and the like."""
    offenders = []
    for module, path in MODULES.items():
        if module in {"_torch", "_torch_device", "_torch_symbolic"}:
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="ascii"))):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            elif isinstance(node, ast.Attribute):
                names = [ast.unparse(node)]
            else:
                continue
            offenders += [f"{module}:{node.lineno} {name}" for name in names if _is_private_torch(name)]
    assert not offenders


def _is_private_torch(name: str) -> bool:
    parts = name.split(".")
    return parts[0] == "torch" and any(part.startswith("_") and not part.startswith("__") for part in parts[1:])


def test_sources_are_ascii_and_of_readable_length():
    """Sources hold ASCII only, and no file passes 500 lines."""
    for path in MODULES.values():
        assert path.read_bytes().isascii(), path
        assert len(path.read_text(encoding="ascii").splitlines()) <= 500, path
