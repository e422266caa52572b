"""The native saved-tensor hooks alone, and the limit of the native counter."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from torchdelta.errors import NativeError
from torchdelta.native.counting import counting_status, new_counter
from torchdelta.native.saved_hooks import NativeHooks, are_same_leaves, new_hooks
from torchdelta.runtime.record.headroom import leaves_of
from torchdelta.runtime.record.known_backward import roots_of

pytestmark = pytest.mark.skipif(not counting_status().is_on, reason="needs the native parts")


class Recorded:
    """Python hooks that list what they see."""

    def __init__(self) -> None:
        self.packed: list[tuple[int, ...]] = []
        self.num_unpacked = 0
        self.larger: list[int] = []
        asked = (self.pack, self.on_modified, lambda: self.larger.append(1), lambda _: None)
        hooks = new_hooks(self.pack, self.unpack, *asked)
        assert not isinstance(hooks, NativeError)
        self.hooks: NativeHooks = hooks

    def pack(self, tensor: torch.Tensor) -> Any:
        """Hold a detached tensor in a list."""
        self.packed.append(tuple(tensor.shape))
        return [tensor.detach()]

    def unpack(self, packed: Any) -> torch.Tensor:
        """Return it."""
        self.num_unpacked += 1
        return packed[0]

    def on_modified(self, tensor: torch.Tensor, version: int) -> None:
        """Raise what eager raises."""
        raise RuntimeError(f"{tuple(tensor.shape)} was at version {version}")


def forward(hooks: NativeHooks, x: torch.Tensor) -> torch.Tensor:
    """Save three tensors."""
    with saved_tensors_hooks(hooks.pack, hooks.unpack):
        return x.exp().tanh().square()


def test_python_hooks_are_called_outside_of_a_pause() -> None:
    """For every tensor, on both ways."""
    python = Recorded()
    forward(python.hooks, torch.randn(3, requires_grad=True)).sum().backward()
    assert python.packed == [(3,)] * 3
    assert python.num_unpacked == 3


def test_a_step_that_ends_at_the_first_tensor_of_the_next_one_does_not_count_it() -> None:
    """Where no optimizer steps, that tensor is the first sign of a new step: sizes are compared from it on."""
    ends: list[bool] = []

    class Ending(Recorded):
        def pack(self, tensor: torch.Tensor) -> Any:
            if len(tensor) > 1:  # the first tensor of each step is the larger one
                ends.append(self.hooks.end_step())
            return super().pack(tensor)

    python = Ending()

    def step(size: int, python: Recorded) -> None:
        with saved_tensors_hooks(python.hooks.pack, python.hooks.unpack):
            torch.randn(size, requires_grad=True).exp()[:1].clone().tanh()

    for size in (8, 8, 8, 9):
        step(size, python)
    assert ends == [False, False, True, True]
    assert not python.hooks.end_step()  # 9 is not 8
    python.hooks.pause()
    step(9, python)
    assert not python.larger


def test_what_is_left_of_an_adopted_step_equals_no_other_step() -> None:
    """Two steps whose latter halves are alike need not be."""
    python = Recorded()
    for _ in range(2):
        python.hooks.pause()
        forward(python.hooks, torch.randn(3, requires_grad=True))
        python.hooks.adopt()
        forward(python.hooks, torch.randn(3, requires_grad=True))
        assert not python.hooks.end_step()
    forward(python.hooks, torch.randn(3, requires_grad=True))
    assert not python.hooks.end_step()
    forward(python.hooks, torch.randn(3, requires_grad=True))
    assert python.hooks.end_step()


def test_no_python_runs_in_a_pause() -> None:
    """And the gradients are the same."""
    python = Recorded()
    x = torch.randn(3, requires_grad=True)
    (expected,) = torch.autograd.grad(x.exp().tanh().square().sum(), x)
    python.hooks.pause()
    y = forward(python.hooks, x)
    assert python.hooks.num_handles() == 3
    assert torch.equal(torch.autograd.grad(y.sum(), x)[0], expected)
    assert (python.packed, python.num_unpacked, python.hooks.num_handles()) == ([], 0, 0)


def test_adopted_tensors_go_through_the_python_hooks_in_order() -> None:
    """Those that died meanwhile do not."""
    python = Recorded()
    python.hooks.pause()
    kept = [forward(python.hooks, torch.randn(n, requires_grad=True)) for n in (2, 3, 4)]
    del kept[1]
    assert python.hooks.adopt() == 6
    assert python.packed == [(2,)] * 3 + [(4,)] * 3
    for y in kept:
        y.sum().backward()
    assert python.num_unpacked == 6
    assert python.hooks.adopt() == 0


def test_an_error_in_a_python_hook_reaches_the_caller_of_adopt() -> None:
    """The tensors that were not adopted are still there."""
    python = Recorded()
    python.hooks.pause()
    x = torch.randn(3, requires_grad=True)
    y = forward(python.hooks, x)

    def fail(_tensor: torch.Tensor) -> Any:
        raise KeyError("no")

    failing = new_hooks(fail, python.unpack, python.pack, python.on_modified, list, lambda _: None)
    assert not isinstance(failing, NativeError)
    failing.pause()
    z = forward(failing, x)
    with pytest.raises(KeyError):
        failing.adopt()
    for result in (y, z):
        assert torch.autograd.grad(result.sum(), x)[0].shape == (3,)


def test_a_write_after_the_save_is_an_error_adopted_or_not() -> None:
    """As in eager mode."""
    for adopts in (False, True):
        python = Recorded()
        python.hooks.pause()
        x = torch.randn(3, requires_grad=True)
        with saved_tensors_hooks(python.hooks.pack, python.hooks.unpack):
            y = x.exp()
        y.mul_(2)
        if adopts:
            python.hooks.adopt()
        with pytest.raises(RuntimeError, match=r"\(3,\) was at version 0"):
            y.sum().backward()


def test_tensors_that_are_not_plain_are_packed_by_python() -> None:
    """Conjugate views, subclasses, other layouts."""

    class Kind(torch.Tensor):
        pass

    python = Recorded()
    python.hooks.pause()
    with saved_tensors_hooks(python.hooks.pack, python.hooks.unpack):
        z = torch.randn(4, dtype=torch.complex64, requires_grad=True)
        (z.conj() * z.conj()).abs().sum().backward()
        sparse = torch.eye(3).to_sparse().requires_grad_()
        torch.sparse.mm(sparse, torch.randn(3, 3, requires_grad=True)).sum().backward()
        torch.randn(5).as_subclass(Kind).requires_grad_().exp().sum().backward()
    assert {(4,), (3, 3)} <= set(python.packed)


def test_a_step_that_saves_more_calls_back_once_it_is_known() -> None:
    """A larger tensor, or one more; what is smaller, or missing, does not."""
    python = Recorded()
    hooks = python.hooks
    seen = []
    for sizes in ((3, 4), (3, 4), (4, 3), (4, 3)):
        for size in sizes:
            forward(hooks, torch.randn(size, requires_grad=True))
        seen.append(hooks.end_step())
    assert seen == [False, True, False, True]
    hooks.pause()
    for sizes, is_larger in (((4, 3), False), ((2, 1), False), ((4,), False), ((3, 4), True), ((4, 3, 1), True)):
        python.larger.clear()
        for size in sizes:
            forward(hooks, torch.randn(size, requires_grad=True))
        assert bool(python.larger) == is_larger, sizes
        hooks.end_step()


def test_an_allocation_beyond_the_most_is_refused() -> None:
    """With torch's own error, and the call that tells it; smaller ones go on."""
    counter: Any = new_counter()
    counter.start()
    try:
        passed: list[int] = []
        counter.set_limit(1 << 62, counter.live_bytes() + 10_000, lambda: passed.append(1))
        small = torch.ones(1000)
        with pytest.raises(torch.OutOfMemoryError, match="within this budget"):
            torch.ones(100_000)
        assert passed == [1]
        more = torch.ones(1000)
        assert small.sum() + more.sum() == 2000
    finally:
        counter.stop()


