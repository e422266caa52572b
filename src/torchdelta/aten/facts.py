"""Facts about an op that the runtime needs before running it, read once from its schema and cached on the op."""

from __future__ import annotations

import enum
from typing import Any, Final

import torch

from torchdelta._torch.ops import is_composite, schema_of
from torchdelta.aten.batch_norm import BATCH_NORMS, is_out, undeclared_statistics
from torchdelta.aten.collectives import is_collective, is_written, passes_on
from torchdelta.aten.order import may_race, order_varies
from torchdelta.aten.recomputable import RECOMPUTABLE

aten = torch.ops.aten


class Kind(enum.IntEnum):
    """How the recorder treats an op."""

    COMPUTE = 0  # makes new storages
    VIEW = 1  # makes tensors on storages that exist
    NO_OUTPUT = 2  # returns Python values, or nothing
    WRITE = 3  # writes one or more of its arguments
    REPLACE = 4  # changes which storage an argument has, or its size


# Ops whose oneDNN kernels reorder plain inputs and outputs into blocked layouts.
_REORDERS: Final = frozenset(
    {"convolution", "convolution_backward", "_convolution", "mkldnn_convolution", "convolution_overrideable"}
)
# Ops that copy a matrix whose rows and columns are both not dense, because BLAS cannot read it.
_COPIES_STRIDED: Final = frozenset({"mm", "addmm"})
# Views without an alias annotation in their schema.
_DISGUISED_VIEWS: Final = frozenset({"_unsafe_view", "_reshape_alias", "alias", "lift_fresh", "detach"})
_NO_OUTPUT: Final = frozenset(
    {
        "_local_scalar_dense",
        "equal",
        "is_same_size",
        "is_nonzero",
        "_assert_async",
        "sym_size",
        "sym_stride",
        "record_stream",
    }
)
# [Note: autocast inside an op]
# Autocast runs before a dispatch mode: an op that it casts reaches the mode with its inputs cast, and inside the mode
# autocast is off. That matters only for an op that autocast does not cast but whose kernel calls ops that it casts
# (matrix products): such an op is run with the caller's autocast state. A test compares the set with torch's own op
# database. `linalg_pinv` is another such op and is NOT here: `pinverse`, which autocast casts, calls it with autocast
# off, `linalg.pinv` with autocast on, and inside the mode the two look the same. Under CPU autocast `linalg.pinv`
# therefore multiplies in float32 inside a budget and in bfloat16 without one. CUDA was not checked.
_CASTS_INSIDE: Final = frozenset({"_trilinear"})
# [Note: conjugate views inside an op]
# A lazily conjugate or negative view is resolved by dispatch keys that run before a dispatch mode, and inside the mode
# they are off. A kernel that makes such views and passes them to other ops then computes with unconjugated numbers: the
# result is wrong under any mode, torch's own included. Such an op is run with these keys on. The set was found by
# running torch's op database in complex numbers with and without a no-op mode.
_CONJUGATES_INSIDE: Final = frozenset({"linalg_pinv", "linalg_lstsq"})
# [Note: modes inside an op]
# Singular values and eigenvalues alone come from another LAPACK routine than those with their vectors, with other last
# bits. `linalg.svdvals` and `linalg.eigvalsh` choose before a dispatch mode sees an op: they compute the vectors if a
# gradient may be wanted, or if any mode is on. So on tensors without gradients they, and what is made of them
# (`linalg.cond`, the 2-norm and the nuclear norm of a matrix), give inside a budget the bits that they give under any
# mode, torch's own included, and not those without one. The ops that reach the mode are those of `linalg.svd` and
# `linalg.eigh`, so nothing here can tell them apart. With gradients the bits are equal. A test compares the set with
# torch's own op database.
_REPLACE: Final = frozenset({"set_", "resize_", "resize_as_", "_resize_output_"})
# Those of them after which a storage is larger where it was too small.
_RESIZE: Final = _REPLACE - {"set_"}
# Ops that overwrite all of their first argument without reading it, so that they do not depend on the old content.
_OVERWRITE: Final = frozenset(
    {
        "copy_",
        "fill_",
        "zero_",
        "normal_",
        "uniform_",
        "bernoulli_",
        "exponential_",
        "random_",
        "log_normal_",
        "cauchy_",
        "geometric_",
    }
)
# Ops whose results are often passed to code outside of torch (C++ extensions, Triton, NumPy), which fills them. Such a
# write is no op and bumps no version, so a replay would return the constant. (`empty` is never replayed.)
_CONSTANT: Final = frozenset(
    {
        "zeros",
        "zeros_like",
        "new_zeros",
        "ones",
        "ones_like",
        "new_ones",
        "full",
        "full_like",
        "new_full",
        "zero_",
        "fill_",
    }
)


