"""CUDA's autocast on tensors of the CPU, for symbolic tracing. See `__init__.py` for the rules.

[Note: CUDA's casts on CPU]
Autocast is a layer of the dispatcher, a key for each device type: the CPU's casts other ops than CUDA's, and CUDA's
acts on CUDA tensors alone. While `cuda_autocast_on_cpu` is on, `torch.autocast("cuda")` turns the CPU's layer on, and
each op that the two treat differently gets CUDA's treatment there (torch's `autocast_mode.h`, `autocast_mode.cpp`): the
lists below are those of CUDA, as far as they differ. What both cast to the lower precision (products, convolutions)
stays with torch's own code and its own cache of cast weights; the few that only CUDA casts so have a cache of the same
rule here. A contract test compares all of it with what torch does on fake CUDA tensors.
"""

# torch's stubs do not have all that is here.
# pyright: reportAttributeAccessIssue=false, reportPrivateImportUsage=false

from __future__ import annotations

import contextlib
import warnings
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.amp import autocast_mode

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence

__all__ = ["cuda_autocast_on_cpu"]

_LOWER: Final = """_convolution addmv addr chain_matmul convolution einsum gru_cell linalg_multi_dot lstm_cell mv
rnn_relu_cell rnn_tanh_cell _scaled_dot_product_flash_attention""".split()  # noqa: SIM905 - names of ops
_FLOAT32: Final = """_upsample_bicubic2d_aa _upsample_bilinear2d_aa _upsample_nearest_exact1d _upsample_nearest_exact2d
_upsample_nearest_exact3d acos asin cosh cosine_similarity dist erfinv exp expm1 frobenius_norm.dim group_norm
layer_norm log log10 log1p log2 logsumexp native_layer_norm nuclear_norm nuclear_norm.dim pdist pow.Scalar
pow.Tensor_Scalar pow.Tensor_Tensor reciprocal renorm rms_norm rsqrt sinh softplus tan upsample_bicubic2d
upsample_bilinear2d upsample_linear1d upsample_nearest1d upsample_nearest2d upsample_nearest3d
upsample_trilinear3d""".split()  # noqa: SIM905
# They take the dtype of their output as an argument, and cast inside themselves.
_FLOAT32_OUTPUT: Final = """cumprod cumsum linalg_matrix_norm linalg_matrix_norm.str_ord linalg_vector_norm
log_softmax.int prod prod.dim_int softmax.int sum sum.dim_IntList""".split()  # noqa: SIM905
_FLOAT32_OVERLOAD: Final = {"norm.Scalar": "norm.ScalarOpt_dtype", "norm.ScalarOpt_dim": "norm.ScalarOpt_dim_dtype"}
_WIDEST: Final = """addcdiv addcmul atan2 bilinear cross dot grid_sampler index_put scatter_add tensordot
vdot""".split()  # noqa: SIM905
_REFUSED: Final = ("binary_cross_entropy",)
_OWN: Final = frozenset((*_LOWER, *_FLOAT32, *_FLOAT32_OUTPUT, *_FLOAT32_OVERLOAD, *_WIDEST, *_REFUSED))

_KEY: Final = "AutocastCPU"


@contextlib.contextmanager
def cuda_autocast_on_cpu() -> Generator[None]:
    """Make `torch.autocast` do to CPU tensors what it does to CUDA tensors: see [Note: CUDA's casts on CPU].

    A context for either type of device counts: where a model asks a tensor for its type, it is told "cpu".
    """
    casts = _Casts()
    cls: Any = autocast_mode.autocast
    init, enter, leave = cls.__init__, cls.__enter__, cls.__exit__
    is_enabled, dtype_of, clear = torch.is_autocast_enabled, torch.get_autocast_dtype, torch.clear_autocast_cache

    def new_init(
        self: Any,
        device_type: str,
        dtype: torch.dtype | None = None,
        enabled: bool = True,
        cache_enabled: bool | None = None,
    ) -> None:
        casts.take_over()
        if device_type in {"cuda", "cpu"}:
            device_type, dtype = "cpu", dtype_of("cuda") if dtype is None else dtype
        init(self, device_type, dtype, enabled, cache_enabled)

    def new_enter(self: Any) -> Any:
        casts.take_over()
        if self.device == "cuda":  # it was made before
            self.device, self._torchdelta_device = "cpu", "cuda"
        return enter(self)

    def new_exit(self: Any, *exception: Any) -> Any:
        try:
            return leave(self, *exception)
        finally:
            self.device = self.__dict__.pop("_torchdelta_device", self.device)

    def new_clear() -> None:
        casts.cache.clear()
        clear()

    replaced: list[tuple[Any, str, Any]] = [
        (cls, "__init__", new_init),
        (cls, "__enter__", new_enter),
        (cls, "__exit__", new_exit),
        (torch, "is_autocast_enabled", lambda device_type="cuda": is_enabled(_acting(device_type))),
        (torch, "get_autocast_dtype", lambda device_type: dtype_of(_acting(device_type))),
        (torch, "clear_autocast_cache", new_clear),
    ]
    originals = [(place, name, getattr(place, name)) for place, name, _ in replaced]
    for place, name, value in replaced:
        setattr(place, name, value)
    try:
        yield
    finally:
        for place, name, value in originals:
            setattr(place, name, value)
        casts.give_back()


