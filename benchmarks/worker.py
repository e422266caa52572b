"""The process that is measured: `python -m benchmarks.worker MODULE:FUNCTION name=value ...`.

It calls a function of this package with the named values, which are JSON or else text, and prints what that returns as
one JSON object, such as `python -m benchmarks.worker steps:run model=tiny`. A process a run, because a peak must not
include what an earlier run left behind, and because some measures have to start before the first tensor exists.
"""

from __future__ import annotations

import importlib
import json
import sys
from typing import Any

import torch


def value_of(text: str) -> Any:
    """Return the value that a word of the command line stands for."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def main(words: list[str]) -> int:
    """Call the function and print its record last."""
    module, _, function = words[0].partition(":")
    options = {name: value_of(text) for name, _, text in (word.partition("=") for word in words[1:])}
    torch.set_num_threads(options.pop("threads", 1))
    print(json.dumps(getattr(importlib.import_module(f"benchmarks.{module}"), function)(**options)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
