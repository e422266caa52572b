"""Imports run one way, and what needs no torch brings none along."""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import torchdelta

if TYPE_CHECKING:
    from collections.abc import Callable

ROOT = Path(torchdelta.__file__).parent

# For each room (a module or a package right under torchdelta): the rooms it may import, beside itself.
BASE = {"units", "errors", "names", "config", "whole_file"}
MAY_IMPORT = {
    "errors": set(),
    "units": {"errors"},
    "names": set(),
    "whole_file": set(),
    "settings_file": {"errors"},
    "config": {"errors", "names", "settings_file", "units"},
    "settings": {*BASE, "settings_file"},
    "host": BASE,
    "html_table": set(),
    "cache_folder": set(),
    "summary": {*BASE, "html_table"},
    "aten": {*BASE, "_torch"},
    "modules": {*BASE, "_torch"},
    "trace": {*BASE, "_torch", "aten", "modules", "notices"},  # for its symbolic part
    "machine": {*BASE, "host", "cache_folder", "trace"},
    "plan": {*BASE, "trace", "machine"},
    "simulate": {*BASE, "trace", "machine", "plan"},
    "bounds": {*BASE, "trace", "machine", "plan"},
    "planners": {*BASE, "trace", "machine", "plan", "simulate", "bounds", "pool"},
    "pool": {*BASE, "trace", "plan"},
    "notices": BASE,
    "_torch": BASE,
    "native": {*BASE, "cache_folder"},
    "arena": {*BASE, "_torch", "native", "notices", "pool", "trace"},
    "runtime": {
        *BASE,
        "arena",
        "notices",
        "host",
        "summary",
        "_torch",
        "native",
        "aten",
        "modules",
        "trace",
        "machine",
        "plan",
        "pool",
    },
    "budget": {*BASE, "host", "settings", "summary", "runtime", "trace", "plan"},
    "__init__": {*BASE, "summary", "runtime", "budget", "planners"},
    # Leaves: nothing above imports them.
    "cli": {
        *BASE,
        "__init__",
        "host",
        "settings",
        "summary",
        "native",
        "runtime",
        "budget",
        "trace",
        "machine",
        "plan",
        "simulate",
        "bounds",
        "planners",
        "pool",
    },
    "integrations": {*BASE, "host", "notices", "summary", "runtime", "budget", "trace", "machine", "plan", "planners"},
    "__main__": {"cli"},
}
# Rooms that must start without torch; a module or package in one may be named as "room.module" in NEEDS_TORCH.
TORCH_FREE = {
    "__init__",
    "units",
    "errors",
    "names",
    "whole_file",
    "config",
    "settings_file",
    "settings",
    "host",
    "html_table",
    "cache_folder",
    "summary",
    "trace",
    "machine",
    "plan",
    "simulate",
    "bounds",
    "planners",
    "pool",
}
NEEDS_TORCH = {"trace.symbolic", "machine.probe", "machine.share"}
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


# The rooms of the runtime, from low to high: each imports only from the lines above its own.
RUNTIME_ORDER = (
    {"errors", "call_all", "saved_hooks"},
    {"interrupts"},
    {"tiers"},
    {"state"},
    {"device", "policies"},
    {"memory"},
    {"follow"},
    {"record"},
    {"survey", "observe"},
    {"optimizer_steps"},
    {"report", "shared_tier"},
    {"current"},
    {"patches"},
    {"session"},
)
MAX_LINES = 500
MAX_LINES_RUNTIME = 400


def place(module: str, line: int = 1) -> str:
    """Return where a module's line is, "runtime/session.py:12" for example, for messages."""
    return f"{MODULES[module].relative_to(ROOT)}:{line}"


@functools.cache
def tree_of(module: str) -> ast.Module:
    """Return a module's syntax tree."""
    return ast.parse(MODULES[module].read_text(encoding="ascii"))


