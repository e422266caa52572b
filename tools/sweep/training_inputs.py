"""Inputs that train a `transformers` model: drawn by the names in its forward's signature, labels by its task."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

BATCH = 2
LENGTH = 16
SHORT = 8
WAVE = 4000
FRAMES = 64
NUM_OBJECTS = 2

TOKEN_LABELS = {
    "causal_lm",
    "masked_lm",
    "seq_to_seq_causal_lm",
    "image_text_to_text",
    "multimodal_lm",
    "pretraining",
    "visual_question_answering",
}
CLASS_LABELS = {
    "sequence_classification",
    "image_classification",
    "video_classification",
    "audio_classification",
    "audio_xvector",
}
# What is a matter of layout and not of the signature: tried one after the other.
STYLES = ("plain", "frames", "channels first", "long")


def attempts(model: Any, task: str) -> Iterator[dict[str, Any]]:
    """Give the sets of inputs that are tried, those with a loss of the model's own first."""
    parameters = inspect.signature(model.forward).parameters
    required = [name for name, parameter in parameters.items() if parameter.default is parameter.empty]
    main = model.main_input_name
    needed = [*([main] if isinstance(main, str) else main), *required, "use_cache"]
    for style in STYLES:
        source = Source(model, task, style, parameters)
        least = source.draw(needed, parameters)
        most = source.draw(parameters, parameters)
        labels = source.labels(parameters)
        if labels:
            yield least | labels
            yield most | labels
        if least:
            yield least
        yield most
        if not source.is_style_asked:
            return


