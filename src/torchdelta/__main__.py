"""`python -m torchdelta` is the `torchdelta` command, for where no script was installed (and under `torchrun`)."""

import sys

from torchdelta.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