def test_hooks_and_handles_die_in_a_cycle_with_their_owner() -> None:
    """The hooks hold methods of an object that holds the hooks."""
    python = Recorded()
    gone = weakref.ref(python)
    python.hooks.pause()
    y = forward(python.hooks, torch.randn(3, requires_grad=True))
    python.hooks.adopt()
    del python
    gc.collect()
    assert gone() is not None  # the graph holds handles
    del y
    gc.collect()
    assert gone() is None


def test_the_limit_calls_once_on_the_main_thread() -> None:
    """Soon after the live bytes pass it; and an error in the call surfaces there."""
    counter: Any = new_counter()
    counter.start()
    try:
        passed: list[int] = []
        counter.set_limit(counter.live_bytes() + 1000, 1 << 62, lambda: passed.append(1))
        small = torch.ones(100)
        assert passed == []
        large = torch.ones(1000)
        again = torch.ones(1000)
        assert passed == [1]

        def fail() -> None:
            raise KeyError("in the call")

        counter.set_limit(0, 1 << 62, fail)
        with pytest.raises(KeyError, match="in the call"):
            [torch.ones(10) for _ in range(10)]
        counter.set_limit(0, 1 << 62, passed.clear)
        counter.clear_limit()
        more = torch.ones(1000)
        assert passed == [1]
        del small, large, again, more
    finally:
        counter.stop()