class Source:
    """Draws one model's inputs.

    Args:
        task: the auto mapping that lists the model, as `causal_lm`.
        style: which layout to try where several are usual.
    """

    def __init__(self, model: Any, task: str, style: str, parameters: Any) -> None:
        self.config = config = model.config
        self.parameters = parameters
        self.task = task
        self.style = style
        self.is_style_asked = False
        text = part(config, "text_config", "text_encoder", "decoder", "llm_config", "language_config") or config
        self.vocabulary_size = number(text, "vocab_size") or number(config, "vocab_size") or 96
        self.eos_token_id = number(text, "eos_token_id") or 2
        self.vision = vision = part(config, "vision_config", "encoder", "backbone_config") or config
        size = sizes(vision, "image_size", "input_size", "img_size") or sizes(config, "image_size") or [64, 64]
        self.height, self.width = size
        self.patch = (sizes(vision, "patch_size", "patch_sizes") or [8, 8])[0]
        self.channels = number(vision, "num_channels", "in_channels", "in_chans", "num_input_channels") or 3

    def draw(self, names: Iterable[str], parameters: Any) -> dict[str, Any]:
        """Draw every input that is named, is in the signature and is known here."""
        found: dict[str, Any] = {}
        for name in names:
            maker: Callable[[], Any] | None = getattr(self, f"_{name}", None)
            if name in parameters and name not in found and maker is not None:
                found[name] = maker()
        return found

    def styled(self, **choices: Any) -> Any:
        """Return what the style in turn chooses, and remember that there was a choice."""
        self.is_style_asked = True
        return choices.get(self.style.replace(" ", "_"), choices["plain"])

    # -- text

    def tokens(self, *shape: int) -> torch.Tensor:
        """Draw token ids that are not among the first, which are often special."""
        return torch.randint(3, max(4, min(self.vocabulary_size, 96)), shape)

    def _input_ids(self) -> torch.Tensor:
        tokens = self.tokens(*((BATCH, 3, LENGTH) if self.task == "multiple_choice" else (BATCH, LENGTH)))
        if self.task == "sequence_classification" and self.eos_token_id < self.vocabulary_size:
            # Sequence-to-sequence models classify at the end token, of which each example must have as many.
            tokens[tokens == self.eos_token_id] = 3 if self.eos_token_id != 3 else 4
            tokens[:, -1] = self.eos_token_id
        separator = number(self.config, "sep_token_id")
        if "global_attention_mask" in self.parameters and separator is not None:
            # Longformer looks for the question between three separators.
            tokens[tokens == separator] = 4
            tokens[..., [3, 4, -1]] = separator
        return tokens

    def _decoder_input_ids(self) -> torch.Tensor:
        return self.tokens(BATCH, SHORT)

    def _inputs(self) -> torch.Tensor:
        width = number(self.config, "d_model") or 32
        return self.styled(plain=torch.randn(BATCH, LENGTH, width), frames=self.tokens(BATCH, LENGTH))

    def _qformer_input_ids(self) -> torch.Tensor:
        return self.tokens(BATCH, SHORT)

    def _question_positions(self) -> torch.Tensor:
        return torch.full((BATCH, 1), 3)

    def _bbox(self) -> torch.Tensor:
        corner = torch.randint(0, 30, (BATCH, LENGTH, 2))
        return torch.cat([corner, corner + torch.randint(1, 30, (BATCH, LENGTH, 2))], -1)

    def _use_cache(self) -> bool:
        return False

    # -- images

    def image(self) -> tuple[int, int, int]:
        """Return the shape of one image."""
        return self.channels, self.height, self.width

    def _pixel_values(self) -> torch.Tensor:
        num_frames = number(self.config, "num_frames", "frames_per_clip") or 2
        num_patches = (self.height // self.patch) * (self.width // self.patch)
        if "grid_thw" in self.parameters:
            return self._packed_patches()
        shape = self.styled(
            plain=self.image(),
            frames=(num_frames, *self.image()),
            channels_first=(num_patches, self.channels * self.patch**2),
            long=(self.channels, 2 * self.height, 8 * self.width),
        )
        return torch.randn(BATCH, *shape)

    def _pixel_values_videos(self) -> torch.Tensor:
        return torch.randn(BATCH, number(self.config, "num_frames", "frames_per_clip") or 2, *self.image())

    def _packed_patches(self) -> torch.Tensor:
        width = self.channels * self.patch**2 * (number(self.vision, "temporal_patch_size") or 1)
        return torch.randn(int(self._grid_thw().prod(1).sum()), width)

    def _grid_thw(self) -> torch.Tensor:
        return torch.tensor([[1, 4, 4]] * BATCH)

    def _hidden_states(self) -> torch.Tensor:
        return self._packed_patches()

    def _merge_sizes(self) -> torch.Tensor:
        return torch.ones(BATCH, dtype=torch.long)

    def _pixel_position_ids(self) -> torch.Tensor:
        side = torch.arange(4)
        return torch.cartesian_prod(side, side).repeat(BATCH, 1, 1)

    def _prompt_pixel_values(self) -> torch.Tensor:
        return torch.randn(BATCH, *self.image())

    def _prompt_masks(self) -> torch.Tensor:
        return torch.randn(BATCH, *self.image())

    def _spatial_shapes(self) -> torch.Tensor:
        return torch.tensor([[self.height // self.patch, self.width // self.patch]] * BATCH)

    def _pixel_attention_mask(self) -> torch.Tensor:
        return torch.ones(BATCH, (self.height // self.patch) * (self.width // self.patch), dtype=torch.long)

    def _bool_masked_pos(self) -> torch.Tensor:
        tubelet, num_frames = number(self.config, "tubelet_size"), number(self.config, "num_frames") or 1
        num_patches = (self.height // self.patch) * (self.width // self.patch) * (num_frames // (tubelet or num_frames))
        mask = torch.arange(num_patches) % 2 == 0
        return mask.repeat(BATCH, 1)

    def _visual_feats(self) -> torch.Tensor:
        return torch.randn(BATCH, 4, number(self.config, "visual_feat_dim") or 32)

    def _visual_pos(self) -> torch.Tensor:
        return torch.rand(BATCH, 4, 4)

    def _flattened_patches(self) -> torch.Tensor:
        width = number(self.vision, "patch_embed_hidden_size") or 32
        return torch.cat([torch.ones(BATCH, SHORT, 2), torch.randn(BATCH, SHORT, width - 2)], -1)

    def _task_inputs(self) -> torch.Tensor:
        return self.tokens(BATCH, number(self.config, "task_seq_len") or SHORT)

    def _input_points(self) -> torch.Tensor:
        return torch.rand(BATCH, 1, 2, 2) * self.width

    def _aspect_ratio_ids(self) -> torch.Tensor:
        return torch.ones(BATCH, 1, dtype=torch.long)

    def _aspect_ratio_mask(self) -> torch.Tensor:
        return torch.ones(BATCH, 1, number(self.vision, "max_num_tiles") or 4, dtype=torch.long)

    # -- sound

    def _input_values(self) -> torch.Tensor:
        frames = number(self.config, "max_length") or FRAMES
        mel = number(self.config, "num_mel_bins") or 16
        return torch.randn(
            *self.styled(
                plain=(BATCH, WAVE),
                frames=(BATCH, frames, mel),
                channels_first=(BATCH, 1, WAVE),
                long=(BATCH, 4 * WAVE),
            )
        )

    def _input_features(self) -> torch.Tensor:
        audio = part(self.config, "audio_config", "encoder_config", "encoder", "speech_config", "sound_config")
        names = (
            "feature_projection_input_dim",
            "input_feat_per_channel",
            "num_mel_bins",
            "n_mels",
            "feature_size",
            "input_dim",
            "input_size",
        )
        width = number(audio, *names) or number(self.config, *names) or 80
        positions = number(audio, "max_source_positions") or number(self.config, "max_source_positions") or FRAMES
        return torch.randn(
            BATCH,
            *self.styled(
                plain=(FRAMES, width),
                frames=(width, FRAMES),
                channels_first=(width, 2 * positions),
                long=(4 * FRAMES, width),
            ),
        )

    def _input_features_mask(self) -> torch.Tensor:
        return torch.ones(BATCH, self._input_features().shape[1], dtype=torch.long)

    # -- time series

    def past_length(self) -> int:
        """Return how much of the past a model reads: with lagged values, from before its context."""
        return (number(self.config, "context_length") or 32) + max(getattr(self.config, "lags_sequence", None) or [0])

    def series_channels(self) -> list[int]:
        """Return the channels of a series as a part of its shape: nothing where there is one only."""
        channels = number(self.config, "num_input_channels")
        return [channels] if channels and not getattr(self.config, "lags_sequence", None) else []

    def _past_values(self) -> torch.Tensor | list[torch.Tensor]:
        length, channels = self.past_length(), self.series_channels()
        return self.styled(
            plain=torch.randn(BATCH, length, *channels),
            frames=torch.randn(BATCH, length),
            channels_first=[torch.randn(length) for _ in range(BATCH)],
        )

    def _future_values(self) -> torch.Tensor:
        return torch.randn(BATCH, number(self.config, "prediction_length") or SHORT, *self.series_channels())

    def _past_time_features(self) -> torch.Tensor:
        return torch.randn(BATCH, self.past_length(), number(self.config, "num_time_features") or 0)

    def _future_time_features(self) -> torch.Tensor:
        return torch.randn(*self._future_values().shape[:2], number(self.config, "num_time_features") or 0)

    def _past_observed_mask(self) -> torch.Tensor:
        values = self._past_values()
        return torch.ones_like(values if isinstance(values, torch.Tensor) else torch.stack(values))

    def _past_values_padding(self) -> torch.Tensor:
        return torch.zeros(BATCH, self.past_length())

    def _freq(self) -> torch.Tensor:
        return torch.zeros(BATCH, 1, dtype=torch.long)

    # -- decisions

    def _states(self) -> torch.Tensor:
        return torch.randn(BATCH, SHORT, number(self.config, "state_dim") or 4)

    def _actions(self) -> torch.Tensor:
        return torch.randn(BATCH, SHORT, number(self.config, "act_dim") or 4)

    def _returns_to_go(self) -> torch.Tensor:
        return torch.randn(BATCH, SHORT, 1)

    def _rewards(self) -> torch.Tensor:
        return torch.randn(BATCH, SHORT, 1)

    def _timesteps(self) -> torch.Tensor:
        return torch.arange(SHORT).repeat(BATCH, 1)

    def _static_categorical_features(self) -> torch.Tensor | None:
        return (
            torch.zeros(BATCH, 1, dtype=torch.long) if number(self.config, "num_static_categorical_features") else None
        )

    def _target_values(self) -> torch.Tensor:
        if "classification" in self.task:
            return torch.randint(0, number(self.config, "num_targets") or 2, (BATCH,))
        return torch.randn(BATCH, number(self.config, "num_targets") or 2)

    # -- labels

    def labels(self, parameters: Any) -> dict[str, Any]:
        """Draw the labels of the task."""
        if "mask_labels" in parameters and "class_labels" in parameters:
            masks = torch.rand(NUM_OBJECTS, self.height, self.width) < 0.5
            classes = [self.classes(NUM_OBJECTS) for _ in range(BATCH)]
            return {"mask_labels": [masks.float()] * BATCH, "class_labels": classes}
        if "start_positions" in parameters:
            return {name: torch.randint(0, LENGTH, (BATCH,)) for name in ("start_positions", "end_positions")}
        if "labels" not in parameters:
            return {}
        labels = self.own_labels()
        return {} if labels is None else {"labels": labels}

    def classes(self, *shape: int) -> torch.Tensor:
        """Draw class labels."""
        return torch.randint(0, max(1, self.config.num_labels), shape)

    def own_labels(self) -> Any:
        """Draw what a model's argument `labels` means for its task."""
        task = self.task
        if task == "next_sentence_prediction":
            return torch.randint(0, 2, (BATCH,))
        if task == "multiple_choice":
            return torch.randint(0, 3, (BATCH,))
        if task in CLASS_LABELS:
            return self.classes(BATCH)
        if task == "token_classification":
            return self.classes(BATCH, LENGTH)
        if task in TOKEN_LABELS:
            return self.tokens(BATCH, LENGTH)
        if task in {"ctc", "speech_seq_2_seq", "rnnt", "tdt"}:
            return self.tokens(BATCH, 4)
        if task in {"semantic_segmentation", "image_segmentation"}:
            return self.classes(BATCH, self.height, self.width)
        if task in {"object_detection", "zero_shot_object_detection"}:
            boxes = torch.rand(NUM_OBJECTS, 4) * 0.4 + 0.3
            return [{"class_labels": self.classes(NUM_OBJECTS), "boxes": boxes} for _ in range(BATCH)]
        return None


def part(config: Any, *names: str) -> Any:
    """Return the first part of a configuration by these names."""
    found = (getattr(config, name, None) for name in names)
    return next((one for one in found if hasattr(one, "model_type")), None)


def number(config: Any, *names: str) -> int | None:
    """Return the first field by these names that is a whole number."""
    for name in names:
        try:
            value = getattr(config, name, None)
        except ValueError:  # a field that differs by layer
            continue
        if isinstance(value, int) and not isinstance(value, bool):
            return value
    return None


def sizes(config: Any, *names: str) -> list[int] | None:
    """Return the first field by these names that is a height and a width."""
    for name in names:
        value = getattr(config, name, None)
        if isinstance(value, int):
            return [value, value]
        if isinstance(value, dict) and "height" in value:
            return [value["height"], value["width"]]
        if isinstance(value, list | tuple) and len(value) >= 2 and isinstance(value[-1], int):
            return [value[-2], value[-1]]
    return None
