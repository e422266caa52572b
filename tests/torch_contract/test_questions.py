"""The contract with torch: questions about tensors that torch answers with an error, or not in public.

A torch release that changes one fails here, by name.
"""

from __future__ import annotations

import pytest
import torch

from torchdelta._torch.tensors import (
    grad_fn_of,
    is_dense,
    is_in_transform,
    is_leaf,
    is_trained_leaf,
    is_trained_leaf_or_view,
    sizes_of,
    storage_of,
    version_of,
)


def refused_view() -> torch.Tensor:
    """Return a view made in `no_grad` whose base was written afterwards."""
    base = torch.ones(4, requires_grad=True).clone()
    with torch.no_grad():
        view = base[:2]
    base.mul_(2)
    return view


def test_ordinary_tensors() -> None:
    """Where torch answers, the answer is torch's."""
    x = torch.ones(4, requires_grad=True)
    y = x * 2
    assert is_leaf(x)
    assert not is_leaf(y)
    assert is_trained_leaf(x)
    assert not is_trained_leaf(torch.ones(4))
    assert is_trained_leaf_or_view(x[:2])
    assert not is_trained_leaf_or_view(y[:2])
    assert grad_fn_of(x) is None
    assert grad_fn_of(y) is y.grad_fn is not None
    assert sizes_of(y) == (4,)
    storage = storage_of(y)
    assert storage is not None
    assert storage.data_ptr() == y.data_ptr()


def test_every_question_has_an_answer() -> None:
    """Leaf, node, version and storage are told of tensors for which torch raises instead."""
    view = refused_view()
    for question in ("is_leaf", "grad_fn"):
        with pytest.raises(RuntimeError, match="no_grad mode"):
            getattr(view, question)
    assert not is_leaf(view)
    assert not is_trained_leaf(view)  # its base was computed
    assert grad_fn_of(view) is None
    with torch.inference_mode():
        assert version_of(torch.ones(3)) == 0
    sparse = torch.eye(3).to_sparse()
    with pytest.raises(RuntimeError):
        sparse.untyped_storage()
    assert storage_of(sparse) is None


def test_a_refused_view_of_a_parameter_counts_as_the_parameter() -> None:
    """The optimizer's view of a complex parameter is trained before and after the parameter was written."""
    parameter = torch.nn.Parameter(torch.ones(2, dtype=torch.complex64))
    with torch.no_grad():
        view = torch.view_as_real(parameter)
        assert is_trained_leaf(view)
        parameter.add_(1)
    with pytest.raises(RuntimeError, match="no_grad mode"):
        _ = view.is_leaf
    assert is_trained_leaf(view)
    assert is_trained_leaf_or_view(view)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_sizes_of_a_nested_tensor() -> None:
    """It has no shape; its parts have."""
    nested = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(4, 3)])
    with pytest.raises(RuntimeError):
        _ = nested.shape
    assert sizes_of(nested) == ([2, 3], [4, 3])


def test_is_in_transform() -> None:
    """The tensors that a transform hands to its function are told from plain ones, and have no storage."""
    x, seen = torch.ones(3), list[tuple[bool, bool]]()

    def function(inner: torch.Tensor) -> torch.Tensor:
        seen.append((is_in_transform(inner), storage_of(inner) is None))
        return inner.sum()

    torch.vmap(function)(torch.ones(2, 3))
    torch.func.grad(function)(x)
    assert seen == [(True, True), (True, True)]
    assert not is_in_transform(x)


def test_is_dense() -> None:
    """As torch's own `is_non_overlapping_and_dense`, which Python does not have."""
    x = torch.ones(2, 3, 4, 5)
    for each in (x, x.transpose(1, 3), x.contiguous(memory_format=torch.channels_last)):
        assert is_dense(each)
    for each in (x[:, 1], x[:, :, ::2], x[:1].expand(2, 3, 4, 5), torch.ones(4096).as_strided((2, 2048), (1024, 1))):
        assert not is_dense(each)
    assert is_dense(torch.ones(()))
    assert is_dense(torch.ones(3, 1).expand(3, 1))
