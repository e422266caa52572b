"""What the papers put in front, really run on CPU: larger batches and smaller peaks under one limit in bytes.

The limit of a model is the peak of plain at a batch whose size is known, so that this is plain's largest batch. Under
it, batches of the papers' multiples train reactively and by a followed plan; a search finds the largest that trains at
all. Checked: the peak at the allocator, and each step's loss against plain's of the same batch without a limit. Beside
the time per sample stands plain's at its largest batch, and plain's with gradient accumulation to the same batch.
"""

from benchmarks.headlines.command import add_arguments, run

__all__ = ["add_arguments", "run"]
