"""What the shared sizes do not fit: fields by model type, those of parts as dictionaries."""

from __future__ import annotations

from typing import Any

from tests.same_bits.architectures import AUDIO_FRONT_END, STAGES, WINDOWS

RESNET: dict[str, Any] = {"model_type": "resnet", **STAGES, "out_features": ["stage2", "stage3", "stage4"]}

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
    **{name: {"backbone": None, "backbone_config": RESNET}
       for name in ("detr", "conditional_detr", "dab-detr", "deformable_detr", "table-transformer", "omdet-turbo")},
}
# fmt: on
