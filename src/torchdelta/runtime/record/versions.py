"""Versions of tensors that ops on lists write.

[Note: ops on lists of tensors]
The in-place `_foreach` ops do not bump versions themselves. On CPU the ops that they run for each tensor do, but
below a dispatch mode these no longer reach the kernel that bumps. Without a bump autograd would not notice that a
saved parameter was stepped.
"""

from __future__ import annotations

import torch

from torchdelta._torch.tensors import version_of

__all__ = ["bump_missing", "versions_of"]


def versions_of(tensors: list[torch.Tensor]) -> list[tuple[torch.Tensor, int]]:
    """Return the tensors that have a version, each with it."""
    return [(tensor, version_of(tensor)) for tensor in tensors if not tensor.is_inference()]


def bump_missing(versions: list[tuple[torch.Tensor, int]]) -> None:
    """Bump the version of tensors that an op wrote without bumping it."""
    for tensor in [tensor for tensor, before in versions if version_of(tensor) == before]:
        torch.autograd.graph.increment_version(tensor)
