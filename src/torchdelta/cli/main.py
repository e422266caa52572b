"""The entry point: `torchdelta COMMAND`.

Exit codes: 0 success; 1 failure, such as a damaged file; 2 wrong usage, such as an unknown option or name, or a path
that cannot be used; 78 an impossible budget (EX_CONFIG, so that a job script can tell it from a crash). `run` keeps the
exit code of the script. What is wrong is one line on stderr.
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