def _acting(device_type: str) -> str:
    return "cpu" if device_type == "cuda" else device_type


class _Casts:
    """The replaced treatment of ops, from the first use of autocast on."""

    def __init__(self) -> None:
        self.cache: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # by the id of the weight, which is kept
        self._library: Any = None

    def take_over(self) -> None:
        """Replace what CPU's autocast does; once."""
        if self._library is not None:
            return
        self._library = torch.library.Library("aten", "IMPL")
        theirs = {name.removeprefix("aten::") for name in _registered("AutocastCPU")}
        ours = {name.removeprefix("aten::") for name in _registered("AutocastCUDA")}
        with warnings.catch_warnings():
            # torch says that a kernel is replaced: that is what this is for.
            warnings.filterwarnings("ignore", message="(?s).*[Oo]verriding a previously registered kernel")
            for name in sorted(theirs - ours):
                self._library.impl(name, torch.library.fallthrough_kernel, _KEY)
            for name in sorted(ours & _OWN):
                self._library.impl(name, self._kernel(name), _KEY)

    def give_back(self) -> None:
        """Put back what CPU's autocast does."""
        self.cache.clear()
        if self._library is not None:
            self._library._destroy()
            self._library = None

    def _kernel(self, name: str) -> Callable[..., Any]:
        """Return the treatment of an op."""
        op = _op(name)
        if name in _REFUSED:
            return _refuse
        if name in _FLOAT32_OUTPUT:
            return _with_output_of_float32(op)
        if name in _FLOAT32_OVERLOAD:
            return _with_dtype(op, _op(_FLOAT32_OVERLOAD[name]))
        cast = self._to_lower if name in _LOWER else _to_float32 if name in _FLOAT32 else _to_widest

        def kernel(*args: Any, **kwargs: Any) -> Any:
            with _without_autocast():
                tensors = _tensors((*args, *kwargs.values()))
                return op(
                    *(_cast(arg, cast, tensors) for arg in args),
                    **{key: _cast(arg, cast, tensors) for key, arg in kwargs.items()},
                )

        return kernel

    def _to_lower(self, tensor: torch.Tensor, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        del tensors
        dtype = torch.get_autocast_dtype("cpu")
        # The rule of `cached_cast`: parameters are cast once, until the outermost context ends.
        is_weight = tensor.dtype == torch.float32 and tensor.requires_grad and tensor.is_leaf and not tensor._is_view()
        if not (is_weight and torch.is_autocast_cache_enabled()):
            return tensor.to(dtype)
        if id(tensor) not in self.cache:
            self.cache[id(tensor)] = (tensor, tensor.to(dtype))
        return self.cache[id(tensor)][1]


def _to_float32(tensor: torch.Tensor, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    del tensors
    return tensor.to(torch.float32)


def _to_widest(tensor: torch.Tensor, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    is_wide = any(one.dtype == torch.float32 for one in tensors)
    return tensor.to(torch.float32 if is_wide else torch.get_autocast_dtype("cpu"))


def _with_output_of_float32(op: Any) -> Callable[..., Any]:
    place = next(index for index, argument in enumerate(op._schema.arguments) if argument.name == "dtype")
    fused = {"softmax": torch.ops.aten._softmax, "log_softmax": torch.ops.aten._log_softmax}.get(
        op._schema.name.removeprefix("aten::")
    )

    def kernel(*args: Any, **kwargs: Any) -> Any:
        is_given = len(args) > place or kwargs.get("dtype") is not None
        with _without_autocast():
            if is_given or not _is_eligible(args[0]):
                return op(*args, **kwargs)
            if fused is not None and args[0].dtype == torch.float16:
                return fused(args[0], args[1], True)  # from half to float in one kernel, which exists on CUDA only
            return op(*args, **{**kwargs, "dtype": torch.float32})

    return kernel


def _with_dtype(op: Any, wider: Any) -> Callable[..., Any]:
    defaults = [argument.default_value for argument in op._schema.arguments]

    def kernel(*args: Any) -> Any:
        with _without_autocast():
            if not _is_eligible(args[0]):
                return op(*args)
            return wider(*args, *defaults[len(args) :], dtype=torch.float32)

    return kernel


def _refuse(*_args: Any, **_kwargs: Any) -> Any:
    raise RuntimeError("binary_cross_entropy is unsafe to autocast: use binary_cross_entropy_with_logits")


def _is_eligible(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point() and value.dtype != torch.float64


def _tensors(values: Sequence[Any]) -> list[torch.Tensor]:
    flat = (one for value in values for one in (value if isinstance(value, list | tuple) else (value,)))
    return [one for one in flat if _is_eligible(one)]


def _cast(value: Any, cast: Callable[..., torch.Tensor], tensors: Sequence[torch.Tensor]) -> Any:
    if isinstance(value, list | tuple):
        return [_cast(one, cast, tensors) for one in value]
    return cast(value, tensors) if _is_eligible(value) else value


def _registered(key: str) -> list[str]:
    return torch._C._dispatch_get_registrations_for_dispatch_key(key)


def _op(name: str) -> Any:
    base, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, base), overload or "default")


def _without_autocast() -> Any:
    return torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU))