@functools.cache
def imports_of(module: str) -> dict[str, int]:
    """Return what a module imports from the package, and the first line of each import.

    Imports inside functions and under TYPE_CHECKING count: whoever reads a module has to read what it names there too.
    """
    found: dict[str, int] = {}
    for node in ast.walk(tree_of(module)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{place(module, node.lineno)}: relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            if name.partition(".")[0] == "torchdelta":
                below = name.removeprefix("torchdelta").removeprefix(".")
                while below and below not in MODULES:  # a name inside a module
                    below = below.rpartition(".")[0]
                below = below or "__init__"
                found[below] = min(node.lineno, found.get(below, node.lineno))
    return found


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Return one circle, as short as there is, of every set of modules that reach each other."""
    found: list[list[str]] = []
    covered: set[str] = set()
    for start in graph:
        if start in covered:
            continue
        came_from = {start: ""}
        queue = [start]
        for module in queue:
            if start in graph[module]:
                way = [start]
                back = module
                while back:
                    way.insert(0, back)
                    back = came_from[back]
                found.append(way)
                covered |= _reach_each_other(graph, start)
                break
            for below in sorted(graph[module] - came_from.keys()):
                came_from[below] = module
                queue.append(below)
    return found


def _reach_each_other(graph: dict[str, set[str]], start: str) -> set[str]:
    above: dict[str, set[str]] = {module: set() for module in graph}
    for module, belows in graph.items():
        for below in belows:
            above[below].add(module)
    return _reachable(graph, start) & _reachable(above, start)


def _reachable(graph: dict[str, set[str]], start: str) -> set[str]:
    seen = {start}
    queue = [start]
    for module in queue:
        new = graph[module] - seen
        seen |= new
        queue += sorted(new)
    return seen


def circles_with_places(is_part: Callable[[str], bool]) -> list[str]:
    """Return the import circles among some of the modules, each as the lines that make it."""
    graph = {module: {below for below in imports_of(module) if is_part(below)} for module in MODULES if is_part(module)}
    return [
        " -> ".join(place(above, imports_of(above)[below]) for above, below in pairwise(circle))
        for circle in circles(graph)
    ]


def test_imports_run_one_way():
    """A module imports only the rooms that the table allows to its own."""
    rooms = {module.split(".")[0] for module in MODULES}
    assert rooms <= set(MAY_IMPORT), f"no rule yet for {sorted(rooms - set(MAY_IMPORT))}: add it to MAY_IMPORT"
    offenders = []
    for module in MODULES:
        room = module.split(".")[0]
        for below, line in imports_of(module).items():
            if below.split(".")[0] not in {room, *MAY_IMPORT[room]}:
                offenders.append(f"{place(module, line)} must not import torchdelta.{below}")
    assert not offenders, "\n".join(offenders)


def test_no_import_circle_outside_of_the_runtime():
    """No module outside of runtime/ imports itself by way of others, not even for the names of types."""
    assert circles_with_places(lambda module: module.split(".")[0] != "runtime") == []


def test_no_import_circle_in_the_runtime():
    """No module of runtime/ imports itself by way of others, not even for the names of types."""
    assert circles_with_places(lambda module: module.split(".")[0] == "runtime") == []


def test_import_circles_are_found():
    """The search finds a circle of two, one of three, and one that begins outside of it; a chain has none."""
    assert circles({"a": {"b"}, "b": {"c"}, "c": set()}) == []
    assert circles({"a": {"b"}, "b": {"a"}}) == [["a", "b", "a"]]
    assert circles({"x": {"a"}, "a": {"b"}, "b": {"c"}, "c": {"a"}}) == [["a", "b", "c", "a"]]
    assert circles({"a": {"b"}, "b": {"a"}, "c": {"d", "a"}, "d": {"c"}}) == [["a", "b", "a"], ["c", "d", "c"]]


def test_imports_between_the_rooms_of_the_runtime_run_one_way():
    """A module of runtime/ imports only rooms that stand lower than its own."""
    level = {room: index for index, rooms in enumerate(RUNTIME_ORDER) for room in rooms}
    offenders = []
    for module in MODULES:
        if not module.startswith("runtime."):
            continue
        room = module.split(".")[1]
        assert room in level, f"runtime.{room} has no rule yet: add it to RUNTIME_ORDER"
        for below, line in imports_of(module).items():
            if below.startswith("runtime.") and (other := below.split(".")[1]) != room and level[other] >= level[room]:
                offenders.append(f"{place(module, line)} must not import torchdelta.{below}")
    assert not offenders, "\n".join(offenders)


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
    """Only _torch.py, torch_device.py and torch_symbolic.py name torch._C, torch._ops and the like."""
    offenders = []
    for module in MODULES:
        if module.split(".")[0] == "_torch":
            continue
        for node in ast.walk(tree_of(module)):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            elif isinstance(node, ast.Attribute):
                names = [ast.unparse(node)]
            else:
                continue
            offenders += [f"{place(module, node.lineno)} {name}" for name in names if _is_private_torch(name)]
    assert not offenders


# Private attributes of torch's objects that are named like something of ours.
ATTRIBUTES_OF_TORCH = {"_base", "_cdata", "_modules", "_op", "_parameters", "_buffers", "_schema", "_version"}
# Whose private attributes may be named: our own object's, Python's, and the ops, many of which begin with "_".
OWNERS_LET_THROUGH = {"self", "cls", "super()", "sys", "os", "runpy", "aten", "torch.ops.aten"}


def private_attributes(tree: ast.Module, ours: set[str]) -> list[tuple[int, str]]:
    """Return the line and the text of each private attribute that is read off an object which is not ours."""
    found: list[tuple[int, str]] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            owner, name = ast.unparse(node.value), node.attr
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in {"getattr", "hasattr", "attrgetter", "setattr"}:
            constants = [a.value for a in node.args if isinstance(a, ast.Constant) and isinstance(a.value, str)]
            owner, name = "", constants[0] if constants else ""
        else:
            continue
        is_private = name.startswith("_") and not name.startswith(("__", "_torchdelta_"))
        is_private = is_private and name != "_replace"  # of named tuples: it is public
        if is_private and owner not in OWNERS_LET_THROUGH and (name in ATTRIBUTES_OF_TORCH or name not in ours):
            found.append((node.lineno, ast.unparse(node)))
    return found


def names_made_in(tree: ast.Module) -> set[str]:
    """Return the names that a module defines: functions, classes, variables, attributes of `self`, slots."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self":
            found.add(node.attr)
    return found


def test_private_attributes_of_torch_are_read_in_one_place():
    """Only the package _torch reads `._cdata`, `._op`, `._version` and the like off objects of torch."""
    outside = [module for module in MODULES if module.split(".")[0] != "_torch"]
    ours = set().union(*(names_made_in(tree_of(module)) for module in outside))
    offenders = [
        f"{place(module, line)} {text}"
        for module in outside
        for line, text in private_attributes(tree_of(module), ours)
    ]
    assert offenders == []


@pytest.mark.parametrize(
    "code",
    [
        "storage._cdata",
        "func._op(x)",
        "func._schema.name",
        "x._version",
        "x.y._base",
        "x._is_view()",
        "getattr(x, '_g')",
    ],
)
def test_private_attributes_of_torch_are_found(code):
    """The search finds each of them, also where a class of ours has a method of that name."""
    assert private_attributes(ast.parse(code), {"_version", "_op"})
    assert not private_attributes(ast.parse("self._version; sys._getframe(); aten._ctc_loss; x._ours"), {"_ours"})


def _is_private_torch(name: str) -> bool:
    parts = name.split(".")
    return parts[0] == "torch" and any(part.startswith("_") and not part.startswith("__") for part in parts[1:])


def too_long(*, in_runtime: bool, max_lines: int) -> list[str]:
    """Return the files that have more lines than they may."""
    lengths = {
        path: len(path.read_text(encoding="ascii").splitlines())
        for module, path in MODULES.items()
        if (module.split(".")[0] == "runtime") == in_runtime
    }
    return [f"{path.relative_to(ROOT)}: {length} lines" for path, length in lengths.items() if length > max_lines]


def test_sources_are_ascii_and_of_readable_length():
    """Sources hold ASCII only, and no file passes 500 lines."""
    assert [place(module) for module, path in MODULES.items() if not path.read_bytes().isascii()] == []
    assert too_long(in_runtime=False, max_lines=MAX_LINES) + too_long(in_runtime=True, max_lines=MAX_LINES) == []


def test_files_of_the_runtime_are_shorter():
    """No file of runtime/ passes 400 lines."""
    assert too_long(in_runtime=True, max_lines=MAX_LINES_RUNTIME) == []
