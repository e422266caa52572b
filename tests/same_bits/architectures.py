"""Tiny random `transformers` models of many architectures, and the inputs that train them.

One table says which class stands for which architecture; sizes are chosen by the names of a configuration's fields,
because those names are shared by most of the library. What an architecture needs beyond that stands in its entry.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from typing import Any

import torch

SEQUENCE_LENGTH = 16
BATCH_SIZE = 2
IMAGE_SIZE = 32
AUDIO_SAMPLES = 2000
VOCABULARY_SIZE = 96

# fmt: off
SIZES: dict[str, Any] = {
    **dict.fromkeys((
        "hidden_size", "d_model", "n_embd", "embed_dim", "embedding_size", "dim", "word_embed_proj_dim",
        "attention_hidden_size", "lru_width", "emb_dim", "moe_intermediate_size", "projection_dim",
    ), 32),
    **dict.fromkeys((
        "intermediate_size", "d_ff", "encoder_ffn_dim", "decoder_ffn_dim", "ffn_dim", "n_inner", "dff", "hidden_dim",
        "ffn_hidden_size", "feed_forward_size", "shared_expert_intermediate_size", "d_inner",
    ), 64),
    **dict.fromkeys((
        "num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers",
        "num_encoder_layers", "num_decoder_layers", "num_hidden_groups", "num_blocks", "num_experts_per_tok",
        "moe_top_k", "num_codebooks",
    ), 2),
    **dict.fromkeys((
        "num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads", "decoder_attention_heads",
        "num_encoder_attention_heads", "num_decoder_attention_heads", "num_key_value_heads", "mamba_n_heads",
        "num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts",
    ), 4),
    **dict.fromkeys((
        "max_position_embeddings", "n_positions", "max_source_positions", "max_target_positions", "n_ctx",
        "max_seq_len", "block_size",
    ), 64),
    **dict.fromkeys((
        "head_dim", "d_kv", "patch_size", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "rotary_dim",
        "sliding_window", "attention_window", "state_size", "mamba_d_state", "ssm_state_size", "chunk_size",
        "mamba_chunk_size",
    ), 8),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "num_mel_bins", "mamba_d_head"), 16),
    **dict.fromkeys(("n_group", "topk_group", "decoder_start_token_id", "bos_token_id"), 1),
    **dict.fromkeys((
        "dropout", "attention_dropout", "resid_pdrop", "hidden_dropout", "hidden_dropout_prob",
        "attention_probs_dropout_prob", "drop_path_rate",
    ), 0.1),
    "vocab_size": VOCABULARY_SIZE, "image_size": IMAGE_SIZE, "pad_token_id": 0, "eos_token_id": 2, "num_labels": 3,
    "use_cache": False,
}
# fmt: on


@dataclass(frozen=True, kw_only=True, slots=True)
class Architecture:
    """One architecture: the model class that stands for it, and the fields that the shared sizes do not fit.

    Args:
        feature_shape: shape of one example where the main input is neither tokens, an image nor a waveform.
    """

    kind: str
    class_name: str
    special: dict[str, Any] = field(default_factory=dict[str, Any])
    feature_shape: tuple[int, ...] = ()


def tiny_config(config_class: Any, special: dict[str, Any]) -> Any:
    """Make a configuration of a class with the shared sizes wherever it has a field of that name and kind."""
    fields = {}
    default = config_class()
    names = set(default.to_dict()) | set(inspect.signature(config_class.__init__).parameters)
    aliases = getattr(config_class, "attribute_map", {})
    for name, value in SIZES.items():
        if name in aliases or name not in names:
            continue
        if isinstance(getattr(default, name, None), list | tuple | dict | str):
            continue  # a size per stage: only the architecture's own entry knows how many
        fields[name] = value
    for name, nested in getattr(config_class, "sub_configs", {}).items():
        if name not in special and nested.__name__ != "AutoConfig":
            fields[name] = tiny_config(nested, {}).to_dict()
    return config_class(**(fields | special))


# The convolutional front end of the wav2vec 2.0 family, small enough for 2,000 samples.
AUDIO_FRONT_END: dict[str, Any] = {
    "conv_dim": (16, 16, 16),
    "conv_kernel": (10, 3, 3),
    "conv_stride": (5, 4, 4),
    "num_feat_extract_layers": 3,
    "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 4,
    "mask_time_length": 2,
}
STAGES: dict[str, Any] = {"hidden_sizes": [8, 16, 16, 32], "depths": [1, 1, 1, 1], "embedding_size": 8}
WINDOWS: dict[str, Any] = {"embed_dim": 16, "depths": [1, 1], "num_heads": [2, 4], "patch_size": 4, "window_size": 4}
_STARTED: dict[str, Any] = {"decoder_start_token_id": 1}

# kind -> class name -> the fields of its own.
_TABLE: dict[str, dict[str, dict[str, Any]]] = {
    "causal": {
        "BioGptForCausalLM": {},
        "BloomForCausalLM": {},
        "CTRLLMHeadModel": {},
        "CodeGenForCausalLM": {},
        "CohereForCausalLM": {},
        "FalconForCausalLM": {},
        "GPT2LMHeadModel": {},
        "GPTBigCodeForCausalLM": {},
        "GPTJForCausalLM": {},
        "GPTNeoForCausalLM": {"attention_types": [[["global", "local"], 1]], "window_size": 4},
        "GPTNeoXForCausalLM": {},
        "Gemma2ForCausalLM": {},
        "GemmaForCausalLM": {},
        "GlmForCausalLM": {},
        "LlamaForCausalLM": {},
        "MistralForCausalLM": {},
        "MptForCausalLM": {},
        "NemotronForCausalLM": {},
        "OPTForCausalLM": {},
        "Olmo2ForCausalLM": {},
        "OpenAIGPTLMHeadModel": {},
        "PersimmonForCausalLM": {},
        "Phi3ForCausalLM": {},
        "PhiForCausalLM": {},
        "Qwen3ForCausalLM": {},
        "StableLmForCausalLM": {},
        "Starcoder2ForCausalLM": {},
        "XGLMForCausalLM": {},
        "XLNetLMHeadModel": {},
    },
    "moe": {
        "DeepseekV3ForCausalLM": {},
        "GptOssForCausalLM": {},
        "GraniteMoeForCausalLM": {},
        "JetMoeForCausalLM": {},
        "MixtralForCausalLM": {},
        "OlmoeForCausalLM": {},
        "PhimoeForCausalLM": {},
        "Qwen2MoeForCausalLM": {},
        "Qwen3MoeForCausalLM": {},
        "SwitchTransformersForConditionalGeneration": _STARTED,
    },
    "state-space": {
        "BambaForCausalLM": {"mamba_n_groups": 1, "attn_layer_indices": [1]},
        "FalconMambaForCausalLM": {},
        "JambaForCausalLM": {"attn_layer_period": 2, "attn_layer_offset": 1, "use_mamba_kernels": False},
        "Mamba2ForCausalLM": {"num_heads": 8, "head_dim": 8, "n_groups": 2},
        "MambaForCausalLM": {},
        "NemotronHForCausalLM": {},
    },
    "recurrent": {
        "Qwen3NextForCausalLM": {},
        "RecurrentGemmaForCausalLM": {},
        "RwkvForCausalLM": {},
        "xLSTMForCausalLM": {"chunk_size": 16},
    },
    "masked": {
        "AlbertForMaskedLM": {},
        "BertForMaskedLM": {},
        "BigBirdForMaskedLM": {},
        "ConvBertForMaskedLM": {},
        "DebertaForMaskedLM": {},
        "DebertaV2ForMaskedLM": {},
        "DistilBertForMaskedLM": {},
        "ElectraForMaskedLM": {},
        "EsmForMaskedLM": {},
        "FNetForMaskedLM": {},
        "FunnelForMaskedLM": {"block_sizes": [1, 1]},
        "IBertForMaskedLM": {},
        "LongformerForMaskedLM": {},
        "MPNetForMaskedLM": {},
        "MobileBertForMaskedLM": {"intra_bottleneck_size": 16, "true_hidden_size": 16},
        "ModernBertForMaskedLM": {},
        "NystromformerForMaskedLM": {},
        "RoFormerForMaskedLM": {},
        "RobertaForMaskedLM": {},
        "SqueezeBertForMaskedLM": {},
        "XLMWithLMHeadModel": {},
    },
    "seq2seq": {
        "BartForConditionalGeneration": {},
        "BlenderbotForConditionalGeneration": {},
        "FSMTForConditionalGeneration": {"src_vocab_size": VOCABULARY_SIZE, "tgt_vocab_size": VOCABULARY_SIZE},
        "LEDForConditionalGeneration": {"max_encoder_position_embeddings": 64, "max_decoder_position_embeddings": 64},
        "LongT5ForConditionalGeneration": _STARTED,
        "M2M100ForConditionalGeneration": {},
        "MBartForConditionalGeneration": {},
        "MarianMTModel": {},
        "PegasusForConditionalGeneration": {},
        "ProphetNetForConditionalGeneration": {},
        "T5ForConditionalGeneration": _STARTED,
        "UMT5ForConditionalGeneration": {},
    },
    "vision": {
        "BeitForImageClassification": {},
        "BitForImageClassification": {**STAGES, "num_groups": 4},
        "ConvNextForImageClassification": {"hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2, "patch_size": 4},
        "DeiTForImageClassification": {},
        "Dinov2ForImageClassification": {},
        "EfficientNetForImageClassification": {
            "hidden_dim": 128,
            "width_coefficient": 0.1,
            "depth_coefficient": 0.1,
        },
        "FocalNetForImageClassification": {
            "embed_dim": 8,
            "hidden_sizes": [8, 16],
            "depths": [1, 1],
            "focal_levels": [2, 2],
            "focal_windows": [3, 3],
            "patch_size": 4,
        },
        "MobileNetV1ForImageClassification": {"depth_multiplier": 0.25},
        "MobileNetV2ForImageClassification": {"depth_multiplier": 0.25},
        "MobileViTForImageClassification": {
            "hidden_sizes": [16, 16, 16],
            "neck_hidden_sizes": [8, 8, 8, 16, 16, 16, 32],
            "patch_size": 2,
        },
        "PoolFormerForImageClassification": {"hidden_sizes": [8, 16, 16, 16], "depths": [1, 1, 1, 1]},
        "PvtForImageClassification": {"hidden_sizes": [8, 16, 20, 32], "depths": [1, 1, 1, 1]},
        "RegNetForImageClassification": {**STAGES, "groups_width": 8},
        "ResNetForImageClassification": STAGES,
        "SegformerForImageClassification": {"hidden_sizes": [8, 16, 40, 32], "depths": [1, 1, 1, 1]},
        "SwiftFormerForImageClassification": {"depths": [1, 1, 1, 1], "embed_dims": [8, 16, 16, 16]},
        "SwinForImageClassification": WINDOWS,
        "Swinv2ForImageClassification": WINDOWS,
        "ViTForImageClassification": {},
    },
    "audio": {
        "ASTForAudioClassification": {"max_length": 32},
        "Data2VecAudioForCTC": {**AUDIO_FRONT_END, "conv_pos_kernel_size": 3},
        "HubertForCTC": AUDIO_FRONT_END,
        "SEWForCTC": {**AUDIO_FRONT_END, "squeeze_factor": 2},
        "Speech2TextForConditionalGeneration": {"input_feat_per_channel": 16},
        "UniSpeechForCTC": AUDIO_FRONT_END,
        "WavLMForCTC": AUDIO_FRONT_END,
        "Wav2Vec2BertForCTC": {"feature_projection_input_dim": 16},
        "Wav2Vec2ConformerForCTC": AUDIO_FRONT_END,
        "Wav2Vec2ForCTC": AUDIO_FRONT_END,
        "WhisperForConditionalGeneration": {},
    },
}
_FEATURE_SHAPES = {
    "ASTForAudioClassification": (32, 16),
    "Speech2TextForConditionalGeneration": (48, 16),
    "Wav2Vec2BertForCTC": (24, 16),
    "WhisperForConditionalGeneration": (16, 128),
}

ARCHITECTURES: tuple[Architecture, ...] = tuple(
    Architecture(kind=kind, class_name=name, special=special, feature_shape=_FEATURE_SHAPES.get(name, (AUDIO_SAMPLES,)))
    for kind, entries in _TABLE.items()
    for name, special in entries.items()
)


def build_model(architecture: Architecture) -> Any:
    """Make the architecture's tiny model, with the random weights of the current seed, in training mode."""
    import transformers

    model_class = getattr(transformers, architecture.class_name)
    model = model_class(tiny_config(model_class.config_class, architecture.special))
    return model.train()


def training_inputs(architecture: Architecture, model: Any) -> dict[str, torch.Tensor]:
    """Draw inputs and labels that give the architecture a loss."""
    class_labels = torch.randint(0, model.config.num_labels, (BATCH_SIZE,))
    token_ids = torch.randint(3, VOCABULARY_SIZE, (BATCH_SIZE, SEQUENCE_LENGTH))
    if architecture.kind == "vision":
        channels = getattr(model.config, "num_channels", 3)
        return {"pixel_values": torch.randn(BATCH_SIZE, channels, IMAGE_SIZE, IMAGE_SIZE), "labels": class_labels}
    if architecture.kind == "audio":
        features = torch.randn(BATCH_SIZE, *architecture.feature_shape)
        labels = class_labels if "Classification" in architecture.class_name else token_ids[:, :4].contiguous()
        return {model.main_input_name: features, "labels": labels}
    return {"input_ids": token_ids, "labels": token_ids.clone()}
