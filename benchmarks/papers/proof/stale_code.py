"""Machine code of an older version is not run: numba's cache looks at one file, and a call may cross into another.

numba keeps compiled code beside each source and compiles again when that source has changed. What a function calls in
another file is inside its code, and a change there goes unnoticed: after an update of part of the sources (`git pull`)
a proof would go on with the code of before, or crash where the arrays have changed. Not reached: code that
`NUMBA_CACHE_DIR` sends elsewhere; whoever sets it while changing sources has to empty it.
"""

from collections.abc import Iterable
from pathlib import Path

__all__ = ["forget_stale_code"]

_STAMP = "compiled.stamp"


def forget_stale_code(folders: Iterable[Path]) -> None:
    """Remove the compiled code of all these folders if a source in any of them has changed since it was looked at.

    Where the folders cannot be written nothing happens: there numba keeps its code elsewhere, and an installation
    writes all sources anew.
    """
    folders = tuple(folders)
    sources = sorted(path for folder in folders for path in folder.glob("*.py"))
    facts = [(path.name, path.stat()) for path in sources]
    stamp = "\n".join(f"{name} {fact.st_mtime_ns} {fact.st_size}" for name, fact in facts)
    for folder in folders:
        cache = folder / "__pycache__"
        try:
            if (cache / _STAMP).exists() and (cache / _STAMP).read_text(encoding="utf-8") == stamp:
                continue
            for pattern in ("*.nbi", "*.nbc"):
                for path in cache.glob(pattern):
                    path.unlink(missing_ok=True)
            cache.mkdir(exist_ok=True)
            (cache / _STAMP).write_text(stamp, encoding="utf-8")
        except OSError:
            return
