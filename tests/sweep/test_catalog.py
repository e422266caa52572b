"""What the sweep lists: everything, each class once, and nothing left out silently."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.same_bits import op_database
from tools.sweep import catalog, tiny_configs, torch_modules, transformers_classes


@pytest.mark.parametrize("family", catalog.FAMILIES)
def test_every_class_is_listed_once(family: str) -> None:
    """Names identify a class in the raw file."""
    subjects = catalog.family(family).subjects()
    assert len({subject.name for subject in subjects}) == len(subjects)
    assert all(subject.family == family and subject.group for subject in subjects)


def test_every_transformers_model_is_listed() -> None:
    """The mapped ones with the task that says most about them, and those that no auto mapping names."""
    subjects = {subject.name: subject for subject in transformers_classes.subjects()}
    assert len(subjects) >= 1500
    assert subjects["GPT2LMHeadModel"].task == "causal_lm"
    assert subjects["LlamaModel"].task == "base"
    assert subjects["XLMForQuestionAnswering"].task == "question_answering"
    assert "BertPreTrainedModel" not in subjects


@pytest.mark.rest
@pytest.mark.filterwarnings("ignore")
def test_every_module_of_torch_has_samples_or_a_reason() -> None:
    """A new module of torch without samples fails here and not unseen."""
    known = {info.module_cls for info in op_database.module_infos()}
    for name in torch_modules.exported_classes():
        assert name in torch_modules.SAMPLES or name in torch_modules.NOT_TRAINED or getattr(nn, name) in known, name
    assert not torch_modules.SAMPLES.keys() & torch_modules.NOT_TRAINED.keys()


def test_what_cannot_be_built_is_told_with_its_reason() -> None:
    """A part that is exported beside the models is no silent success."""
    layer = next(subject for subject in transformers_classes.subjects() if subject.name == "BertLayer")
    record = catalog.judge(layer, ["swap"], lambda *_: None)
    assert (record["status"], record["reason"]) == (catalog.NOT_CONSTRUCTIBLE, transformers_classes.NO_MODEL)


def test_layers_are_cut_to_a_few_of_each_kind() -> None:
    """A model that mixes kinds of layers keeps each kind, in its order."""
    assert tiny_configs.fewer(["a", "a", "b", "a", "a", "b"], 2) == ["a", "b"]
    assert tiny_configs.fewer(["a", "a", "a"], 2) == ["a", "a"]


def test_a_tiny_model_trains_with_dropout() -> None:
    """What is swept is in training mode, and draws random numbers."""
    subject = next(subject for subject in transformers_classes.subjects() if subject.name == "BertForMaskedLM")
    steps, facts = transformers_classes.build(subject)
    before = torch.get_rng_state()
    seen: list[torch.Tensor] = []

    class Scope:
        def __enter__(self) -> None:
            seen.append(torch.get_rng_state())

        def __exit__(self, *_: object) -> None:
            seen.append(torch.get_rng_state())

    steps["plain"](Scope)
    torch.set_rng_state(before)
    assert not torch.equal(*seen)
    assert facts["num_parameters"] < 100_000
