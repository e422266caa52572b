"""The predictor's answer before an op against what the op then allocates."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.runtime.parts import scoped_library
from tests.runtime.programs import UNLIMITED, running
from torchdelta.aten.facts import Kind, facts_of
from torchdelta.native.counting import counting_status
from torchdelta.runtime.record.needs import Need, Predictor, new_bytes

if TYPE_CHECKING:
    from collections.abc import Callable


class Compare(TorchDispatchMode):
    """Asks a fresh predictor before each op and takes the truth after it."""

    def __init__(self) -> None:
        super().__init__()
        self.answers: list[tuple[str, int, int]] = []
        self.predictor = Predictor()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Predict, run, compare."""
        del types
        facts = facts_of(func)
        predicted_bytes = self.predictor.need(facts, func, args, kwargs).output_bytes
        out = func(*args, **(kwargs or {}))
        if facts.kind is Kind.COMPUTE:
            self.answers.append((facts.name, predicted_bytes, new_bytes(out, args)))
        return out


PROGRAMS: dict[str, Callable[[torch.Tensor], Any]] = {
    "elementwise": lambda x: (x * 2).sin() + x,
    "broadcast": lambda x: x[:, None] + x[None, :],
    "product": lambda x: x @ x.t(),
    "promotion": lambda x: (x > 0) * 1.5 + torch.arange(8) + x.double(),
    "normalization": lambda x: torch.nn.functional.layer_norm(x, (8,)),
    "sort": lambda x: (x.sort(), x.topk(2), x.max(0)),
    "reduction": lambda x: (x.sum(0), x.mean(), x.var(1), x.argmax(1)),
    "concatenation": lambda x: torch.cat([x, x]) + torch.stack([x, x]).sum(0).repeat(2, 1),
    "factories": lambda _: (
        torch.zeros(3, 4),
        torch.ones(5, dtype=torch.int8),
        torch.full((2, 2), 7.0),
        torch.arange(9),
    ),
    "random": lambda x: (torch.rand(4, 5), torch.randn_like(x), torch.nn.functional.dropout(x, 0.5), torch.randperm(6)),
    "convolution": lambda x: torch.nn.functional.conv2d(x[None, None], torch.ones(3, 1, 3, 3), padding=1),
    "pooling": lambda x: torch.nn.functional.max_pool2d(x[None, None], 2, return_indices=True),
    "batch-norm": lambda x: torch.nn.functional.batch_norm(x, torch.zeros(8), torch.ones(8), training=True),
    "indexing": lambda x: (x[torch.tensor([0, 2, 2])], x.gather(1, torch.zeros(8, 2, dtype=torch.int64))),
    "strided": lambda x: (x.t() * 2, x[:, ::2].exp(), x.expand(3, 8, 8) + 1, x.t().clone()),
    "casts": lambda x: (x.to(torch.bfloat16), x.long(), x.bool(), x.to(torch.complex64)),
    "split": lambda x: torch.functional.split(x.clone(), 3),
    "empty": lambda x: (x[:0] * 2, x.new_zeros(0)),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_first_prediction_is_exact(name: str) -> None:
    """A meta run tells the bytes before the first run of an op."""
    x = torch.randn(8, 8)
    with Compare() as compare:
        PROGRAMS[name](x)
    assert compare.answers
    wrong = [answer for answer in compare.answers if answer[1] != answer[2]]
    assert wrong == []


def test_truth_replaces_a_guess() -> None:
    """The output of a data-dependent op is guessed by its inputs, and learned when it is known."""
    predictor, x = Predictor(), torch.tensor([1.0, 0.0, 2.0])
    func, args = torch.ops.aten.nonzero.default, (torch.tensor([1.0, 0.0, 2.0]),)
    assert predictor.need(facts_of(func), func, args, None).output_bytes == x.nbytes
    predictor.need(facts_of(func), func, args, None).output_bytes = 16
    assert predictor.need(facts_of(func), func, args, None).output_bytes == 16


def test_in_place_ops_make_nothing() -> None:
    """They return what they write."""
    predictor, args = Predictor(), (torch.zeros(4), 1)
    func = torch.ops.aten.add_.Tensor
    assert predictor.need(facts_of(func), func, args, None).output_bytes == 0


def test_what_a_writing_op_makes_is_predicted() -> None:
    """Some ops write an argument and return new tensors as well, such as the observer of quantization."""
    predictor, x = Predictor(), torch.randn(64, 64)
    observer = torch.ops.aten._fused_moving_avg_obs_fq_helper.default  # noqa: SLF001
    flag, low, high = torch.ones(1, dtype=torch.int64), torch.zeros(1), torch.ones(1)
    scale, zero_point = torch.ones(1), torch.zeros(1, dtype=torch.int32)
    calls = [
        (observer, (x, flag, flag, low, high, scale, zero_point, 0.01, 0, 255, 0, False, False)),
        (torch.ops.aten.rrelu_with_noise.default, (x, torch.empty_like(x), 0.1, 0.3, True)),
    ]
    for func, args in calls:
        predicted_bytes = predictor.need(facts_of(func), func, args, None).output_bytes
        assert predicted_bytes == new_bytes(func(*args), args) > 0


def test_what_is_drawn_from_a_generator_is_predicted() -> None:
    """The generator is an argument that such an op requires, and it does not advance."""
    predictor, generator = Predictor(), torch.Generator().manual_seed(1)
    before = generator.get_state()
    x = torch.randn(8, 8)
    calls: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = [
        (torch.ops.aten.randn.generator, ([8, 8],), {"generator": generator}),
        (torch.ops.aten.rrelu_with_noise.default, (x, torch.empty_like(x), 0.1, 0.3, True, generator), {}),
    ]
    for func, args, kwargs in calls:
        assert predictor.need(facts_of(func), func, args, kwargs).output_bytes == x.nbytes
    assert torch.equal(generator.get_state(), before)


@pytest.mark.parametrize("options", [{"foreach": True}, {"fused": True}, {"foreach": False}])
def test_later_steps_of_an_optimizer_have_the_same_keys(options: dict[str, bool]) -> None:
    """What differs in each step, as the corrections of Adam, is in lists or keyword arguments. It is not in the key."""
    predictor, nums_keys = Predictor(), []

    class Asking(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            del types
            predictor.need(facts_of(func), func, args, kwargs)
            return func(*args, **(kwargs or {}))

    parameters = [torch.nn.Parameter(torch.ones(4, 4)) for _ in range(2)]
    optimizer = torch.optim.AdamW(parameters, **options)
    for step in range(5):
        for parameter in parameters:
            parameter.grad = torch.ones(4, 4)
        optimizer.param_groups[0]["lr"] = 0.1 / (step + 1)  # as a schedule does
        with Asking():
            optimizer.step()
        nums_keys.append(predictor.num_made)
    assert nums_keys[0] > 0
    assert nums_keys[1:] == [nums_keys[1]] * 4


def test_floats_that_scale_sizes_are_in_the_key() -> None:
    """A list of floats without a list of tensors may scale the output."""
    predictor, x = Predictor(), torch.randn(1, 1, 8, 8)
    func = torch.ops.aten.upsample_nearest2d.vec
    for factor in (2.0, 3.0):
        args = (x, None, [factor, factor])
        assert predictor.need(facts_of(func), func, args, None).output_bytes == func(*args).nbytes


def test_key_tells_shapes_dtypes_and_numbers_apart() -> None:
    """Whatever changes the size changes the key."""
    predictor, func = Predictor(), torch.ops.aten.sum.dim_IntList
    keys = {
        predictor.key(facts_of(func), (torch.zeros(shape, dtype=dtype), [dim]), {"keepdim": keepdim})
        for shape in [(2, 3), (3, 2)]
        for dtype in [torch.float32, torch.float64]
        for dim in [0, 1]
        for keepdim in [False, True]
    }
    assert len(keys) == 16


@pytest.mark.parametrize(
    "numbers", [(2, 2.0), (1, True), (2.0, 2 + 0j)], ids=["int-float", "int-bool", "float-complex"]
)
def test_equal_numbers_of_different_types_have_different_keys(numbers: tuple[Any, Any]) -> None:
    """`uint8 * 2` makes one byte an element, `uint8 * 2.0` four."""
    predictor, func, x = Predictor(), torch.ops.aten.mul.Tensor, torch.ones(10, dtype=torch.uint8)
    for number in numbers:
        args = (x, number)
        predicted_bytes = predictor.need(facts_of(func), func, args, None).output_bytes
        assert predicted_bytes == func(*args).nbytes


def test_foreign_ops_are_never_run_to_predict() -> None:
    """A custom op may do on a meta tensor what it must do only once: it is guessed at."""
    calls: list[str] = []

    def count(x: torch.Tensor) -> torch.Tensor:
        calls.append(x.device.type)
        return x * 2

    with scoped_library("torchdelta_predict", "DEF") as library:
        library.define("counted(Tensor x) -> Tensor")
        library.impl("counted", count, "CompositeExplicitAutograd")
        func, args = torch.ops.torchdelta_predict.counted.default, (torch.zeros(4),)
        predictor = Predictor()
        assert predictor.need(facts_of(func), func, args, None).output_bytes == 16
    assert calls == []


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_arguments_without_a_shape_are_asked_each_time() -> None:
    """Of a nested tensor there is no key, and no error."""
    predictor, args = Predictor(), (torch.nested.nested_tensor([torch.zeros(4), torch.zeros(2)]), 1)
    func = torch.ops.aten.add.Tensor
    need = predictor.need(facts_of(func), func, args, None)
    need.output_bytes = 99
    assert predictor.need(facts_of(func), func, args, None) is not need
    assert predictor.learned == {}


def test_memory_of_the_predictor_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shapes that never repeat do not make it grow for ever."""
    monkeypatch.setattr("torchdelta.runtime.record.needs.MAX_KEYS", 10)
    predictor, func = Predictor(), torch.ops.aten.neg.default
    for size in range(100):
        predictor.need(facts_of(func), func, (torch.empty(size),), None)
    assert 0 < len(predictor.learned) <= 11


def test_what_an_op_takes_inside_is_the_most_it_ever_took() -> None:
    """The first measurement replaces the estimate, later ones only raise it."""
    func, args = torch.ops.aten.convolution.default, (torch.zeros(2, 3, 8, 8), torch.zeros(4, 3, 3, 3))
    need = Predictor().need(facts_of(func), func, (*args, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1), None)
    assert need.output_bytes == 2 * 4 * 6 * 6 * 4
    assert need.workspace_bytes > 0
    assert need.learn_workspace(8) == 8
    assert need.learn_workspace(24) == 24
    assert need.learn_workspace(16) == 24


@pytest.mark.parametrize("shape", [(64, 32), (4, 8, 40), (4, 8, 16, 16), (2, 8, 8, 8, 8)])
@pytest.mark.parametrize("is_expanded", [False, True])
def test_the_estimate_of_batch_norms_backward_holds_at_the_allocator(shape: tuple[int, ...], is_expanded: bool) -> None:
    """A first step has nothing but it: too little passes the budget, too much says that a step does not fit."""
    if not counting_status().is_on:
        pytest.skip("nothing counts at the allocator here")
    found: list[tuple[int, int]] = []
    original = Need.learn_workspace

    def learn(self: Need, size_bytes: int) -> int:
        found.append((self.workspace_bytes, size_bytes))
        return original(self, size_bytes)

    x = torch.randn(shape, requires_grad=True)
    with running(UNLIMITED):
        y = torch.nn.functional.batch_norm(x, None, None, training=True)
        loss = y.sum() if is_expanded else y.square().sum()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Need, "learn_workspace", learn)
            loss.backward()
    largest_bytes = max(size_bytes for _, size_bytes in found)
    estimates = [estimate for estimate, size_bytes in found if size_bytes == largest_bytes]
    assert largest_bytes == pytest.approx(0 if is_expanded else x.nbytes, abs=256)
    assert max(estimates) == pytest.approx(largest_bytes, abs=256)


LAYOUTS: dict[str, Callable[[int, int], torch.Tensor]] = {
    "dense": torch.ones,
    "transposed": lambda n, m: torch.ones(m, n).t(),
    "part of wider rows": lambda n, m: torch.ones(n, 2 * m)[:, :m],
    "expanded scalar": lambda n, m: torch.ones(()).expand(n, m),
    "expanded row": lambda n, m: torch.ones(1, m).expand(n, m),
    "expanded column": lambda n, m: torch.ones(n, 1).expand(n, m),
    "every other column": lambda n, m: torch.ones(n, 2 * m)[:, ::2],
    "one column": lambda n, _: torch.ones(n, 2)[:, ::2],
    "one expanded row": lambda _, m: torch.ones(1, 1).expand(1, m),
}


@pytest.mark.parametrize("first", LAYOUTS)
@pytest.mark.parametrize("second", LAYOUTS)
def test_the_estimate_of_matrix_products_holds_at_the_allocator(first: str, second: str) -> None:
    """BLAS reads rows or columns that are dense: any other operand is copied, whatever was learned of dense ones."""
    if not counting_status().is_on:
        pytest.skip("nothing counts at the allocator here")
    a, b = LAYOUTS[first](96, 64), LAYOUTS[second](64, 80)
    if a.shape[1] != b.shape[0]:
        b = LAYOUTS[second](a.shape[1], 80)
        if a.shape[1] != b.shape[0]:
            pytest.skip("these shapes do not meet")
    with running(UNLIMITED) as (_, session):
        needs = session.recorder.needs
        for func, args in ((torch.ops.aten.mm.default, (a, b)), (torch.ops.aten.addmm.default, (torch.ones(1), a, b))):
            dense = tuple(torch.ones(x.shape) for x in args)
            func(*dense)
            estimate_bytes = needs.need(facts_of(func), func, args, None).workspace_bytes
            func(*args)
            assert estimate_bytes == needs.need(facts_of(func), func, args, None).workspace_bytes
            assert needs.need(facts_of(func), func, dense, None).workspace_bytes == 0


def test_a_product_with_the_gradient_of_a_sum_holds_the_budget() -> None:
    """The first backward begins with one: its gradient is one expanded number."""
    weight = torch.randn(256, 256, requires_grad=True)
    with running(UNLIMITED) as (_, session):
        base_bytes = session.ledger.usage.total_bytes
    for room_kib in range(3200, 4300, 200):
        with running(base_bytes + room_kib * 1024) as (budget, _):
            z = torch.randn(512, 256) @ weight
            for _ in range(16):
                z = torch.sin(z) @ weight
            z.sum().backward()
            del z
        weight.grad = None
        summary = budget.summary()
        assert summary.budget_bytes is not None
        assert summary.peak_bytes <= summary.budget_bytes
        assert summary.swapped_out_bytes + summary.recomputed_bytes > 0


def test_new_bytes_counts_each_storage_once() -> None:
    """Outputs that share a storage, or give an argument back, cost nothing twice."""
    x, y = torch.zeros(4), torch.zeros(8)
    assert new_bytes((y, y[2:], x), (x,)) == 32
    assert new_bytes([y, torch.zeros(2)], ()) == 40
    assert new_bytes(None, ()) == 0


def test_a_guess_made_in_backward_is_replaced_by_what_is_measured() -> None:
    """A custom op is guessed by its inputs: a guess that stayed would evict as much in every step."""
    with scoped_library("torchdelta_guess", "DEF") as library:
        library.define("total(Tensor x) -> Tensor")
        library.impl("total", lambda x: x.sum(), "CompositeExplicitAutograd")
        total = torch.ops.torchdelta_guess.total.default

        class Scaled(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
                ctx.save_for_backward(x)
                return x * 2

            @staticmethod
            def backward(ctx: Any, *gradients: Any) -> Any:
                (x,) = ctx.saved_tensors
                return gradients[0] * total(x)

        x = torch.randn(1 << 12, requires_grad=True)
        with running(UNLIMITED) as (_, session):
            Scaled.apply(x).sum().backward()  # pyright: ignore[reportAttributeAccessIssue]
            assert session.recorder.needs.need(facts_of(total), total, (x,), None).output_bytes == 4
