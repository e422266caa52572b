"""Tiny configurations of any `transformers` model, found by trying.

Sizes are chosen by the names of a configuration's fields, which most of the library shares. Where those sizes do not
fit together, fewer of them are set, down to the defaults with two layers: a model that is too large is refused before
it takes memory.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from benchmarks.sweep.special_configs import SPECIAL
from tests.same_bits.architectures import SIZES

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

# fmt: off
MORE_SIZES: dict[str, Any] = {
    **dict.fromkeys((
        "encoder_hidden_size", "decoder_hidden_size", "vision_hidden_size", "d_embed", "output_hidden_size",
        "out_hidden_size", "text_hidden_size", "encoder_embed_dim", "decoder_embed_dim", "feature_size",
        "prediction_length", "context_length",
    ), 32),
    **dict.fromkeys(("encoder_intermediate_size", "decoder_intermediate_size", "shared_intermediate_size"), 64),
    **dict.fromkeys((
        "encoder_num_hidden_layers", "decoder_num_hidden_layers", "num_encoder_hidden_layers", "depth",
        "num_decoder_hidden_layers", "encoder_num_layers", "decoder_num_layers", "num_nextn_predict_layers",
    ), 2),
    **dict.fromkeys((
        "encoder_num_attention_heads", "decoder_num_attention_heads", "encoder_num_heads", "decoder_num_heads",
        "num_mamba_heads", "num_queries",
    ), 4),
    **dict.fromkeys(("mamba_head_dim", "hidden_size_per_layer_input"), 16),
    "vocab_size_per_layer_input": SIZES["vocab_size"],
}
# fmt: on
ALL_SIZES = SIZES | MORE_SIZES

_WIDTHS = ("hidden_size", "embed_dim", "num_attention_heads", "num_heads", "head_dim", "intermediate_size",
           "num_key_value_heads")  # fmt: skip
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers",
           "num_encoder_layers", "num_decoder_layers", "depth")  # fmt: skip
NESTING = 3


def variants() -> Iterator[Mapping[str, Any]]:
    """Give the sets of sizes that are tried, the smallest models first."""
    yield ALL_SIZES
    yield ALL_SIZES | {"num_key_value_heads": 4}
    yield without("head_dim", "num_key_value_heads")
    yield without("head_dim", "num_key_value_heads", "image_size", "patch_size")
    yield without(*_WIDTHS, "num_hidden_layers")
    yield without("num_hidden_layers", "num_layers", "depth")
    yield {name: ALL_SIZES[name] for name in (*_LAYERS, "vocab_size", "num_labels") if name in ALL_SIZES}
    yield {}


def without(*names: str) -> dict[str, Any]:
    """Leave fields at their defaults."""
    return {name: size for name, size in ALL_SIZES.items() if name not in names}


def tiny_config(
    config_class: Any, sizes: Mapping[str, Any], special: Mapping[str, Any] | None = None, depth: int = 0
) -> Any:
    """Make a configuration with the given sizes wherever it has a field of that name and kind."""
    special = dict(SPECIAL.get(config_class.model_type, {})) | dict(special or {})
    try:
        default = config_class()
    except Exception:  # noqa: BLE001 - some cannot be made without their parts, which the special fields then hold
        default = None
    names = set(inspect.signature(config_class.__init__).parameters)
    names |= set(getattr(config_class, "__dataclass_fields__", {}))
    if default is not None:
        names |= set(default.to_dict())
    aliases = getattr(config_class, "attribute_map", {})
    fields = {}
    for name, size in sizes.items():
        if name in aliases or name not in names:
            continue
        old = getattr(default, name, None)
        if isinstance(old, list | tuple) and name in {"image_size", "patch_size"}:
            fields[name] = [size] * len(old)
        elif not isinstance(old, list | tuple | dict | str):  # else a size per stage, only the special fields know it
            fields[name] = size
    for name, nested in getattr(config_class, "sub_configs", {}).items():
        if name in special and not isinstance(special[name], dict):
            continue
        kind = type(getattr(default, name, None)) if nested.__name__ == "AutoConfig" else nested
        if kind is not type(None) and depth < NESTING:
            fields[name] = tiny_config(kind, sizes, special.pop(name, None), depth + 1).to_dict()
    return config_class(**(fields | special))
