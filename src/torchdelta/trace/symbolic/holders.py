"""How many holders a gradient that nobody else holds shows, as seen from a dispatch mode.

See [Note: accumulation in place] in mode.py. The engine asks for one; a mode sees its own references and Python's on
top, and how many these are is an implementation detail of torch. So it is measured: a backward in which two gradients
meet that surely have no other holder.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from torchdelta._torch.engine import graph_task_id
from torchdelta._torch.fake import FakeTensorMode
from torchdelta._torch.modes import TorchDispatchMode
from torchdelta._torch.storages import storage_address, storage_num_holders
from torchdelta._torch.tensors import tensor_num_holders

_ADD = torch.ops.aten.add.Tensor


class _Counting(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[int, int]] = []
        self.storages: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        if func is _ADD and graph_task_id() >= 0:
            self.seen += [(tensor_num_holders(t), storage_num_holders(storage_address(t))) for t in args]
        output = func(*args, **(kwargs or {}))
        if isinstance(output, torch.Tensor):
            output.untyped_storage()  # the object stays and is one more holder, as in the mode that follows storages
        return output


@functools.cache
def plain_gradient_holders() -> tuple[int, int]:
    """Return the holders of tensor and storage of such a gradient."""
    counting = _Counting()
    with FakeTensorMode(allow_non_fake_inputs=True):
        leaf = torch.empty(2, 3, requires_grad=True)
        # The first time, what torch notes in its caches holds the tensors as well.
        for _ in range(2):
            counting.seen.clear()
            with counting, torch.enable_grad():
                x = leaf * 2
                (x.sin() + x.cos()).exp().sum().backward()
    # The larger one: what reaches the engine from a node may have been a Python object in the one case only.
    return max(counting.seen)
