"""Which names of the package _torch have a contract test, and which do not."""

from __future__ import annotations

import ast
from pathlib import Path

from torchdelta import _torch

HERE = Path(__file__).parent
# Names without a test of their own in this folder. A name that gets one is taken off here.
ELSEWHERE = {
    # Of our own, without anything of torch's in them.
    "compiled.Begin",
    "compiled.InputsOf",
    "doors.together",
    "ops.Guarded",
    # They need an accelerator: tests/accelerator and tests/cuda.
    "device.allocator_statistics",
    "device.before_captures",
    "device.begin_pool",
    "device.can_watch_allocator",
    "device.end_pool",
    "device.reset_allocator_peak",
    "device.stream_id_reader",
}


def names_in(tree: ast.Module) -> set[str]:
    """Return the public names that a module makes at its top level."""
    found: set[str] = set()
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Assign):
            found |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found.add(node.target.id)
    return {name for name in found if not name.startswith("_")}


def test_every_name_has_a_contract_test() -> None:
    """Each public name of each file of _torch is used by a test in this folder, or listed above."""
    used: set[str] = set()
    for path in HERE.glob("test_*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="ascii"))):
            if isinstance(node, ast.Name):
                used.add(node.id)
            elif isinstance(node, ast.Attribute):
                used.add(node.attr)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and "import" in node.value:
                used |= {name for name in node.value.replace("(", " ").split() if name.isidentifier()}
    missing = {
        f"{path.stem}.{name}"
        for path in sorted(Path(str(_torch.__file__)).parent.glob("*.py"))
        for name in sorted(names_in(ast.parse(path.read_text(encoding="ascii"))) - used)
    }
    assert missing == ELSEWHERE
