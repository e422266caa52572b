"""Tiny configurations of any `transformers` model, found by trying.

Sizes are chosen by the names of a configuration's fields, which most of the library shares; what is listed a layer or a
stage is cut to as few of them. Where those sizes do not fit together, fewer are set, down to the defaults: a model that
is too large is refused before it takes memory.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from tests.same_bits.architectures import SIZES
from tools.sweep.special_configs import SPECIAL

if TYPE_CHECKING:
    from collections.abc import Iterator

# fmt: off
MORE_SIZES: dict[str, Any] = {
    **dict.fromkeys((
        "encoder_hidden_size", "decoder_hidden_size", "vision_hidden_size", "d_embed", "output_hidden_size",
        "out_hidden_size", "text_hidden_size", "encoder_embed_dim", "decoder_embed_dim",
        "prediction_length", "context_length", "audio_hidden_size", "entity_emb_size", "cross_attention_hidden_size",
    ), 32),
    **dict.fromkeys((
        "encoder_intermediate_size", "decoder_intermediate_size", "shared_intermediate_size", "expert_ffn_hidden_size",
    ), 64),
    **dict.fromkeys((
        "encoder_num_hidden_layers", "decoder_num_hidden_layers", "num_encoder_hidden_layers", "depth",
        "num_decoder_hidden_layers", "encoder_num_layers", "decoder_num_layers", "mask_time_length",
        "mask_feature_length", "speech_encoder_layers", "speech_decoder_layers", "text_encoder_layers",
        "text_decoder_layers", "t2u_encoder_layers", "t2u_decoder_layers", "t2u_num_layers",
    ), 2),
    **dict.fromkeys((
        "encoder_num_attention_heads", "decoder_num_attention_heads", "encoder_num_heads", "decoder_num_heads",
        "num_mamba_heads", "num_queries", "encoder_num_key_value_heads", "decoder_num_key_value_heads",
    ), 4),
    **dict.fromkeys(("mamba_head_dim", "hidden_size_per_layer_input", "context_size"), 16),
    **dict.fromkeys(("t2u_vocab_size", "char_vocab_size", "vocab_size_per_layer_input", "entity_vocab_size",
                     "text_vocab_size", "unit_hifi_gan_vocab_size"), SIZES["vocab_size"]),
}
# fmt: on
ALL_SIZES = SIZES | MORE_SIZES

_WIDTHS = ("hidden_size", "embed_dim", "d_model", "num_attention_heads", "num_heads", "head_dim", "intermediate_size",
           "num_key_value_heads")  # fmt: skip
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers",
           "num_encoder_layers", "num_decoder_layers", "depth", "num_blocks")  # fmt: skip
_DROPOUTS = tuple(name for name in SIZES if "drop" in name)
# Lists with an entry a stage: how deep each is.
_DEPTHS = ("depths", "num_blocks", "layer_depths", "layers")
_ROPES = ("rope_parameters", "rope_scaling")
NESTING = 4


def variants() -> Iterator[Mapping[str, Any]]:
    """Give the sets of sizes that are tried, the smallest models first."""
    yield ALL_SIZES
    yield ALL_SIZES | {"num_key_value_heads": 4}
    yield without("head_dim", "num_key_value_heads")
    yield without("head_dim", "num_key_value_heads", "image_size", "patch_size")
    yield without(*_DROPOUTS)
    yield without(*_LAYERS)
    yield without(*_WIDTHS)
    yield without(*_WIDTHS, *_LAYERS)
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
    default = default_config(config_class)
    names = set(inspect.signature(config_class.__init__).parameters)
    names |= set(getattr(config_class, "__dataclass_fields__", {}))
    if default is not None:
        names |= set(default.to_dict())
    fields = shared_fields(default, names - set(getattr(config_class, "attribute_map", {})), sizes)
    for name, nested in getattr(config_class, "sub_configs", {}).items():
        if name in special and not isinstance(special[name], Mapping):
            continue
        kind = type(getattr(default, name, None)) if nested.__name__ == "AutoConfig" else nested
        parts = dict(special.pop(name, {}))
        if "model_type" in parts:
            kind = class_of(parts["model_type"])
        if kind not in {type(None), dict} and depth < NESTING:
            fields[name] = tiny_config(kind, sizes, parts, depth + 1).to_dict()
    return config_class(**(fields | special))


def default_config(config_class: Any) -> Any:
    """Return the default configuration; None for a class that cannot be made without its parts."""
    try:
        return config_class()
    except Exception:  # noqa: BLE001 - the special fields then hold the parts
        return None


def class_of(model_type: str) -> Any:
    """Return the configuration class of a model type."""
    from transformers import CONFIG_MAPPING

    return CONFIG_MAPPING[model_type]


def shared_fields(default: Any, names: set[str], sizes: Mapping[str, Any]) -> dict[str, Any]:
    """Choose the fields whose names tell what size they are."""
    fields: dict[str, Any] = {}
    for name in names & sizes.keys():
        old, size = value_of(default, name), sizes[name]
        if isinstance(old, list | tuple) and name in {"image_size", "patch_size"}:
            fields[name] = [size] * len(old)
        elif not isinstance(old, list | tuple | dict | str):
            fields[name] = size
    if not sizes:
        return fields
    # Without a download: no backbone of another library, no pretrained one.
    fields |= {name: False for name in ("use_timm_backbone", "use_pretrained_backbone") if name in names}
    num_layers = value_of(default, "num_hidden_layers")
    for name in sorted(names):
        old = value_of(default, name)
        if name in _ROPES and isinstance(old, Mapping) and "mrope_section" in old:
            fields[name] = {**old, "mrope_section": [2, 1, 1]}
        elif not isinstance(old, list | tuple) or not old:
            continue
        elif name in _DEPTHS and all(isinstance(item, int) for item in old):
            fields[name] = [1] * len(old)
        elif len(old) == num_layers and "num_hidden_layers" in fields and all(isinstance(item, str) for item in old):
            fields[name] = fewer(old, fields["num_hidden_layers"])
    return fields


def value_of(config: Any, name: str) -> Any:
    """Return a field's value; None where there is none, or one a layer."""
    try:
        return getattr(config, name, None)
    except ValueError:
        return None


def fewer(kinds: list[str] | tuple[str, ...], num_layers: int) -> list[str]:
    """Choose a few layers of a list of their kinds, each kind once before any kind twice."""
    each = list(dict.fromkeys(kinds))
    chosen = each[:num_layers] + [kinds[-1]] * (num_layers - len(each))
    return sorted(chosen, key=list(kinds).index)
