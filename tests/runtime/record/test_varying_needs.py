"""Ops whose output size depends on the content of their inputs, and resizes: what they need is not known by shapes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.runtime.parts import scoped_library
from tests.runtime.programs import UNLIMITED, running
from tests.runtime.record.test_workspaces import SLACK_BYTES, need_and_taken_bytes, needs_counter
from torchdelta.aten.facts import facts_of
from torchdelta.runtime.record.needs import Predictor, new_bytes

if TYPE_CHECKING:
    from collections.abc import Callable

aten = torch.ops.aten
UNIQUE, UNIQUE2 = (getattr(aten, name).default for name in ("_unique", "_unique2"))
NUM_ELEMENTS = 1 << 16
SIZE_BYTES = NUM_ELEMENTS * 4


def all_true(*shape: int) -> torch.Tensor:
    """Make a mask that selects everything: the worst case."""
    return torch.ones(*shape, dtype=torch.bool)


def distinct(*shape: int) -> torch.Tensor:
    """Make numbers of which no two are equal: the worst case of `unique`."""
    return torch.arange(torch.Size(shape).numel()).flip(0).float().view(shape)


WORST: dict[str, tuple[Any, Callable[[], tuple[Any, ...]]]] = {
    "nonzero": (aten.nonzero.default, lambda: (all_true(256, 256),)),
    "nonzero of a number": (aten.nonzero.default, lambda: (torch.tensor(1),)),
    "masked_select": (aten.masked_select.default, lambda: (distinct(NUM_ELEMENTS), all_true(NUM_ELEMENTS))),
    "masked_select of rows": (aten.masked_select.default, lambda: (distinct(256, 256), all_true(256, 1))),
    "masked_select of an expanded number": (
        aten.masked_select.default,
        lambda: (torch.ones(256, 1), all_true(256, 256)),
    ),
    "index": (aten.index.Tensor, lambda: (distinct(NUM_ELEMENTS), [all_true(NUM_ELEMENTS)])),
    "index of a matrix": (aten.index.Tensor, lambda: (distinct(256, 256).t(), [all_true(256, 256)])),
    "index by bytes": (aten.index.Tensor, lambda: (distinct(256, 256), [all_true(256).byte()])),
    "index of columns": (aten.index.Tensor, lambda: (distinct(256, 256), [None, all_true(256)])),
    "index of pairs": (aten.index.Tensor, lambda: (distinct(256, 256), [all_true(256), all_true(256)])),
    "index of a row each": (aten.index.Tensor, lambda: (distinct(256, 8, 32), [all_true(256), torch.arange(256) % 8])),
    "_unique2": (UNIQUE2, lambda: (distinct(NUM_ELEMENTS),)),
    "_unique2 with all": (UNIQUE2, lambda: (distinct(NUM_ELEMENTS).long(), True, True, True)),
    "_unique2 with counts": (UNIQUE2, lambda: (distinct(NUM_ELEMENTS), True, False, True)),
    "_unique": (UNIQUE, lambda: (distinct(NUM_ELEMENTS), True, True)),
    "unique_dim": (aten.unique_dim.default, lambda: (distinct(16, 4096), 1, True, True, True)),
    "unique_consecutive": (aten.unique_consecutive.default, lambda: (distinct(NUM_ELEMENTS), True, True)),
    "unique_consecutive of rows": (aten.unique_consecutive.default, lambda: (distinct(4096, 16), False, False, 0)),
}


@needs_counter
@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("name", WORST)
def test_what_depends_on_data_is_bounded_before_its_first_run(name: str, num_threads: int) -> None:
    """The content that makes the most outputs takes no more than was foreseen."""
    func, make = WORST[name]
    args = make()
    need, taken_bytes = need_and_taken_bytes(func, args, num_threads)
    assert new_bytes(func(*args), args) <= taken_bytes <= need.total_bytes + need.possible_bytes + SLACK_BYTES


def test_a_small_output_does_not_lower_the_bound() -> None:
    """The next mask of that shape may select all."""
    func, args = aten.masked_select.default, (torch.zeros(64), torch.zeros(64, dtype=torch.bool))
    predictor = Predictor()
    need = predictor.need(facts_of(func), func, args, None)
    most_bytes = need.total_bytes + need.possible_bytes
    need.output_bytes = 16
    need.learn_workspace(0)
    assert need.total_bytes == 16
    assert need.total_bytes + need.possible_bytes == most_bytes
    assert predictor.need(facts_of(func), func, args, None) is need


def test_mistaken_arguments_are_left_to_the_op() -> None:
    """There is no bound for what the op refuses."""
    func, args = aten.masked_select.default, (torch.zeros(3), torch.zeros(2, dtype=torch.bool))
    assert Predictor().need(facts_of(func), func, args, None).possible_bytes == 0
    with running(), pytest.raises(RuntimeError, match="must match"):
        torch.masked_select(*args)


def test_the_largest_output_of_an_op_without_a_bound_is_remembered() -> None:
    """A guess is not among them: it would evict as much in every step."""
    with scoped_library("torchdelta_varying", "DEF") as library:
        library.define("first(Tensor x) -> Tensor")
        library.impl("first", lambda x: x[: int(x[0])].clone(), "CompositeExplicitAutograd")
        func = torch.ops.torchdelta_varying.first.default
        predictor, x = Predictor(), torch.ones(64)
        need = predictor.need(facts_of(func), func, (x,), None)
        assert (need.output_bytes, need.possible_bytes) == (x.nbytes, 0)
        need.output_bytes = 4
        assert need.possible_bytes == 0
        need.output_bytes = 128
        need.output_bytes = 8
        assert (need.output_bytes, need.possible_bytes) == (8, 120)


SELECTIONS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "index": lambda x, mask: x[mask],
    "masked_select": torch.masked_select,
    "nonzero": lambda _, mask: mask.nonzero(),
    "masked_select(out=)": lambda x, mask: torch.masked_select(x, mask, out=torch.empty(0)),
}


def selecting(budget: int | str, name: str, shares: list[float]) -> int:
    """Train one step for each share of the elements that a mask selects. Return the peak."""
    weight = torch.full((NUM_ELEMENTS,), 0.5, requires_grad=True)
    masks = [torch.arange(NUM_ELEMENTS) < int(share * NUM_ELEMENTS) for share in shares]
    with running(budget) as (memory_budget, _):
        for mask in masks:
            h = weight
            for _ in range(12):
                h = h.sin()
            selected = SELECTIONS[name](h.detach(), mask)
            (h.sum() + selected.sum()).backward()
            del h, selected
            weight.grad = None
    return memory_budget.summary().peak_bytes


@needs_counter
@pytest.mark.parametrize("shares", [[1.0], [0.01, 0.01, 1.0, 0.01, 1.0]], ids=["first-step", "later-steps"])
@pytest.mark.parametrize("name", SELECTIONS)
def test_masks_of_any_content_hold_the_budget(name: str, shares: list[float]) -> None:
    """Also where a mask selects all after others of its shape that selected little."""
    plain_bytes = selecting(UNLIMITED, name, shares)
    for budget_bytes in range(plain_bytes * 6 // 10, plain_bytes, plain_bytes // 8):
        assert selecting(budget_bytes, name, shares) <= budget_bytes


@needs_counter
def test_a_bound_that_is_not_reached_refuses_no_budget() -> None:
    """Where little is selected, what there is room for is enough."""
    x, mask = torch.ones(NUM_ELEMENTS), torch.arange(NUM_ELEMENTS) < 100
    with running(UNLIMITED) as (_, session):
        base_bytes = session.ledger.usage.total_bytes
    with running(base_bytes + 4 * SIZE_BYTES) as (memory_budget, _):
        selected = x[mask]
        rest = torch.empty(NUM_ELEMENTS * 7 // 2)
        assert torch.equal(x[mask], selected)
        del rest
    summary = memory_budget.summary()
    assert summary.budget_bytes is not None
    assert summary.peak_bytes <= summary.budget_bytes


# Each grows `x`, 16 elements of the storage of 64 bytes, or of another.
RESIZES: dict[str, tuple[Callable[[torch.Tensor], Any], int, int]] = {
    "resize_": (lambda x: x.resize_(8, 8), 192, 64),
    "resize_ in channels-last": (lambda x: x.resize_(1, 4, 4, 4, memory_format=torch.channels_last), 192, 64),
    "resize_as_": (lambda x: x.resize_as_(torch.empty(64)), 192, 64),
    "resize_ of a part": (lambda x: x[8:].resize_(64), 224, 64),
    "resize_ to less": (lambda x: x.resize_(8), 0, 0),
    "resize_ to nothing": (lambda x: x.resize_(0), 0, 0),
    "resize_ within the storage": (lambda x: x[:4].resize_(16), 0, 0),
    "resize_ of what is empty": (lambda _: torch.empty(0).resize_(64), 256, 0),
}


@pytest.mark.parametrize("name", RESIZES)
def test_the_growth_of_a_resize_is_exact(name: str) -> None:
    """The storage grows from the tensor's offset on, and the old one is freed after it is copied."""
    resize, grown_bytes, copied_bytes = RESIZES[name]
    with running() as (_, session):
        x = torch.ones(16)
        learned = session.recorder.needs.learned
        before = set(learned)
        found: list[tuple[int, int]] = []
        original = Predictor.need

        def look(self: Predictor, facts: Any, *args: Any) -> Any:
            need = original(self, facts, *args)
            if facts.resizes:
                found.append((need.output_bytes, need.workspace_bytes))
            return need

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Predictor, "need", look)
            resize(x)
            learned_need = next(need for key, need in learned.items() if key not in before and key[0].resizes)
    assert found == [(grown_bytes, copied_bytes)]
    assert learned_need.total_bytes == grown_bytes + copied_bytes


