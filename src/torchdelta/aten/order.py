"""Ops whose kernels add, or write, in varying order, so that a second run may give other bits.

On an accelerator, the list is torch's own (`torch.use_deterministic_algorithms`): ops that it documents as
nondeterministic, and ops with a deterministic variant that is off by default. Their outputs are kept or swapped, and
recomputed only in deterministic mode, where every kernel has a fixed order or raises. Added to torch's list are ops
without any guarantee: scans that share their kernel with `cumsum`, factorisations, and the backward formulas that a
double backward records.

Not here, and why: matrix products and convolutions forward (the same library, the same algorithm for the same shapes,
alignment and settings, one stream), attention forward (its random seed is replayed), batch norm and other reductions
(their blocks are added in a fixed order).

On a CPU, a few kernels write from several threads to places that an index names (`may_race`). Where it names one place
twice, `put(accumulate=True)` and `index_put(accumulate=True)` add in the order in which the threads come, and without
`accumulate`, as in `index_copy`, the last thread decides what stays.
"""

from __future__ import annotations

import itertools
import math
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
_RACING: Final = frozenset(
    """
    _index_put_impl_ _unsafe_masked_index_put_accumulate index_copy index_copy_ index_put index_put_ put put_
    """.split()  # noqa: SIM905 - as above
)
# A CPU kernel with fewer elements runs on one thread (at::internal::GRAIN_SIZE).
_LEAST_PARALLEL: Final = 32768


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
    if _is_strict():
        return True
    if base_name in _FLOATING:
        dtype = (kwargs or {}).get("dtype") or (args[0].dtype if args and isinstance(args[0], torch.Tensor) else None)
        return dtype is not None and not dtype.is_floating_point and not dtype.is_complex
    if base_name == "bincount":
        weights = args[1] if len(args) > 1 else (kwargs or {}).get("weights")
        return weights is None
    return False


def may_race(base_name: str) -> bool:
    """Return whether threads of a CPU may write one place in any order in an op of this name; see `races_here`."""
    return base_name in _RACING


def races_here(base_name: str, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> bool:
    """Return whether an op for which `may_race` is true may do so on this CPU, in this mode, with these arguments.

    Whether an index really names a place twice is not checked: that would take as long as the op.
    """
    if torch.get_num_threads() == 1 or _is_strict():
        return False
    if base_name.startswith("index_copy"):
        target, indices, values, accumulates = args[0], *args[2:4], False
    elif base_name == "_unsafe_masked_index_put_accumulate":
        target, indices, values, accumulates = args[0], *args[2:4], True
    else:
        target, indices, values = args[:3]
        accumulates = bool(args[3] if len(args) > 3 else (kwargs or {}).get("accumulate"))
    if accumulates and not target.is_floating_point() and not target.is_complex():
        return False  # the sum of whole numbers does not depend on their order
    if not accumulates and values.numel() == 1:
        return False  # every place gets the same value
    num_written = values.numel() if isinstance(indices, torch.Tensor) else _num_named(target, indices)
    return num_written >= _LEAST_PARALLEL


def _num_named(target: torch.Tensor, indices: Any) -> int:
    """Return how many elements a list of indices names at most, as often as it names them; 0 if each only once."""
    shapes: list[tuple[int, ...]] = []
    sizes = list(target.shape)
    rest: list[int] = []
    are_masks = True
    for index in indices:
        if index is None:
            rest.append(sizes.pop(0))
            continue
        is_mask = index.dtype in (torch.bool, torch.uint8)
        are_masks = are_masks and is_mask
        shapes.append((index.numel(),) if is_mask else tuple(index.shape))
        del sizes[: index.dim() if is_mask else 1]
    # A mask names at most as many places as it has elements, so its shape is no more than a bound.
    dims = itertools.zip_longest(*map(reversed, shapes), fillvalue=1)
    return 0 if are_masks else math.prod(map(max, dims)) * math.prod(rest + sizes)


def _is_strict() -> bool:
    return torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled()
