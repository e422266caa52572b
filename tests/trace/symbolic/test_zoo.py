"""The models of the papers, traced: the figures of the planner findings, and what differs on CUDA."""

from __future__ import annotations

import pytest
import torch

from benchmarks import models
from tests.sampling import keep
from torchdelta.trace.model import BEFORE_STEP, counts
from torchdelta.trace.scale import scale
from torchdelta.trace.symbolic import trace_step

GIB = 2**30
# Model, batch size; parameters, peak and saved bytes in GiB, GFLOP a sample (reference: planner findings, simulated).
# Two things differ from what we count: their dropout masks are the CPU's, in float32, and their saved bytes have the
# input images in them, where ours are the saved buffers that are born in the step.
FINDINGS = [
    (models.resnet50, 64, 0.10, 5.27, 5.12, 24),
    (models.resnet101, 64, 0.17, 7.78, 7.56, 47),
    (models.bert_large, 8, 1.25, 12.49, 10.55, 814),
    (models.gpt2_large, 2, 2.88, 31.49, 27.84, 5324),
    (models.gpt2_xl, 2, 5.80, 52.69, 46.12, 10520),
]


@pytest.mark.parametrize(("model", "batch_size", "params", "peak", "saved", "gflops"), keep(FINDINGS, FINDINGS[:2]))
def test_the_table_of_the_findings(model, batch_size, params, peak, saved, gflops):
    """Parameters, peak, saved bytes and FLOPs are those of the table, to one per cent or its last digit."""
    trace = trace_step(model, batch_size=batch_size, device="cpu", optimizer="none")
    found = counts(trace)
    inputs_bytes = sum(b.size_bytes for b in trace.buffers if b.kind == "input" and b.saved)
    assert sum(b.size_bytes for b in trace.buffers if b.kind == "parameter") / GIB == pytest.approx(params, abs=0.006)
    assert found.peak.size_bytes / GIB == pytest.approx(peak, rel=0.002)
    assert (found.saved_bytes + inputs_bytes) / GIB == pytest.approx(saved, rel=0.002)
    assert sum(op.flops for op in trace.ops) / batch_size / 1e9 == pytest.approx(gflops, abs=0.6)


small_gpt2 = models.gpt2(size=1024, vocab_size=50257, n_embd=96, n_layer=3, n_head=3, attn_implementation="sdpa")


@pytest.mark.rest
@pytest.mark.parametrize("model", keep([models.alexnet, small_gpt2], [small_gpt2]))
def test_any_batch_from_two(model):
    """A step priced from batches 2 and 4 is the step traced at 6, number by number."""
    two, four, six = (trace_step(model, batch_size=size, optimizer="adamw") for size in (2, 4, 6))
    assert scale(two, four, 6) == six


def test_dropout_saves_a_bool_mask_on_cuda():
    """On CUDA each mask is a quarter of the float32 one that the CPU saves, and dropout is one op."""
    cuda = trace_step(models.vgg16, batch_size=2, optimizer="none")
    drops = [op for op in cuda.ops if op.name == "aten.native_dropout.default"]
    assert [[cuda.buffers[id_].size_bytes for id_ in op.writes] for op in drops] == [[4 * 2 * 4096, 2 * 4096]] * 2
    assert all(op.random and op.recomputable for op in drops)
    cpu = trace_step(models.vgg16, batch_size=2, device="cpu", optimizer="none")
    assert not any("native_dropout" in op.name for op in cpu.ops)
    assert counts(cpu).saved_bytes - counts(cuda).saved_bytes == 2 * (4 - 1) * 2 * 4096


def small_llama(batch_size: int) -> models.Step:
    """Two blocks of Llama in bfloat16."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(**sizes, vocab_size=256, use_cache=False)
    tokens = torch.randint(0, 256, (batch_size, 64))
    return LlamaForCausalLM(config).to(torch.bfloat16).train(), {"input_ids": tokens, "labels": tokens}


def test_a_causal_model_needs_no_mask():
    """Transformers sees that nothing is masked, as in a real step, and attention on CUDA is flash attention."""
    trace = trace_step(small_llama, batch_size=2, optimizer="none")
    assert sum(op.name == "aten._scaled_dot_product_flash_attention.default" for op in trace.ops) == 2


@pytest.mark.parametrize(
    ("device", "kernel"),
    [
        ("cuda", "aten._scaled_dot_product_efficient_attention.default"),
        ("cpu", "aten._safe_softmax.default"),  # with dropout the CPU has no fused kernel
    ],
)
def test_fused_attention_is_the_kernel_of_the_device(device, kernel):
    """In float32 with dropout CUDA takes the memory-efficient kernel, which saves no matrix of scores."""
    trace = trace_step(small_gpt2, batch_size=2, device=device, optimizer="none")
    assert sum(op.name == kernel for op in trace.ops) == 3
    scores_bytes = 2 * 3 * 1024 * 1024 * 4
    scores = [b for b in trace.buffers if b.saved and b.birth_op != BEFORE_STEP and b.size_bytes == scores_bytes]
    assert bool(scores) == (device == "cpu")
