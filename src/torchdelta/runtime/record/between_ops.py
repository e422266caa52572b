"""Whether recording may resume at a moment that a counter chose.

[Note: moments between ops]
A counter that passes its limit, or a saved tensor that is larger than expected, calls back soon after, when Python runs
its next instruction. That is not always between two ops: a destructor, the callback of a weak reference or a garbage
collection may run Python while an op runs, in its kernel or while autograd packs what the op saves. If recording
resumed there, the recorder would take what is left of the op (a `zero_` before a raw write) for the whole of it, and a
replay would return other bits. So it does not resume inside a section, transform or capture, nor in a kernel, nor while
a tensor is packed, by a program's own hooks either. A dispatch mode of the program runs its Python between two ops;
what a kernel below such a mode runs is not told apart.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchdelta._torch.engine import graph_task_id
from torchdelta._torch.modes import is_in_kernel, is_packing_by_others
from torchdelta._torch.tensors import is_transforming
from torchdelta.runtime.interrupts import is_in_section

if TYPE_CHECKING:
    from torchdelta.native.saved_hooks import NativeHooks
    from torchdelta.runtime.device.device import Device

__all__ = ["is_between_ops", "must_defer"]


def is_between_ops(device: Device, hooks: NativeHooks | None) -> bool:
    """Return whether recording may resume now.

    Args:
        device: The session's.
        hooks: The session's native hooks, None if it has none.
    """
    if is_in_section() or is_transforming() or is_in_kernel() or device.is_off():
        return False
    if is_packing_by_others(hooks.pack if hooks is not None else None):
        return False
    return hooks is None or not hooks.is_in_op()


def must_defer(device: Device) -> bool:
    """Return whether recording can neither pause nor resume now: in a backward, a transform or a graph capture."""
    return graph_task_id() != -1 or is_transforming() or device.is_off()
