"""Inputs that train a `transformers` model: drawn by the names in its forward's signature, labels by its task."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

BATCH = 2
LENGTH = 16
SHORT = 8
WAVE = 2000
FRAMES = 64

TOKEN_LABELS = {"causal_lm", "masked_lm", "seq_to_seq_causal_lm", "image_text_to_text", "multimodal_lm", "pretraining"}
CLASS_LABELS = {
    "sequence_classification",
    "image_classification",
    "video_classification",
    "audio_classification",
    "next_sentence_prediction",
    "audio_xvector",
    "multiple_choice",
}


def attempts(model: Any, task: str) -> Iterator[dict[str, Any]]:
    """Give the sets of inputs that are tried, those with a loss of the model's own first."""
    source = Source(model, task)
    parameters = inspect.signature(model.forward).parameters
    required = [name for name, parameter in parameters.items() if parameter.default is parameter.empty]
    least = source.draw([model.main_input_name, *required, "use_cache"], parameters)
    most = source.draw(parameters, parameters)
    labels = source.labels(parameters)
    if labels:
        yield least | labels
        yield most | labels
    yield least
    yield most


class Source:
    """Draws one model's inputs.

    Args:
        task: the auto mapping that lists the model, as `causal_lm`.
    """

    def __init__(self, model: Any, task: str) -> None:
        self.model = model
        self.config = model.config
        self.task = task
        text = self.config.get_text_config()
        self.vocabulary_size = self.first(text, "vocab_size", default=96)
        vision = getattr(self.config, "vision_config", None) or self.config
        size = self.first(vision, "image_size", "input_size", "img_size", default=64)
        self.height, self.width = size if isinstance(size, list | tuple) else (size, size)
        self.channels = self.first(vision, "num_channels", "in_channels", "in_chans", "num_input_channels", default=3)
        self.vision = vision

    def first(self, config: Any, *names: str, default: Any = None) -> Any:
        """Return the first field that a configuration has a number for."""
        for name in names:
            value = getattr(config, name, None)
            if isinstance(value, int | list | tuple):
                return value
        return default

    def draw(self, names: Any, parameters: Any) -> dict[str, Any]:
        """Draw every input that is named, is in the signature and is known here."""
        found = {}
        for name in names:
            maker: Callable[[], Any] | None = getattr(self, f"_make_{name}", None)
            if name in parameters and name not in found and maker is not None:
                found[name] = maker()
        return found

    # -- text

    def tokens(self, *shape: int) -> torch.Tensor:
        """Draw token ids that are not among the first, which are often special."""
        return torch.randint(3, max(4, min(self.vocabulary_size, 96)), shape)

    def _make_input_ids(self) -> torch.Tensor:
        if self.task == "multiple_choice":
            return self.tokens(BATCH, 3, LENGTH)
        return self.tokens(BATCH, LENGTH)

    def _make_decoder_input_ids(self) -> torch.Tensor:
        return self.tokens(BATCH, SHORT)

    def _make_bbox(self) -> torch.Tensor:
        corner = torch.randint(0, 30, (BATCH, LENGTH, 2))
        return torch.cat([corner, corner + torch.randint(1, 30, (BATCH, LENGTH, 2))], -1)

    def _make_use_cache(self) -> bool:
        return False

    # -- images

    def _make_pixel_values(self) -> torch.Tensor:
        image = (self.channels, self.height, self.width)
        if self.task == "video_classification" or "num_frames" in self.config.to_dict():
            return torch.randn(BATCH, self.first(self.config, "num_frames", default=4), *image)
        return torch.randn(BATCH, *image)

    def _make_bool_masked_pos(self) -> torch.Tensor:
        patch = self.first(self.vision, "patch_size", default=8)
        patch = patch[0] if isinstance(patch, list | tuple) else patch
        return torch.rand(BATCH, (self.height // patch) * (self.width // patch)) < 0.5

    # -- sound

    def _make_input_values(self) -> torch.Tensor:
        return torch.randn(BATCH, WAVE)

    def _make_input_features(self) -> torch.Tensor:
        width = self.first(self.config, "feature_projection_input_dim", "input_feat_per_channel", "num_mel_bins",
                           "feature_size", default=80)  # fmt: skip
        return torch.randn(BATCH, FRAMES, width)

    # -- labels

    def labels(self, parameters: Any) -> dict[str, Any]:
        """Draw the labels of the task."""
        num_labels = getattr(self.config, "num_labels", 2)
        classes = torch.randint(0, num_labels, (BATCH,))
        if "start_positions" in parameters:
            return {
                "start_positions": torch.randint(0, LENGTH, (BATCH,)),
                "end_positions": torch.randint(0, LENGTH, (BATCH,)),
            }
        if "labels" not in parameters:
            return {}
        if self.task == "next_sentence_prediction":
            return {"labels": torch.randint(0, 2, (BATCH,))}
        if self.task == "multiple_choice":
            return {"labels": torch.randint(0, 3, (BATCH,))}
        if self.task in CLASS_LABELS:
            return {"labels": classes}
        if self.task == "token_classification":
            return {"labels": torch.randint(0, num_labels, (BATCH, LENGTH))}
        if self.task in TOKEN_LABELS:
            return {"labels": self.tokens(BATCH, LENGTH)}
        if self.task in {"ctc", "speech_seq_2_seq", "rnnt", "tdt"}:
            return {"labels": self.tokens(BATCH, 4)}
        if self.task in {"semantic_segmentation", "image_segmentation"}:
            return {"labels": torch.randint(0, num_labels, (BATCH, self.height, self.width))}
        if self.task in {"object_detection", "zero_shot_object_detection"}:
            boxes = torch.rand(2, 4) * 0.4 + 0.3
            return {"labels": [{"class_labels": classes, "boxes": boxes} for _ in range(BATCH)]}
        return {}
