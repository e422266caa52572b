"""What is read from an op's schema decides how it is recorded."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from tests.runtime.parts import scoped_library
from torchdelta.aten.facts import Kind, OpFacts, facts_of
from torchdelta.aten.recomputable import RECOMPUTABLE

aten = torch.ops.aten
REMOVED = {"cholesky"}  # from torch 2.14 on

KINDS: list[tuple[Any, Kind]] = [
    (aten.mm.default, Kind.COMPUTE),
    (aten.native_dropout.default, Kind.COMPUTE),
    (aten.native_batch_norm.default, Kind.COMPUTE),
    (aten.clone.default, Kind.COMPUTE),
    (aten.view.default, Kind.VIEW),
    (aten.t.default, Kind.VIEW),
    (aten.split.Tensor, Kind.VIEW),
    (aten.detach.default, Kind.VIEW),
    (aten._unsafe_view.default, Kind.VIEW),
    (aten._local_scalar_dense.default, Kind.NO_OUTPUT),
    (aten.equal.default, Kind.NO_OUTPUT),
    (torch.ops.profiler._record_function_enter_new.default, Kind.NO_OUTPUT),
    (torch.ops.profiler._record_function_exit._RecordFunction, Kind.NO_OUTPUT),
    (aten.add_.Tensor, Kind.WRITE),
    (aten.add.out, Kind.WRITE),
    (aten._foreach_add_.Scalar, Kind.WRITE),
    (aten.set_.source_Storage, Kind.REPLACE),
    (aten.resize_.default, Kind.REPLACE),
]


@pytest.mark.parametrize(("op", "kind"), KINDS, ids=str)
def test_kind_of_an_op(op: Any, kind: Kind) -> None:
    """The kind follows the schema, and the tables where the schema is silent."""
    assert OpFacts(op).kind is kind


def test_written_arguments_are_found_by_position_and_by_name() -> None:
    """In-place ops write a position, `out=` variants a keyword, foreach ops a list."""
    assert OpFacts(aten.add_.Tensor).written_positions == (0,)
    assert OpFacts(aten.add.out).written_positions == ()
    assert OpFacts(aten.add.out).written_keywords == ("out",)
    assert OpFacts(aten._fused_adamw_.default).written_positions == (0, 1, 2, 3, 4)
    assert OpFacts(aten.mm.default).written_positions == ()


@pytest.mark.parametrize(
    "op", [aten.native_dropout.default, aten.bernoulli_.float, aten.randn.default, aten.rand_like.default]
)
def test_random_ops_are_known(op: Any) -> None:
    """What draws from a generator is replayed from the state it had."""
    assert OpFacts(op).is_random


@pytest.mark.parametrize("op", [aten.mm.default, aten.add_.Tensor, aten.native_layer_norm.default])
def test_ops_that_draw_nothing_are_known(op: Any) -> None:
    """Saving a generator's state costs bytes and time."""
    assert not OpFacts(op).is_random


def test_batch_norm_statistics_are_known() -> None:
    """One op hides that it writes them, its successors say so; both keep them."""
    hidden, legit, other = (
        OpFacts(op)
        for op in (
            aten.native_batch_norm.default,
            aten._native_batch_norm_legit.default,
            aten.native_layer_norm.default,
        )
    )
    assert hidden.keeps_statistics
    assert legit.keeps_statistics
    assert legit.written_positions == (3, 4)
    assert not other.keeps_statistics


def test_ops_that_overwrite_without_reading() -> None:
    """After them the old content is no dependency."""
    assert OpFacts(aten.zero_.default).overwrites
    assert OpFacts(aten.copy_.default).overwrites
    assert not OpFacts(aten.add_.Tensor).overwrites


@pytest.mark.parametrize(
    "op", [aten.empty.memory_format, aten._ctc_loss.default, aten.empty_like.default, aten.new_empty.default]
)
def test_ops_that_are_never_replayed(op: Any) -> None:
    """`empty` has no content of its own, and the loss of trap 30 gave wrong gradients."""
    assert not OpFacts(op).is_recomputable


def test_only_aten_is_recomputable() -> None:
    """An op of another namespace is not trusted, whatever its name."""
    with scoped_library("torchdelta_opfacts", "DEF") as library:
        library.define("mm(Tensor a, Tensor b) -> Tensor")
        assert not OpFacts(torch.ops.torchdelta_opfacts.mm.default).is_recomputable
    assert OpFacts(aten.mm.default).is_recomputable


def test_facts_are_read_once() -> None:
    """They live on the op: its hash is slow Python."""
    assert facts_of(aten.mm.default) is facts_of(aten.mm.default)
    assert aten.mm.default._torchdelta_facts is facts_of(aten.mm.default)


def test_every_op_of_the_allow_list_exists() -> None:
    """A misspelled name would silently be kept or swapped for ever."""
    missing = {name for name in RECOMPUTABLE if not hasattr(aten, name)}
    assert missing == (REMOVED if tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 14) else set())


def test_no_op_of_the_allow_list_is_on_torchs_list_of_nondeterministic_ones() -> None:
    """What torch itself tags as not repeatable (without being seeded) cannot be replayed."""
    tag = getattr(torch.Tag, "nondeterministic", None)
    flagged = [
        name
        for name in sorted(filter(partial(hasattr, aten), RECOMPUTABLE))
        for overload in getattr(aten, name).overloads()
        if tag is not None and tag in getattr(getattr(aten, name), overload).tags
    ]
    assert flagged == []
    assert not {"_coalesce", "allreduce_", "_c10d_functional"} & RECOMPUTABLE
