"""What every test shares: subprocesses find the package where this checkout has it."""

import os
from pathlib import Path

_SRC = str(Path(__file__).parent.parent / "src")
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [_SRC, os.environ.get("PYTHONPATH")]))
