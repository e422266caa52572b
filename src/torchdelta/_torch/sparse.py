"""What sparse tensors consist of: plain tensors. A sparse tensor itself has no storage."""

from __future__ import annotations

import torch

from torchdelta._torch.modes import NoDispatch, NoFunction

__all__ = ["parts_of_sparse"]


def parts_of_sparse(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the values and indices of a sparse tensor; none of another tensor without a storage."""
    try:
        with NoDispatch(), NoFunction(), torch.no_grad():
            layout = tensor.layout
            if layout is torch.sparse_coo:
                return [tensor._values(), tensor._indices()]
            if layout in {torch.sparse_csr, torch.sparse_bsr}:
                return [tensor.values(), tensor.crow_indices(), tensor.col_indices()]
            if layout in {torch.sparse_csc, torch.sparse_bsc}:
                return [tensor.values(), tensor.ccol_indices(), tensor.row_indices()]
    except RuntimeError:  # inside `vmap`, for example
        pass
    return []
