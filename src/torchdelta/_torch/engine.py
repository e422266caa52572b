"""The autograd engine: which backward and which node run, and what flows into a node.

See `__init__.py` for the rules.
"""

# torch's stubs do not have all that is here.
# pyright: reportAttributeAccessIssue=false, reportPrivateImportUsage=false

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

# The name of the node that adds a gradient into a leaf's `.grad`.
ACCUMULATE = "torch::autograd::AccumulateGrad"
set_grad_enabled: Callable[[bool], None] = torch._C._set_grad_enabled
graph_task_id: Callable[[], int] = torch._C._current_graph_task_id
next_node_number: Callable[[], int] = torch._C._autograd._get_sequence_nr  # that of the next node of this thread
_current_node: Callable[[], Any] = torch._C._current_autograd_node


def current_node() -> str:
    """Return the name of the autograd node that this thread's backward runs, or ran last; "" before the first."""
    node = _current_node()
    return "" if node is None else node.name()


def running_function() -> Any:
    """Return the node of the custom Function whose backward this thread runs; None if it is another one's or none."""
    node = _current_node() if graph_task_id() != -1 else None
    return node if isinstance(node, torch._C._FunctionBase) else None


def call_at_backward_end(function: Callable[[], None]) -> None:
    """Call a function when this thread's running backward ends. It is forgotten if that fails."""
    torch.autograd.Variable._execution_engine.queue_callback(function)


def node_number(node: Any) -> int:
    """Return the number of an autograd node: nodes are numbered as they are made, by thread."""
    return node._sequence_nr()


def input_sizes_bytes(node: Any) -> int:
    """Return the bytes of all gradients that flow into an autograd node (`_input_metadata`.

    Shape and dtype of each).
    """
    total_bytes = 0
    for metadata in getattr(node, "_input_metadata", None) or ():
        count = 1
        for length in metadata.shape:
            count *= int(length)
        total_bytes += count * metadata.dtype.itemsize
    return total_bytes