def test_a_view_of_a_trained_leaf_is_adopted_as_one() -> None:
    """A copy would look like an activation, and the leaf's storage like one that may leave."""
    python = Recorded()
    weight, x = torch.randn(3, 3, requires_grad=True), torch.randn(4, 3, requires_grad=True)
    bases: list[Any] = []
    pack = python.pack

    def pack_and_look(tensor: torch.Tensor) -> Any:
        bases.append(tensor._base)  # noqa: SLF001 - what autograd goes by
        return pack(tensor)

    hooks = new_hooks(pack_and_look, python.unpack, pack_and_look, python.on_modified, lambda: None, lambda _: None)
    assert not isinstance(hooks, NativeError)
    hooks.pause()
    with saved_tensors_hooks(hooks.pack, hooks.unpack):
        y = torch.mm(x, weight.t())
    assert not bases
    assert hooks.adopt() == 2
    assert sum(base is weight for base in bases) == 1
    y.sum().backward()
    assert weight.grad is not None


class _Doubled(torch.autograd.Function):
    """A node in Python."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        """Return twice `x`."""
        ctx.save_for_backward(scale)
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return both gradients."""
        (scale,) = ctx.saved_tensors
        return gradients[0] * 2, torch.zeros_like(scale)


def test_leaves_are_found_in_the_order_in_which_python_finds_them() -> None:
    """In a deep graph, a wide one, below nodes in Python, views written in place, several roots, and a leaf itself."""
    weights = [torch.randn(4, 4, requires_grad=True) for _ in range(6)]
    deep = torch.linalg.multi_dot([weight.sin() for weight in weights]).square()
    wide = torch.stack([weights[index % 5].sum() * index for index in range(300)])
    in_python = _Doubled.apply(deep + weights[2], weights[1].detach().requires_grad_())
    written = torch.zeros(4, 4)
    written[0].add_(weights[3][1] * weights[4][2])
    outputs: list[tuple[torch.Tensor, ...]] = [(deep,), (wide,), (in_python,), (written[0],), (weights[0],), ()]
    outputs += [(wide, deep, in_python), (written, written.sum(), torch.zeros(3))]
    sizes = []
    for roots in outputs:
        leaves = list(leaves_of(roots_of(roots)))
        assert _are_same(roots, leaves)
        assert len(leaves) < 2 or not _are_same(roots, leaves[::-1])
        assert not _are_same(roots, [*leaves, weights[5]])
        assert not leaves or not _are_same(roots, leaves[:-1])
        assert not leaves or not _are_same(roots, [*leaves[:-1], torch.zeros(4, 4)])
        sizes.append(len(leaves))
    assert sizes == [6, 5, 7, 2, 0, 0, 7, 2]


def test_hooks_may_adopt_while_they_pack() -> None:
    """The call inside packs all that is left; the outer one packs nothing twice."""

    class Adopting(Recorded):
        def pack(self, tensor: torch.Tensor) -> Any:
            packed = super().pack(tensor)
            if len(self.packed) == 1:
                assert self.hooks.adopt() == 3
            return packed

    python = Adopting()
    python.hooks.pause()
    x = torch.randn(3, requires_grad=True)
    y = forward(python.hooks, x)
    assert python.hooks.adopt() == 1
    assert len(python.packed) == 4
    (gradient,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(gradient, torch.autograd.grad(x.exp().tanh().square().sum(), x)[0])
    assert python.num_unpacked == 3


def _are_same(roots: tuple[object, ...], leaves: list[torch.Tensor]) -> bool | None:
    return are_same_leaves(roots, [weakref.ref(leaf) for leaf in leaves], tuple(leaf.grad is None for leaf in leaves))


def test_a_leaf_with_a_gradient_is_not_the_same_as_without() -> None:
    """The other way round as well; and a leaf that is gone is the same as none."""
    weight, bias = (torch.randn(3, requires_grad=True) for _ in range(2))
    references = [weakref.ref(bias), weakref.ref(weight)]
    outputs = (weight * bias,)
    assert are_same_leaves(outputs, references, (True, True))
    assert not are_same_leaves(outputs, references, (True, False))
    bias.grad = torch.zeros(3)
    assert not are_same_leaves(outputs, references, (True, True))
    assert are_same_leaves(outputs, references, (False, True))
    references[1] = weakref.ref(torch.zeros(3))  # gone
    assert are_same_leaves(outputs, references, (False, True)) is False


def test_what_native_code_does_not_know_of_leaves_is_left_to_python() -> None:
    """An edge of a graph, whose node is a Python object, and hooks after accumulation, which may have been removed."""
    weight = torch.randn(3, requires_grad=True)
    edge = torch.autograd.graph.get_gradient_edge(weight.exp())
    assert are_same_leaves((weight.exp(), edge), [weakref.ref(weight)], (True,)) is None
    with pytest.raises(TypeError, match="must be tuple"):
        are_same_leaves([weight], [weakref.ref(weight)], (True,))  # type: ignore[arg-type]
    weight.register_post_accumulate_grad_hook(lambda _leaf: None).remove()
    assert are_same_leaves((weight.exp(),), [weakref.ref(weight)], (True,)) is None
