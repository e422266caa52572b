"""What happens beside the ops of a step on the native tape, and must not give it wrong bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.runtime.record.partly import CHANGES_AT, MARGIN, NUM_LAYERS, ROWS, WIDTH, following, num_native_steps
from tests.runtime.record.taped import NUM_STEPS, Loop, one_thread_and_the_tape, same_bits  # noqa: F401 - a fixture
from tests.same_bits.judge import bits_of
from torchdelta import Config, MemoryBudget
from torchdelta.native.weak_storage import WeakStorage, weak_storage_type

pytestmark = [
    pytest.mark.usefixtures("one_thread_and_the_tape"),
]


class _Settings(torch.autograd.Function):
    """Passes a tensor on, and changes the settings that convolutions read in the backward."""

    is_on = False

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, uses_onednn: bool) -> torch.Tensor:
        ctx.uses_onednn = uses_onednn
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[torch.Tensor, None]:
        if _Settings.is_on:
            torch.backends.mkldnn.set_flags(ctx.uses_onednn)
        return grad_outputs[0], None


def test_settings_that_change_in_the_middle_of_a_backward() -> None:
    """Replays run under those of the forward."""

    def body(loop: Loop, index: int) -> None:
        _Settings.is_on = index >= CHANGES_AT

        def between(layer: int, x: torch.Tensor) -> torch.Tensor:
            if layer in {0, 4}:
                return _Settings.apply(x, layer == 0)
            pictures = x.t().reshape(1, WIDTH, 16, 32)
            return x + nn.functional.gelu(nn.functional.conv2d(pictures, weight)).reshape(WIDTH, ROWS).t()

        loss = loop.forward(between)
        loss.backward()
        loop.update(loss)

    torch.manual_seed(1)
    weight = torch.randn(WIDTH, WIDTH, 1, 1) * 0.05
    uses_onednn = torch.backends.mkldnn.enabled
    try:
        counts = same_bits(body)
    finally:
        torch.backends.mkldnn.set_flags(uses_onednn)
    assert counts[CHANGES_AT - 1] > 0


def test_a_batch_norm_that_is_not_replayed_writes_its_statistics() -> None:
    """Its schema does not say so, and ops on the tape have read them."""

    def body(loop: Loop, _index: int) -> None:
        norms = loop.__dict__.setdefault("norms", [nn.BatchNorm1d(WIDTH) for _ in range(NUM_LAYERS)])

        def between(layer: int, x: torch.Tensor) -> torch.Tensor:
            y = nn.functional.gelu((x - norms[layer].running_mean) * 2)
            with torch.no_grad():
                norms[layer](x)
            return x * 0.5 + y

        loss = loop.forward(between)
        loss.backward()
        loop.update(loss)

    assert same_bits(body)[-1] > 2


def test_a_batch_norm_beside_the_tape_is_not_recorded() -> None:
    """It writes statistics that it has saved.

    If Python recorded that, and the write in place behind it, it would hold what that write reads beside it, although
    the tape drops it.
    """
    weak_storage = weak_storage_type()
    assert weak_storage is not None

    def train(num_steps: int) -> Any:
        loop = Loop()
        norms = [nn.BatchNorm1d(WIDTH) for _ in range(NUM_LAYERS)]
        num_held: list[int] = []
        for _ in range(num_steps):
            read: list[WeakStorage] = []

            def between(layer: int, x: torch.Tensor, read: list[WeakStorage] = read) -> torch.Tensor:
                dropped = torch.sigmoid(x * 2)
                large = norms[layer](torch.cat([x, -x]))  # no program here lets it leave: it is not replayed
                if loop.is_on_tape() and layer > 1:  # the program lets no earlier ones leave
                    read.append(weak_storage(dropped.untyped_storage()._cdata))  # noqa: SLF001 - its address
                return x + nn.functional.relu_(large.view(2, ROWS, WIDTH).add_(dropped)).mean(0)

            loss = loop.forward(between)
            num_held += [storage.num_holders() for storage in read]
            loss.backward()
            loop.update(loss)
        return [*loop.seen, bits_of([norm.state_dict() for norm in norms])], num_held

    plain, _ = train(NUM_STEPS)
    with MemoryBudget("1TiB", Config(tier="memory")) as unlimited:
        train(2)
    with following(int(unlimited.summary().peak_bytes * MARGIN), least_bytes=4 * ROWS * WIDTH):
        seen, num_held = train(NUM_STEPS)
        assert num_native_steps() > 2
    assert set(num_held) == {0}
    assert seen == plain


@pytest.mark.parametrize("op", ["with_update", "without_statistics"])
def test_batch_norms_that_do_not_say_whether_they_train(op: str) -> None:
    """Another argument stands where the others have that: Python records and replays them."""

    def body(loop: Loop, index: int) -> None:
        mean, variance = loop.__dict__.setdefault("statistics", (torch.zeros(WIDTH), torch.ones(WIDTH)))
        weight, bias = torch.ones(WIDTH), torch.zeros(WIDTH)

        def between(layer: int, x: torch.Tensor) -> torch.Tensor:
            if layer not in {2, 3}:
                return x
            if op == "with_update":
                y, *_ = torch.ops.aten._batch_norm_with_update(x, weight, bias, mean, variance, 0.1, 1e-5)  # noqa: SLF001
            else:
                y, *_ = torch.ops.aten._native_batch_norm_legit.no_stats(x, None, None, True, 0.1, 1e-5)
            return x + nn.functional.gelu(y)

        del index
        loss = loop.forward(between)
        loss.backward()
        loop.update(loss)
        loop.seen.append(bits_of([mean, variance]))

    assert same_bits(body) == [0] * NUM_STEPS  # steps on the tape


def test_a_write_for_which_there_is_no_room() -> None:
    """A copy of what it overwrites is needed: Python takes over in the middle of the write."""

    def body(loop: Loop, index: int) -> None:
        big, beside = loop.__dict__.setdefault("tensors", (torch.randn(4 * ROWS, WIDTH), torch.randn(ROWS, WIDTH)))
        ballast = torch.empty(4 * ROWS * WIDTH if index == CHANGES_AT else 1)

        def between(layer: int, x: torch.Tensor) -> torch.Tensor:
            if layer == NUM_LAYERS - 1:
                (big[:ROWS] if index == CHANGES_AT else beside).zero_()
            return x + big[:ROWS]

        loss = loop.forward(between)
        del ballast
        loss.backward()
        loop.update(loss)

    assert same_bits(body)[CHANGES_AT - 1] > 0


def test_an_op_that_reads_the_storage_that_it_writes() -> None:
    """A replay gives it one copy for both, as Python does; the tape leaves the op to Python."""

    def body(loop: Loop, index: int) -> None:
        def between(layer: int, x: torch.Tensor) -> torch.Tensor:
            if layer not in {2, 3}:
                return x
            halves = x * 1.5
            halves[: ROWS // 2].add_(halves[ROWS // 2 :].detach())  # both are views of one storage
            return x + nn.functional.gelu(halves)

        del index
        loss = loop.forward(between)
        loss.backward()
        loop.update(loss)

    assert same_bits(body)[-1] > 0


def test_settings_that_differ_around_a_write_in_forward() -> None:
    """The tape does not record the write, but ends the content that earlier replays read."""

    def body(loop: Loop, index: int) -> None:
        def between(layer: int, x: torch.Tensor) -> torch.Tensor:
            if layer not in {2, 3}:
                return x
            halves = x * 1.5
            kept = x + nn.functional.gelu(halves * 2) * 0.1
            if index >= CHANGES_AT:
                torch.set_default_dtype(torch.float64)
            try:
                halves.mul_(0.5)
            finally:
                torch.set_default_dtype(torch.float32)
            return kept + nn.functional.gelu(halves)

        loss = loop.forward(between)
        loss.backward()
        loop.update(loss)

    counts = same_bits(body)
    assert counts[CHANGES_AT - 1] > 0


def test_denormal_numbers_that_a_part_of_the_forward_flushes() -> None:
    """The tape does not record what runs under that setting."""

    def body(loop: Loop, index: int) -> None:
        def between(layer: int, x: torch.Tensor) -> torch.Tensor:
            if layer not in {2, 3}:
                return x
            torch.set_flush_denormal(index >= CHANGES_AT)
            try:
                denormal = x * 1e-30 * 1e-10
            finally:
                torch.set_flush_denormal(False)
            return x + nn.functional.gelu(denormal * 1e30 * 1e10)

        loss = loop.forward(between)
        loss.backward()
        loop.update(loss)

    assert same_bits(body)[CHANGES_AT - 1] > 0


def test_an_op_on_a_list_that_writes_in_place() -> None:
    """The tape leaves it to Python."""

    def body(loop: Loop, _index: int) -> None:
        def between(layer: int, x: torch.Tensor) -> torch.Tensor:
            if layer not in {2, 3}:
                return x
            halves = [x * 1.5, x * 0.7]
            torch._foreach_add_(halves, 0.25)
            return x + nn.functional.gelu(halves[0]) + nn.functional.gelu(halves[1])

        loss = loop.forward(between)
        loss.backward()
        loop.update(loss)

    assert same_bits(body)[-1] == 0  # no step is on the tape from its beginning to its end


class _UnpacksInInferenceMode(torch.autograd.Function):
    """Reads what it has saved in inference mode, and writes what it computes from that outside of it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        """Save the input, which may be dropped."""
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        """Write the unpacked tensor."""
        with torch.inference_mode():
            (x,) = ctx.saved_tensors
        return x.cos_().mul_(gradients[0])


