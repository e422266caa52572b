"""Compiled code is kept as long as no source changes, and not longer."""

import ast
import os
from pathlib import Path

import torchdelta
from torchdelta.simulate.stale_code import FOLDERS, forget_stale_code


def make_folders(tmp_path):
    """Two folders with a source and compiled code each."""
    folders = tmp_path / "kernel", tmp_path / "search"
    for folder in folders:
        (folder / "__pycache__").mkdir(parents=True)
        (folder / "code.py").write_text("old\n")
    compile_again(folders)
    return folders


def compile_again(folders):
    """Leave what numba leaves."""
    for folder in folders:
        for ending in ("nbi", "1.nbc"):
            (folder / "__pycache__" / f"code.f-1.py311.{ending}").write_bytes(b"code")


def compiled(folders):
    """Return what is left of it."""
    return [path.name for folder in folders for path in (folder / "__pycache__").glob("*.nb?")]


def test_a_change_in_one_folder_forgets_the_code_of_both(tmp_path):
    """A caller's code holds that of what it calls."""
    folders = make_folders(tmp_path)
    forget_stale_code(folders)
    assert compiled(folders) == []  # nobody knows what that was made from
    compile_again(folders)
    forget_stale_code(folders)
    assert len(compiled(folders)) == 4
    source = folders[0] / "code.py"
    source.write_text("new\n")
    os.utime(source, ns=(1, 1))
    forget_stale_code(folders)
    assert compiled(folders) == []


def test_folders_that_cannot_be_written_are_left_alone(tmp_path):
    """A package in an archive, or one that belongs to somebody else, still imports."""
    file = tmp_path / "file"
    file.write_text("no folder")
    forget_stale_code([file])
    assert file.read_text() == "no folder"


def test_no_compiled_function_calls_one_outside_of_these_folders():
    """What is compiled elsewhere (the pool) calls nothing compiled in another file, so numba notices every change."""
    compiled_names = {}
    imports = {}
    for path in Path(torchdelta.__file__).parent.rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
        compiled_names[path] = {f.name for f in functions if any("njit" in ast.dump(d) for d in f.decorator_list)}
        imports[path] = {
            alias.name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names
        }
    inside = {path for path, found in compiled_names.items() if found and path.parent in FOLDERS}
    assert {"kernel.py", "clock.py", "memory_need.py", "moves.py", "windows.py"} <= {path.name for path in inside}
    for path, mine in compiled_names.items():
        if mine and path not in inside:
            others = set().union(*(found for other, found in compiled_names.items() if other != path))
            assert not imports[path] & others, path.name
