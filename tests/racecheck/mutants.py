"""Mutants: the tiers with one wait removed, each of which the checker must find.

A *wait* is any call that makes a stream or the host wait, and each reference that holds memory during a copy. The list
is read from the source (`find_mutants`), so a wait that is added to the tiers has its mutant at once. A mutant replaces
the code object of one function while it is applied; no file is written.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import pkgutil
import types
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from torchdelta.runtime import tiers

if TYPE_CHECKING:
    from collections.abc import Iterator

# The calls that wait, and the questions whose answer lets the caller go on. The mutant takes every answer for yes.
WAITS: Final = frozenset({"arrive", "finish", "follow", "hold_compute", "is_done", "is_reached", "wait", "wait_stream"})
LOCK_WAIT: Final = "job.done.acquire()"  # the only lock that stands for the end of a copy
MODULES: Final = (
    *(f"torchdelta.runtime.tiers.{found.name}" for found in pkgutil.iter_modules(tiers.__path__)),
    "torchdelta.runtime.device.streams",
    "torchdelta.runtime.memory.transfers",
    "torchdelta.runtime.state.copies",
)


@dataclass(frozen=True, kw_only=True, order=True)
class Mutant:
    """One wait, and where it is.

    Attributes:
        module: The module's name.
        function: Qualified name of the function.
        index: Number of the wait in the function, from 0.
        line: The source of the wait.
    """

    module: str
    function: str
    index: int
    line: str

    @property
    def name(self) -> str:
        """Where it is, in short."""
        return f"{self.module.removeprefix('torchdelta.runtime.')}:{self.function}#{self.index}"


class _Remover(ast.NodeTransformer):
    """Removes the wait of one number, or none and lists them all."""

    def __init__(self, index: int | None = None) -> None:
        self.lines: list[str] = []
        self._index = index

    def _is_chosen(self, node: ast.AST) -> bool:
        self.lines.append(ast.unparse(node))
        return len(self.lines) - 1 == self._index

    def visit_Call(self, node: ast.Call) -> ast.AST:
        """Replace a wait by the answer yes, which also passes for a number of seconds."""
        self.generic_visit(node)
        name = node.func.attr if isinstance(node.func, ast.Attribute) else ""
        is_wait = name in WAITS or ast.unparse(node) == LOCK_WAIT
        if is_wait and self._is_chosen(node):
            return ast.copy_location(ast.Constant(value=True), node)
        return node

    def visit_Assign(self, node: ast.Assign) -> ast.AST:
        """Remove what holds a storage during a copy: the tier's table of transfers."""
        self.generic_visit(node)
        target = node.targets[0]
        holds = isinstance(target, ast.Subscript) and ast.unparse(target.value).endswith("in_flight")
        if holds and self._is_chosen(node):
            return ast.copy_location(ast.Pass(), node)
        return node


def find_mutants() -> list[Mutant]:
    """List every wait of the tiers and of what calls them."""
    mutants: list[Mutant] = []
    for module in MODULES:
        for name, node in _functions(_tree(module)):
            remover = _Remover()
            remover.visit(node)
            mutants += [
                Mutant(module=module, function=name, index=index, line=line) for index, line in enumerate(remover.lines)
            ]
    return mutants


@contextlib.contextmanager
def applied(mutant: Mutant) -> Iterator[None]:
    """Remove the wait inside the context."""
    tree = _tree(mutant.module)
    (node,) = (node for name, node in _functions(tree) if name == mutant.function)
    _Remover(mutant.index).visit(node)
    ast.fix_missing_locations(tree)
    module = importlib.import_module(mutant.module)
    compiled = compile(tree, str(module.__file__), "exec", dont_inherit=True)
    code = _code_of(compiled, mutant.function.split("."))
    function: Any = _plain_function(module, mutant.function.split("."))
    plain = function.__code__
    function.__code__ = code
    try:
        yield
    finally:
        function.__code__ = plain


def _tree(module: str) -> ast.Module:
    path = importlib.import_module(module).__file__
    assert path is not None
    return ast.parse(Path(path).read_text(encoding="utf-8"))


def _functions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, ast.FunctionDef]]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef):
            yield prefix + node.name, node
        elif isinstance(node, ast.ClassDef):
            yield from _functions(node, f"{prefix}{node.name}.")


def _code_of(code: types.CodeType, path: list[str]) -> types.CodeType:
    for name in path:
        (code,) = (one for one in code.co_consts if isinstance(one, types.CodeType) and one.co_name == name)
    return code


def _plain_function(owner: Any, path: list[str]) -> Any:
    for name in path:
        owner = vars(owner)[name]
    # A context manager of contextlib wraps the generator that has the code.
    return getattr(owner, "__wrapped__", owner)