def test_what_is_unpacked_in_inference_mode_is_an_ordinary_tensor() -> None:
    """As without a budget."""

    def body(loop: Loop, _index: int) -> None:
        loss = loop.forward(lambda layer, x: x + _UnpacksInInferenceMode.apply(x * 2) * 0.5 if layer in {2, 3} else x)
        loss.backward()
        loop.update(loss)

    assert same_bits(body)[CHANGES_AT - 1] > 0


def test_the_forward_reads_a_gradient_that_the_backward_adds_to() -> None:
    """The engine adds to the gradient of the last layer before a replay for an earlier layer reads it."""

    def body(loop: Loop, _index: int) -> None:
        for parameter in loop.stack.parameters():
            if parameter.grad is None:
                parameter.grad = torch.full_like(parameter, 0.1)
        gradient = loop.stack.layers[NUM_LAYERS - 1].bias.grad

        def between(layer: int, x: torch.Tensor) -> torch.Tensor:
            return x * torch.sigmoid(x.detach() * gradient) if layer == 3 else x

        loss = loop.forward(between)
        loss.backward()
        loop.seen.append(bits_of([loss, *(parameter.grad for parameter in loop.stack.parameters())]))
        loop.optimizer.step()
        for parameter in loop.stack.parameters():
            parameter.grad.mul_(0.5)

    assert same_bits(body, num_steps=30)[-1] > 0


