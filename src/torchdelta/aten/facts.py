"""What the runtime must know about an aten op before it runs, read once from its schema and kept on the op itself."""

from __future__ import annotations

import enum
from typing import Any, Final

import torch

from torchdelta.aten.collectives import is_collective, is_written, passes_on
from torchdelta.aten.order import order_varies
from torchdelta.aten.recomputable import RECOMPUTABLE

aten = torch.ops.aten


class Kind(enum.IntEnum):
    """How the recorder treats an op."""

    COMPUTE = 0  # makes new storages
    VIEW = 1  # makes tensors on storages that exist
    NO_OUTPUT = 2  # gives Python values, or nothing
    WRITE = 3  # writes one or more of its arguments
    REPLACE = 4  # changes which storage an argument has, or its size


# Their kernels for plain layouts reorder what they read and write into blocked layouts of their own (oneDNN).
_REORDERS: Final = frozenset(
    {"convolution", "convolution_backward", "_convolution", "mkldnn_convolution", "convolution_overrideable"}
)
# Views in all but their schema: they pass their argument's storage on without an alias annotation.
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
# Autocast comes before a dispatch mode: an op that it casts reaches the mode with its inputs cast, and inside the mode
# autocast is off. That changes nothing but for an op that autocast lets pass and whose kernel calls ops that it casts
# (matrix products): such an op is run with autocast as it was where the user called. A test holds the set against
# torch's own op database. `linalg_pinv` is another one and is NOT here: `pinverse`, which autocast casts, calls it with
# autocast off, `linalg.pinv` with autocast on, and inside the mode the two look the same. Under CPU autocast
# `linalg.pinv` therefore multiplies in float32 here and in bfloat16 without a budget. Of CUDA nothing is known.
_CASTS_INSIDE: Final = frozenset({"_trilinear"})
_REPLACE: Final = frozenset({"set_", "resize_", "resize_as_", "_resize_output_"})
# Ops that overwrite the whole of their first argument without reading it: the old content is no dependency.
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
# They write their running statistics (arguments 3 and 4) without saying so in the schema, when argument 5 (training) is
# true.
_HIDDEN_STATISTICS: Final = frozenset({"native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm"})
# The same, said in the schema: in training the outputs do not depend on the statistics either.
_STATISTICS: Final = _HIDDEN_STATISTICS | {
    "_native_batch_norm_legit",
    "_batch_norm_with_update",
    "_batch_norm_with_update_functional",
}
STATISTICS_POSITIONS: Final = (3, 4)
TRAINING_POSITION: Final = 5


class OpFacts:
    """The cached facts of one op overload."""

    __slots__ = (
        "base_name",
        "bumps_inside",
        "casts_inside",
        "is_collective",
        "is_random",
        "is_recomputable",
        "keeps_statistics",
        "kind",
        "name",
        "order_varies",
        "overwrites",
        "reorders",
        "written_keywords",
        "written_positions",
    )

    def __init__(self, func: Any) -> None:
        schema = func._schema
        base = schema.name.split("::")[-1]
        self.name = str(func)
        self.base_name = base
        self.is_collective = is_collective(func.namespace)
        written = [
            a
            for a in schema.arguments
            if (a.alias_info is not None and a.alias_info.is_write) or is_written(func.namespace, base, a)
        ]
        positions = {a.name: i for i, a in enumerate(schema.arguments)}
        self.written_positions = tuple(positions[a.name] for a in written if not a.kwarg_only)
        self.written_keywords = tuple(a.name for a in written if a.kwarg_only)
        self.is_random = torch.Tag.nondeterministic_seeded in func.tags
        self.keeps_statistics = base in _STATISTICS
        self.overwrites = base in _OVERWRITE
        self.reorders = base in _REORDERS
        self.bumps_inside = bool(written) and base.startswith("_foreach_")
        self.casts_inside = base in _CASTS_INSIDE
        self.is_recomputable = func.namespace == "aten" and base in RECOMPUTABLE
        self.order_varies = order_varies(base, schema.overload_name)
        # Without the last part, the ranges that an optimizer opens for the profiler would each leave a key in the
        # predictor, step after step.
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


def facts_of(func: Any) -> OpFacts:
    """Return the facts of an op; they live on the op, whose hash is slow Python."""
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
