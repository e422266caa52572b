"""Same bits on many `transformers` architectures: tiny random models, in training mode, with dropout."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import pytest
import torch

from tests.same_bits.architectures import ARCHITECTURES, Architecture, build_model, training_inputs
from tests.same_bits.judge import Scope, assert_same_bits, seed_everything, state_of
from tests.sampling import keep

# Models warn about their own deprecations and about kernels that are not installed.
pytestmark = pytest.mark.filterwarnings("ignore")


def test_the_table_covers_every_kind() -> None:
    """The promise names at least 60 architectures of eight kinds; a shrinking table must not pass unseen."""
    counts = Counter(architecture.kind for architecture in ARCHITECTURES)
    assert counts.total() >= 66
    assert counts.keys() == {"causal", "moe", "state-space", "recurrent", "masked", "seq2seq", "vision", "audio"}
    assert min(counts.values()) >= 4


ONE_OF_EACH_KIND = list({architecture.kind: architecture for architecture in reversed(ARCHITECTURES)}.values())


@pytest.mark.parametrize(
    "architecture", keep(ARCHITECTURES, ONE_OF_EACH_KIND, 14), ids=lambda architecture: architecture.class_name
)
def test_one_step_leaves_the_same_bits(architecture: Architecture, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loss, gradients, buffers and generators after one forward and backward equal the plain run's."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    seed_everything()
    template = build_model(architecture)
    inputs = training_inputs(architecture, template)

    def step(scope: Scope) -> dict[str, Any]:
        model = copy.deepcopy(template)
        with scope():
            loss = model(**inputs).loss
            loss.backward()
        assert sum(parameter.grad is not None for parameter in model.parameters()) >= 3
        return state_of(model, loss=loss)

    assert_same_bits(step)


def test_two_optimizer_steps_with_gradient_clipping_leave_the_same_bits() -> None:
    """A model whose inputs change length from step to step is trained on, not only run once."""
    architecture = next(a for a in ARCHITECTURES if a.class_name == "GPT2LMHeadModel")
    seed_everything()
    template = build_model(architecture)

    def step(scope: Scope) -> dict[str, Any]:
        model = copy.deepcopy(template)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        losses: list[torch.Tensor] = []
        with scope():
            for length in (8, 12, 8):
                token_ids = torch.randint(3, 90, (2, length))
                loss = model(input_ids=token_ids, labels=token_ids).loss
                loss.backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.detach())
        return state_of(model, losses=losses)

    assert_same_bits(step)