@pytest.mark.parametrize("is_written", [False, True])
def test_inputs_that_exchange_their_storages_before_the_backward(*, is_written: bool) -> None:
    """Ops on the tape have read the storages that they had."""

    def body(loop: Loop, _index: int) -> None:
        gain = loop.__dict__.setdefault("gain", torch.tensor(1.0))
        loss = loop.forward(lambda _layer, x: x * gain)
        for tensor in (loop.read, gain):
            tensor.data = tensor.data * 0.9
        if is_written:
            loop.read.add_(0.05)
        loss.backward()
        loop.update(loss)

    assert same_bits(body)[-1] > 0


def test_inputs_that_are_swapped_with_other_tensors_before_the_backward() -> None:
    """`torch.utils.swap_tensors` refuses tensors with weak references, also those of the tape."""

    def body(loop: Loop, _index: int) -> None:
        loss = loop.forward()
        torch.utils.swap_tensors(loop.read, torch.full((ROWS, WIDTH), 0.5))
        loss.backward()
        loop.update(loss)

    assert same_bits(body)


class _Give(torch.autograd.Function):
    """A loss whose gradient was computed before."""

    @staticmethod
    def forward(ctx: Any, parameter: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(gradient)
        return parameter.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.saved_tensors[0], None


@pytest.mark.parametrize("layer_of_gradient", range(NUM_LAYERS))
def test_a_saved_tensor_that_is_returned_as_a_gradient(layer_of_gradient: int) -> None:
    """The leaf's gradient shares no memory with it, whether the tape replays, keeps or drops it."""
    given = nn.Parameter(torch.zeros(ROWS, WIDTH))

    def body(loop: Loop, _index: int) -> None:
        losses: list[torch.Tensor] = []
        gradients: list[torch.Tensor] = []

        def between(layer: int, x: torch.Tensor) -> torch.Tensor:
            if layer == layer_of_gradient:
                gradients.append(x.detach() * 2)
                losses.append(_Give.apply(given, gradients[0]))
            return x

        loss = loop.forward(between) + losses[0]
        loss.backward()
        assert given.grad is not None
        given.grad.mul_(0.5)
        loop.seen.append(bits_of([*gradients, given.grad]))
        given.grad = None
        loop.update(loss)

    assert same_bits(body)[-1] > 0
