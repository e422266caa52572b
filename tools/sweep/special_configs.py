"""What the shared sizes do not fit: fields by model type, those of parts as dictionaries."""

from __future__ import annotations

from typing import Any

from tests.same_bits.architectures import AUDIO_FRONT_END, STAGES, WINDOWS

# Rotary positions in three dimensions: their sections sum to half of a head.
SECTIONS: dict[str, Any] = {
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]},
}
RESNET: dict[str, Any] = {"model_type": "resnet", **STAGES, "out_features": ["stage2", "stage3", "stage4"]}
SWIN: dict[str, Any] = {
    "model_type": "swin",
    "image_size": 64,
    "patch_size": 4,
    "embed_dim": 8,
    "depths": [1, 1, 1, 1],
    "num_heads": [2, 2, 2, 2],
    "window_size": 2,
    "out_features": ["stage1", "stage2", "stage3", "stage4"],
}
DINO: dict[str, Any] = {
    "model_type": "dinov2",
    "num_hidden_layers": 4,
    "out_features": ["stage1", "stage2", "stage3", "stage4"],
    "reshape_hidden_states": False,
}
STAGES_OF_LAYERS: dict[str, Any] = {"num_hidden_layers": 4, "out_indices": [1, 2, 3, 4]}

# fmt: off
SPECIAL: dict[str, dict[str, Any]] = {
    "resnet": STAGES,
    "bit": {**STAGES, "num_groups": 4},
    "regnet": {**STAGES, "groups_width": 8},
    **dict.fromkeys(("swin", "swinv2", "donut-swin", "maskformer-swin"), WINDOWS),
    **dict.fromkeys(("wav2vec2", "hubert", "unispeech", "unispeech-sat", "wavlm", "wav2vec2-conformer"),
                    AUDIO_FRONT_END),
    "sew": {**AUDIO_FRONT_END, "squeeze_factor": 2},
    "data2vec-audio": {**AUDIO_FRONT_END, "conv_pos_kernel_size": 3},
    "convnext": {"hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2, "patch_size": 4},
    "convnextv2": {"hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2, "patch_size": 4},
    "efficientnet": {"hidden_dim": 128, "width_coefficient": 0.1, "depth_coefficient": 0.1},
    "focalnet": {"embed_dim": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "focal_levels": [2, 2],
                 "focal_windows": [3, 3], "patch_size": 4},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 4},
    "bamba": {"mamba_n_groups": 1, "attn_layer_indices": [1]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "use_mamba_kernels": False},
    "mamba2": {"num_heads": 8, "head_dim": 8, "n_groups": 2},
    "xlstm": {"chunk_size": 16},
    "funnel": {"block_sizes": [1, 1]},
    "mobilebert": {"intra_bottleneck_size": 16, "true_hidden_size": 16},
    "audio-spectrogram-transformer": {"max_length": 32},
    "diffllama": {"attention_dropout": 0.0},
    "timesformer": {"drop_path_rate": 0},
    "reformer": {"axial_pos_embds_dim": [16, 16], "axial_pos_shape": [4, 4], "is_decoder": False,
                 "num_buckets": 4, "attn_layers": ["local", "lsh"]},
    "zaya": {"num_experts_per_tok": 1},
    "xmod": {"default_language": "en_XX"},
    "mellum": {"num_nextn_predict_layers": 1},
    **dict.fromkeys(("qwen2_vl_text", "qwen2_5_vl_text", "qwen2_5_omni_text", "glm4v_text", "glm_ocr_text",
                     "glm_image_text"), SECTIONS),
    "glm4v_moe_text": {**SECTIONS, "head_dim": 16},
    "beit": STAGES_OF_LAYERS,
    **{name: {"backbone_config": {**SWIN, "model_type": "maskformer-swin" if name == "maskformer" else "swin"}}
       for name in ("maskformer", "mask2former", "oneformer", "upernet")},
    **{name: {"backbone_config": DINO, "neck_hidden_sizes": [8, 8, 16, 16], "reassemble_hidden_size": 32}
       for name in ("depth_anything", "prompt_depth_anything")},
    "zoedepth": {"backbone_config": {"model_type": "beit", **STAGES_OF_LAYERS, "reshape_hidden_states": False},
                 "neck_hidden_sizes": [8, 8, 16, 16]},
    "perceiver": {"num_latents": 8, "d_latents": 32, "d_model": 32, "num_self_attends_per_block": 2,
                  "num_self_attention_heads": 2, "num_cross_attention_heads": 1},
    **{name: {"moe_k": 2} for name in ("ernie4_5_moe", "ernie4_5_vl_moe_text")},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "dots1": {"n_shared_experts": 1, "num_experts_per_tok": 2},
    "falcon_h1": {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16},
    "zamba2": {"mamba_headdim": 16, "n_mamba_heads": 4, "attention_hidden_size": 64, "attention_head_dim": 16},
    "mimi": {"upsample_groups": 32},
    "rt_detr_resnet": {"embedding_size": 8, "hidden_sizes": [8, 16, 16, 32], "depths": [1, 1, 1, 1],
                       "layer_type": "basic"},
    **{name: {"encoder_in_channels": [16, 16, 32], "encoder_hidden_dim": 32, "decoder_in_channels": [32, 32, 32],
              "backbone": None} for name in ("rt_detr", "rt_detr_v2")},
    **{name: {"backbone": None, "backbone_config": RESNET}
       for name in ("detr", "conditional_detr", "dab-detr", "deformable_detr", "table-transformer", "omdet-turbo")},
}
# fmt: on
