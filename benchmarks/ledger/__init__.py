"""Every published figure about GPUs beside our prediction of it: the ledger, its page and its picture.

Traces each published step symbolically (once; kept in the user's cache directory), fits the kernel model with one
model, one GPU and one source left out in turn, and predicts every figure with the shares that are shipped. Nothing runs
on a GPU. Needs timm, transformers and scipy.
"""

from benchmarks.ledger.command import add_arguments, run

__all__ = ["add_arguments", "run"]
