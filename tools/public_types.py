"""Checks that every type of the public interface is known: `python -m tools.public_types`.

`pyright --verifytypes` judges every module whose name has no underscore, which here are all. What users build on are
the names of `torchdelta.__all__` with their members, and the integrations: of these nothing may be unknown or
ambiguous, so that a user's type checker sees what ours sees.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import torchdelta

__all__ = ["faults_of", "is_public"]

# Frameworks that the tests do not install: the types that come from them are unknown here.
NOT_INSTALLED: Final = ("torchdelta.integrations.axolotl.",)


def is_public(name: str, homes: dict[str, str]) -> bool:
    """Return whether a symbol, by its full name, belongs to the public interface."""
    if name.startswith(NOT_INSTALLED):
        return False
    if name.startswith("torchdelta.integrations."):
        return not any(part.startswith("_") and not part.startswith("__") for part in name.split("."))
    objects = [f"{module}.{exported}" for exported, module in homes.items()]
    objects += [f"torchdelta.{exported}" for exported in homes]
    return any(name == each or name.startswith(f"{each}.") for each in objects)


def faults_of(report: dict[str, Any], homes: dict[str, str]) -> list[str]:
    """Return a line for each public symbol of pyright's report whose type is unknown or ambiguous."""
    faults: list[str] = []
    for symbol in report["typeCompleteness"]["symbols"]:
        if (symbol["isTypeKnown"] and not symbol["isTypeAmbiguous"]) or not is_public(symbol["name"], homes):
            continue
        messages = [found["message"].partition("\n")[0] for found in symbol["diagnostics"]]
        faults.append(f"{symbol['name']}: {'; '.join(messages) or 'its type is unknown'}")
    return faults


def main() -> int:
    """Ask pyright, and print what is wrong; 1 if something is."""
    source = Path(torchdelta.__file__).parents[1]
    # `--verifytypes` takes no interpreter: it finds packages by the first `python` of PATH.
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    paths = os.pathsep.join(filter(None, [str(source), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, "-m", "pyright", "--verifytypes", "torchdelta", "--ignoreexternal", "--outputjson"],
        env=os.environ | {"PATH": path, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=False,
    )
    report = json.loads(done.stdout)
    faults = faults_of(report, torchdelta._HOMES)
    num_judged = sum(is_public(symbol["name"], torchdelta._HOMES) for symbol in report["typeCompleteness"]["symbols"])
    print("\n".join(faults) or f"all {num_judged} public types are known")
    return int(bool(faults) or num_judged == 0)


if __name__ == "__main__":
    sys.exit(main())