class OpFacts:
    """The cached facts of one op overload."""

    __slots__ = (
        "base_name",
        "bumps_inside",
        "casts_inside",
        "conjugates_inside",
        "copies_strided",
        "is_collective",
        "is_composite",
        "is_constant",
        "is_random",
        "is_recomputable",
        "is_sized_by_memory",
        "keeps_statistics",
        "kind",
        "may_race",
        "name",
        "order_varies",
        "overwrites",
        "reorders",
        "resizes",
        "writes_content",
        "written_keywords",
        "written_positions",
    )

    def __init__(self, func: Any) -> None:
        schema = schema_of(func)
        base = schema.name.split("::")[-1]
        self.name = str(func)
        self.base_name = base
        self.is_collective = is_collective(func.namespace)
        statistics = undeclared_statistics(base, schema.overload_name) if func.namespace == "aten" else ()
        written = [
            a
            for i, a in enumerate(schema.arguments)
            if (a.alias_info is not None and a.alias_info.is_write)
            or is_written(func.namespace, base, a)
            or i in statistics
        ]
        positions = {a.name: i for i, a in enumerate(schema.arguments)}
        self.written_positions = tuple(positions[a.name] for a in written if not a.kwarg_only)
        self.written_keywords = tuple(a.name for a in written if a.kwarg_only)
        self.is_random = torch.Tag.nondeterministic_seeded in func.tags
        self.keeps_statistics = base in BATCH_NORMS and not is_out(schema.overload_name)
        self.overwrites = base in _OVERWRITE
        self.is_constant = base in _CONSTANT
        self.reorders = base in _REORDERS
        self.copies_strided = base in _COPIES_STRIDED
        self.resizes = func.namespace == "aten" and base in _RESIZE
        # Whether what it allocates depends on more of its arguments than their shapes: strides, or the storage's size.
        self.is_sized_by_memory = self.copies_strided or self.resizes
        self.bumps_inside = bool(written) and base.startswith("_foreach_")
        self.casts_inside = base in _CASTS_INSIDE
        self.conjugates_inside = base in _CONJUGATES_INSIDE
        self.is_recomputable = func.namespace == "aten" and base in RECOMPUTABLE
        self.order_varies = order_varies(base, schema.overload_name)
        self.may_race = may_race(base)
        # The last condition keeps the profiler ranges of optimizers from adding keys to the predictor at every step.
        if (
            base in _NO_OUTPUT
            or func.namespace == "prim"
            or not (written or any("Tensor" in str(r.type) for r in schema.returns))
        ):
            self.kind = Kind.NO_OUTPUT
        elif base in _REPLACE:
            self.kind = Kind.REPLACE
        elif written:
            self.kind = Kind.WRITE
        elif (
            base in _DISGUISED_VIEWS
            or passes_on(func.namespace, base)
            or any(r.alias_info is not None for r in schema.returns)
        ):
            self.kind = Kind.VIEW
        else:
            self.kind = Kind.COMPUTE
        # One that may return a copy, or whose parts tell more than its schema. See record/composites.py.
        self.is_composite = self.kind is Kind.VIEW and is_composite(func)
        # `set_` gives a tensor another storage, and writes into neither.
        self.writes_content = self.kind in (Kind.WRITE, Kind.REPLACE) and base != "set_"


def facts_of(func: Any) -> OpFacts:
    """Return the facts of an op. They are cached on the op, since hashing an op is slow."""
    try:
        return func._torchdelta_facts
    except AttributeError:
        facts = func._torchdelta_facts = OpFacts(func)
        return facts


def written_tensors(facts: OpFacts, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> list[torch.Tensor]:
    """Return the tensors that an op writes, in the order of its arguments."""
    targets: list[torch.Tensor] = []
    for position in facts.written_positions:
        if position < len(args):
            _add_tensors(args[position], targets)
    for keyword in facts.written_keywords:
        _add_tensors((kwargs or {}).get(keyword), targets)
    return targets


def _add_tensors(argument: Any, found: list[torch.Tensor]) -> None:
    if isinstance(argument, torch.Tensor):
        found.append(argument)
    elif isinstance(argument, list | tuple):
        for item in argument:
            _add_tensors(item, found)
