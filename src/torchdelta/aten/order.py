"""Ops whose accelerator kernels add in varying order, so that a second run may give other bits.

The list is torch's own (`torch.use_deterministic_algorithms`): ops that it documents as nondeterministic, and ops with
a deterministic variant that is off by default. Their outputs are kept or swapped, and recomputed only in deterministic
mode, where every kernel has a fixed order or raises. Added to torch's list are ops without any guarantee: scans that
share their kernel with `cumsum`, factorisations, and the backward formulas that a double backward records.

Not here, and why: matrix products and convolutions forward (the same library, the same algorithm for the same shapes,
alignment and settings, one stream), attention forward (its random seed is replayed), batch norm and other reductions
(their blocks are added in a fixed order).
"""

from __future__ import annotations

from typing import Any, Final

import torch

_ALWAYS: Final = frozenset(
    """
    _index_put_impl_ _unsafe_masked_index_put_accumulate adaptive_max_pool3d gather_backward histc index_add index_add_
    index_copy index_copy_ index_put index_put_ index_reduce kthvalue logcumsumexp max_unpool2d max_unpool3d median mode
    nanmedian nll_loss2d_forward put put_ repeat_interleave scatter_add scatter_add_ scatter_reduce
    cholesky cholesky_inverse cholesky_solve ormqr triangular_solve
    """.split()  # noqa: SIM905 - as in recomputable.py
)
# Only for floating-point numbers: sums of integers do not depend on their order.
_FLOATING: Final = frozenset({"cumprod", "cumsum", "cumsum_"})


def order_varies(base_name: str, overload: str) -> bool:
    """Return whether an op of this name may add in another order next time; `is_fixed_here` knows the exceptions."""
    if base_name in _ALWAYS or base_name in _FLOATING or base_name == "bincount":
        return True
    if base_name in {"scatter", "scatter_"}:
        return not overload.startswith("value")  # one value for every index: the order does not matter
    if base_name.startswith(("linalg_", "_linalg_")):
        return base_name not in {"linalg_vector_norm", "linalg_cross"}
    return base_name.endswith(("_backward", "_backward_data"))


def is_fixed_here(base_name: str, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> bool:
    """Return whether an op for which `order_varies` is true has a fixed order in this mode, with these arguments."""
    if torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled():
        return True
    if base_name in _FLOATING:
        dtype = (kwargs or {}).get("dtype") or (args[0].dtype if args and isinstance(args[0], torch.Tensor) else None)
        return dtype is not None and not dtype.is_floating_point and not dtype.is_complex
    if base_name == "bincount":
        weights = args[1] if len(args) > 1 else (kwargs or {}).get("weights")
        return weights is None
    return False
