"""The peak of a symbolic step is that of the real one, at torch's allocator, for all kinds of models."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from benchmarks import models
from tests.same_bits.architectures import ARCHITECTURES, build_model, training_inputs
from tests.sampling import sample
from torchdelta.cli.allocator_peak import AllocatorPeak
from torchdelta.errors import TraceError
from torchdelta.trace.model import peak
from torchdelta.trace.symbolic import trace_step

# One of each way to be: fused attention, experts, state space, relative positions, lengths read off the inputs, windows
# that look at a mask's values and dropped layers, patches of images, experts that are counted, a loss over alignments.
NAMES = (
    "LlamaForCausalLM",
    "MixtralForCausalLM",
    "MambaForCausalLM",
    "DebertaForMaskedLM",
    "T5ForConditionalGeneration",
    "XLMWithLMHeadModel",
    "LEDForConditionalGeneration",
    "BeitForImageClassification",
    "JetMoeForCausalLM",
    "Wav2Vec2ForCTC",
)


def step(model: torch.nn.Module, inputs: dict[str, torch.Tensor]) -> None:
    """One step of a transformers model."""
    model(**inputs).loss.backward()
    model.zero_grad(set_to_none=True)


def real_peak_bytes(build: Any) -> int:
    """The highest live bytes of the second real step, model and inputs included."""
    meter = AllocatorPeak()
    with meter:
        model, inputs, train = build()
    for _ in range(2):
        with meter:
            train(model, inputs)
    return meter.segments[-1].peak_bytes


@pytest.mark.parametrize("name", sample(NAMES, 4))
def test_the_peak_of_a_tiny_transformer(name, monkeypatch):
    """Within 2 per cent."""
    monkeypatch.setitem(os.environ, "HF_HUB_OFFLINE", "1")
    architecture = next(a for a in ARCHITECTURES if a.class_name == name)

    def build() -> Any:
        torch.manual_seed(0)
        model = build_model(architecture)
        return model, training_inputs(architecture, model), step

    trace = trace_step(build, device="cpu")
    assert peak(trace, with_workspace=True).size_bytes == pytest.approx(real_peak_bytes(build), rel=0.02)


def test_a_model_that_looks_at_its_activations_is_one_line():
    """Quantisation that asks for the largest activation: there is no answer without running the step."""
    architecture = next(a for a in ARCHITECTURES if a.class_name == "IBertForMaskedLM")

    def build() -> Any:
        model = build_model(architecture)
        return model, training_inputs(architecture, model), step

    with pytest.raises(TraceError, match="asks for the value of a tensor that is not known") as caught:
        trace_step(build)
    assert "\n" not in str(caught.value)


# It asks for the largest activation.
REFUSED = {"IBertForMaskedLM"}


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")  # MobileBERT, as small as it is here
@pytest.mark.parametrize("name", sample([a.class_name for a in ARCHITECTURES if a.class_name not in REFUSED], 0, 40))
def test_every_architecture_can_be_traced(name, monkeypatch):
    """For CUDA, whatever it asks of its masks, experts, lengths and generators."""
    monkeypatch.setitem(os.environ, "HF_HUB_OFFLINE", "1")
    architecture = next(a for a in ARCHITECTURES if a.class_name == name)

    def build() -> Any:
        torch.manual_seed(0)
        model = build_model(architecture)
        return model, training_inputs(architecture, model), step

    trace = trace_step(build)
    assert {op.phase for op in trace.ops} >= {"forward", "backward"}


@pytest.mark.rest
@pytest.mark.parametrize("name", ["gpt2-like", "bert-like"])
def test_the_peak_of_a_benchmark_model(name):
    """Within 2 per cent, with an optimizer that keeps states."""

    def build() -> Any:
        workload = models.build(name, 2)
        optimizer = torch.optim.AdamW(workload.model.parameters())

        def train(model: torch.nn.Module, batch: Any) -> None:
            models.loss_of(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()

        return workload.model, workload.inputs, train

    trace = trace_step(build, device="cpu")
    assert peak(trace, with_workspace=True).size_bytes == pytest.approx(real_peak_bytes(build), rel=0.02)
