"""Counts the peak at the allocator of an ordinary script: `python -m benchmarks.script_peak SCRIPT ARGS`."""

from __future__ import annotations

import json
import runpy
import sys

from torchdelta.cli.allocator_peak import AllocatorPeak


def main() -> int:
    """Run the script under the meter and print one JSON object last."""
    sys.argv = sys.argv[1:]
    with AllocatorPeak() as meter:
        try:
            runpy.run_path(sys.argv[0], run_name="__main__")
        except SystemExit as stop:
            if stop.code:
                raise
    print(json.dumps({"peak_bytes": meter.peak_bytes, "num_events": meter.num_events}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
