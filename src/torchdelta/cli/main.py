"""The entry point: `torchdelta COMMAND`.

Errors and exit codes: see errors.py.
"""

import sys
from typing import Final

__all__ = ["main"]

_EXTRA: Final = ("typer", "rich", "tqdm", "shellingham")


def main() -> None:
    """Run the command line; always raises SystemExit."""
    try:
        from torchdelta.cli.app import make_app
    except ModuleNotFoundError as error:
        if error.name not in _EXTRA:
            raise
        sys.exit(f"torchdelta: the command line needs {error.name}: pip install 'torchdelta[cli]'")
    make_app()()
