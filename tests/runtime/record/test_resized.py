"""Storages that are resized where no op is seen."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.runtime.programs import running

if TYPE_CHECKING:
    from torchdelta.runtime.session import Session


def fail_in_preparation(session: Session, patch: pytest.MonkeyPatch, *, has_ended_content: bool) -> None:
    """Let there be no memory when a resize is prepared, before or after the content of the storage is ended."""
    before_write = session.restorer.before_write

    def fail(*args: Any) -> None:
        if has_ended_content:
            before_write(*args)
        raise MemoryError

    patch.setattr(session.restorer, "before_write", fail)


@pytest.mark.parametrize("has_ended_content", [False, True])
def test_a_resize_that_cannot_be_prepared_changes_nothing(*, has_ended_content: bool) -> None:
    """The storage keeps its size, so a saved tensor on it keeps its content."""
    weight, x = torch.randn(64, 64, requires_grad=True), torch.randn(64, 64)
    with running() as (_, session):
        y = weight * x
        with pytest.MonkeyPatch.context() as patch:
            fail_in_preparation(session, patch, has_ended_content=has_ended_content)
            with pytest.raises(MemoryError):
                x.untyped_storage().resize_(0)
        y.sum().backward()
    assert weight.grad is not None
    assert torch.equal(weight.grad, x)
