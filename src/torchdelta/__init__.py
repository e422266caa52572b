"""Train any PyTorch model inside a byte budget, with the same bits as without it."""

__version__ = "0.1.0"
