"""Storages with known bytes."""

import random

import torch


def filled_storage(size_bytes: int, seed: int) -> torch.UntypedStorage:
    """Make a storage whose bytes follow from the seed."""
    storage = torch.UntypedStorage(size_bytes)
    if size_bytes:
        content = random.Random(seed).randbytes(size_bytes)
        as_bytes(storage).copy_(torch.frombuffer(bytearray(content), dtype=torch.uint8))
    return storage


def as_bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    """View a storage as a tensor of bytes."""
    return torch.empty(0, dtype=torch.uint8).set_(storage)


def is_equal(left: torch.UntypedStorage, right: torch.UntypedStorage) -> bool:
    """Compare byte for byte."""
    return torch.equal(as_bytes(left), as_bytes(right))
