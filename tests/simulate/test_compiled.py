"""Compiled code is kept as long as no source changes, wherever the package lies, and not longer."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

import torchdelta
from torchdelta.simulate.compiled import SOURCES, digest

ROOT = Path(__file__).parents[2]

PROGRAM = """
from pathlib import Path
from tests.planners.chains import MACHINE, MIB, chain
from torchdelta.simulate.compiled import code_folder
from torchdelta.simulate.kernel import evaluate
from torchdelta.simulate.problem import PlanningProblem

step = chain([(8 * MIB, 2e-3, 1e-4)] * 2)
problem = PlanningProblem.of(step, MACHINE)
problem.score(problem.keep_all(), 64 * MIB)
print(code_folder(), sum(evaluate.stats.cache_hits.values()), sum(evaluate.stats.cache_misses.values()))
"""


def run_program(directory):
    """Evaluate a step in a process of its own, whose cache is there; return the folder, loads and compilations."""
    environment = {name: value for name, value in os.environ.items() if name != "NUMBA_CACHE_DIR"}
    environment["TORCHDELTA_CACHE_DIR"] = str(directory)
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr[-2000:]
    folder, loaded, compiled = ended.stdout.split()
    return folder, int(loaded), int(compiled)


@pytest.mark.rest
def test_the_second_process_compiles_nothing(tmp_path):
    """What the first one compiled lies in torchdelta's cache directory."""
    folder, loaded, compiled = run_program(tmp_path)
    assert (loaded, compiled) == (0, 1)
    assert Path(folder).parent == tmp_path / "compiled"
    assert run_program(tmp_path) == (folder, 1, 0)


@pytest.mark.whole
def test_without_a_folder_each_process_compiles(tmp_path):
    """A file stands where the folder would be: nothing is kept, and nothing fails."""
    (tmp_path / "compiled").write_text("no folder")
    assert run_program(tmp_path)[0] == "None"


def test_a_change_in_any_source_changes_the_digest(tmp_path):
    """A caller's code holds that of what it calls, in folders below too."""
    folders = tmp_path / "kernel", tmp_path / "search"
    for folder in folders:
        (folder / "below").mkdir(parents=True)
        (folder / "below" / "code.py").write_text("old")
    before = digest(folders)
    assert digest(folders) == before
    for folder in folders:
        (folder / "below" / "code.py").write_text("new")
        assert digest(folders) != before
        (folder / "below" / "code.py").write_text("old")


def test_no_compiled_function_calls_one_outside_of_these_folders():
    """What is compiled elsewhere (the pool) calls nothing compiled in another file, so numba notices every change."""
    compiled_names = {}
    imports = {}
    for path in Path(torchdelta.__file__).parent.rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
        compiled_names[path] = {
            function.name
            for function in functions
            if any(
                word in ast.dump(decorator) for decorator in function.decorator_list for word in ("njit", "compiled")
            )
        }
        imports[path] = {
            alias.name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names
        }
    inside = {path for path, found in compiled_names.items() if found and any(s in path.parents for s in SOURCES)}
    assert {"kernel.py", "clock.py", "memory_need.py", "moves.py", "windows.py"} <= {path.name for path in inside}
    for path, mine in compiled_names.items():
        if mine and path not in inside:
            others = set().union(*(found for other, found in compiled_names.items() if other != path))
            assert not imports[path] & others, path.name
