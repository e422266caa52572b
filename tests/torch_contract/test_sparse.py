"""The plain tensors that a sparse one consists of."""

from __future__ import annotations

import pytest
import torch

from torchdelta._torch.sparse import parts_of_sparse


@pytest.mark.parametrize(
    "layout", [torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc]
)
@pytest.mark.filterwarnings("ignore:Sparse (CSR|CSC|BSR|BSC|invariant)")
def test_the_parts_share_the_memory_of_the_sparse_tensor(layout: torch.layout) -> None:
    """The first ones are the values."""
    dense = torch.eye(4)
    blocksize = (2, 2) if layout in {torch.sparse_bsr, torch.sparse_bsc} else None
    sparse = dense.to_sparse(layout=layout, blocksize=blocksize)
    parts = parts_of_sparse(sparse)
    assert len(parts) == 2 + (layout is not torch.sparse_coo)
    parts[0].mul_(3)
    assert torch.equal(sparse.to_dense(), 3 * dense)
    assert all(part.layout is torch.strided for part in parts)


def test_a_dense_tensor_has_no_parts() -> None:
    """Nor has one of another kind."""
    assert parts_of_sparse(torch.ones(2)) == []
    assert parts_of_sparse(torch.ones(2).to_mkldnn()) == []
