"""Where a fault can strike in a training step: each place runs a test's code there, and nowhere else."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.faults.programs import Fault, Loop

    Strike = Callable[[], None]


@contextlib.contextmanager
def _attribute(thing: Any, name: str, value: Any) -> Iterator[None]:
    setattr(thing, name, value)
    try:
        yield
    finally:
        setattr(thing, name, None)


@contextlib.contextmanager
def _removing(handle: Any) -> Iterator[None]:
    try:
        yield
    finally:
        handle.remove()


def in_forward(loop: Loop, strike: Strike) -> contextlib.AbstractContextManager[Any]:
    """In the forward of a custom function, when a part of the graph is there."""
    return _attribute(loop.blocks[1], "in_forward", strike)


def in_backward(loop: Loop, strike: Strike) -> contextlib.AbstractContextManager[Any]:
    """In the backward of a custom function, when a part of the gradients is there."""
    return _attribute(loop.blocks[1], "in_backward", strike)


def in_optimizer(loop: Loop, strike: Strike) -> contextlib.AbstractContextManager[Any]:
    """In an optimizer's step, after it has written a parameter."""
    return _attribute(loop.optimizer, "in_step", strike)


def in_tensor_hook(loop: Loop, strike: Strike) -> contextlib.AbstractContextManager[Any]:
    """In a hook on a tensor inside the net."""
    return _attribute(loop.blocks[1], "with_hidden", lambda hidden: hidden.register_hook(lambda _: strike()))


def in_node_hook(loop: Loop, strike: Strike) -> contextlib.AbstractContextManager[Any]:
    """In a hook on an autograd node."""

    def register(hidden: torch.Tensor) -> None:
        assert hidden.grad_fn is not None
        hidden.grad_fn.register_hook(lambda *_: strike())

    return _attribute(loop.blocks[1], "with_hidden", register)


def in_leaf_hook(loop: Loop, strike: Strike) -> contextlib.AbstractContextManager[Any]:
    """In a hook on a parameter."""
    return _removing(loop.blocks[1].linear.weight.register_hook(lambda _: strike()))


def in_accumulate_hook(loop: Loop, strike: Strike) -> contextlib.AbstractContextManager[Any]:
    """In a hook that runs after a parameter's gradient is there."""
    return _removing(loop.blocks[1].linear.weight.register_post_accumulate_grad_hook(lambda _: strike()))


def in_forward_hook(loop: Loop, strike: Strike) -> contextlib.AbstractContextManager[Any]:
    """In a forward hook of a module."""
    return _removing(loop.blocks[1].register_forward_hook(lambda *_: strike()))


def in_backward_hook(loop: Loop, strike: Strike) -> contextlib.AbstractContextManager[Any]:
    """In a full backward hook of a module."""
    return _removing(loop.blocks[1].linear.register_full_backward_hook(lambda *_: strike()))


@contextlib.contextmanager
def in_pack_hook(loop: Loop, strike: Strike) -> Iterator[None]:
    """In the pack of the user's own saved-tensor hooks, inside the runtime's."""
    del loop
    seen: list[int] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        seen.append(1)
        if len(seen) == 5:
            strike()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield


@contextlib.contextmanager
def in_unpack_hook(loop: Loop, strike: Strike) -> Iterator[None]:
    """In the unpack of the user's own saved-tensor hooks."""
    linear = loop.blocks[1].linear
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: (strike(), tensor)[1])
    enter = linear.register_forward_pre_hook(lambda *_: hooks.__enter__())
    leave = linear.register_forward_hook(lambda *_: hooks.__exit__())
    try:
        yield
    finally:
        enter.remove()
        leave.remove()


PLACES: dict[str, Callable[[Loop, Strike], contextlib.AbstractContextManager[Any]]] = {
    "forward": in_forward,
    "backward": in_backward,
    "optimizer": in_optimizer,
    "tensor-hook": in_tensor_hook,
    "node-hook": in_node_hook,
    "leaf-hook": in_leaf_hook,
    "accumulate-hook": in_accumulate_hook,
    "forward-hook": in_forward_hook,
    "backward-hook": in_backward_hook,
    "pack-hook": in_pack_hook,
    "unpack-hook": in_unpack_hook,
}


def striking(place: str, strike: Strike) -> Fault:
    """Return the fault that runs `strike` in a place, once."""
    has_struck: list[bool] = []

    def once() -> None:
        if not has_struck:
            has_struck.append(True)
            strike()

    @contextlib.contextmanager
    def fault(loop: Loop) -> Iterator[None]:
        has_struck.clear()
        with PLACES[place](loop, once):
            yield
        assert has_struck, f"nothing ran in {place}"

    return fault