def resizing(budget: int | str, sizes: list[int]) -> int:
    """Train one step for each size that a buffer gets. Return the peak."""
    weight = torch.full((NUM_ELEMENTS,), 0.5, requires_grad=True)
    with running(budget) as (memory_budget, _):
        for size in sizes:
            h = weight
            for _ in range(12):
                h = h.sin()
            buffer = torch.empty(NUM_ELEMENTS).resize_(size)
            (h.sum() + buffer.zero_().sum()).backward()
            del h, buffer
            weight.grad = None
    return memory_budget.summary().peak_bytes


@needs_counter
@pytest.mark.parametrize("size", [NUM_ELEMENTS // 2, 2 * NUM_ELEMENTS, 4 * NUM_ELEMENTS])
def test_a_resize_holds_the_budget(size: int) -> None:
    """From its first run on, and for sizes that never repeat."""
    sizes = [size + 100 * step for step in range(3)]
    plain_bytes = resizing(UNLIMITED, sizes)
    for budget_bytes in range(plain_bytes * 6 // 10, plain_bytes, plain_bytes // 6):
        assert resizing(budget_bytes, sizes) <= budget_bytes


def test_the_growth_depends_on_the_storage() -> None:
    """Of two tensors of a shape one has the memory already."""
    predictor, func = Predictor(), aten.resize_.default
    small, spacious = torch.empty(16), torch.empty(64)[:16]
    assert predictor.need(facts_of(func), func, (small, [64]), None).total_bytes == 256
    assert predictor.need(facts_of(func), func, (spacious, [64]), None).total_bytes == 0
