"""The private torch APIs of symbolic tracing: what is changed is changed back when a context ends.

See `__init__.py` for the rules.
"""

# torch's stubs do not have all that is here.
# pyright: reportAttributeAccessIssue=false, reportPrivateImportUsage=false

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Generator


@contextlib.contextmanager
def foreach_on_cpu() -> Generator[None]:
    """Make optimizers and gradient clipping choose on CPU tensors what they choose on CUDA: the `_foreach_` ops."""
    from torch.optim import optimizer as optimizers
    from torch.utils import _foreach_utils

    original = _foreach_utils._get_foreach_kernels_supported_devices
    places = [place for place in (_foreach_utils, optimizers) if hasattr(place, original.__name__)]
    for place in places:
        setattr(place, original.__name__, lambda: [*original(), "cpu"])
    try:
        yield
    finally:
        for place in places:
            setattr(place, original.__name__, original)


@contextlib.contextmanager
def foreach_on_fake() -> Generator[None]:
    """Make optimizers and gradient clipping choose for fake tensors what they choose for others.

    They ask for the class of each parameter before they call a `_foreach_` op.
    """
    from torch._subclasses.fake_tensor import FakeTensor
    from torch.optim import optimizer as optimizers
    from torch.utils import _foreach_utils

    # The lists themselves, often one and the same: others add their classes to them when they are imported.
    places = [place for place in (_foreach_utils, optimizers) if hasattr(place, "_foreach_supported_types")]
    supported = {id(types): types for types in (place._foreach_supported_types for place in places)}
    for types in supported.values():
        types.append(FakeTensor)
    try:
        yield
    finally:
        for types in supported.values():
            types.remove(FakeTensor)


@contextlib.contextmanager
def without_onednn() -> Generator[None]:
    """Make torch's composite functions, such as the LSTM, leave oneDNN's own ops out."""
    before = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)  # `torch.backends.mkldnn.flags` sets TF32 beside, which warns
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(before)


@contextlib.contextmanager
def without_truncation() -> Generator[None]:
    """Make `nn.init.trunc_normal_` draw once, where it would look at what it drew until all of it lies in its bounds.

    For fake tensors, which have no values to look at and none to be wrong.
    """
    from torch.nn import init

    original = init._no_grad_trunc_normal_

    def draw(tensor: torch.Tensor, mean: float, std: float, *_args: Any, generator: Any = None) -> torch.Tensor:
        with torch.no_grad():
            return tensor.normal_(mean, std, generator=generator)

    init._no_grad_trunc_normal_ = draw
    try:
        yield
    finally:
        init._no_grad_trunc_normal_ = original


@contextlib.contextmanager
def converting_fake_modules() -> Generator[None]:
    """Make `Module.to`, `.half()` and their kin work on fake parameters, which torch wants to swap and cannot.

    (`_apply(): Couldn't swap ...`: something in the fake-tensor mode refers to them weakly.) Each parameter is
    replaced, one that several modules share by one and the same.
    """
    original = torch.nn.Module._apply
    replaced: dict[int, tuple[Any, Any]] = {}  # by the id of the old one, which is kept so that the id stays its own

    def apply(self: Any, fn: Callable[[Any], Any], recurse: bool = True) -> Any:
        if recurse:
            for module in self.children():
                module._apply(fn)
        for name, parameter in self._parameters.items():
            if parameter is None:
                continue
            if id(parameter) not in replaced:
                with torch.no_grad():
                    applied = fn(parameter)
                replaced[id(parameter)] = (parameter, torch.nn.Parameter(applied, parameter.requires_grad))
            self._parameters[name] = replaced[id(parameter)][1]
        for name, buffer in self._buffers.items():
            if buffer is not None:
                self._buffers[name] = fn(buffer)
        return self

    torch.nn.Module._apply = apply
    try:
        yield
    finally:
        torch.nn.Module._apply = original


def without_fake_mode() -> Any:
    """Return a context in which this thread's fake-tensor mode is off."""
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    return unset_fake_temporarily()
