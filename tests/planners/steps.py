"""Real training steps in small, traced on fake tensors and priced: a transformer, a ResNet and a U-Net."""

from __future__ import annotations

import functools

import torch
from torch import nn

from benchmarks.networks.language import GPT2
from benchmarks.networks.vision import UNet, build_resnet
from torchdelta.machine.catalog import find
from torchdelta.machine.roofline import price
from torchdelta.trace.symbolic import trace_step

MACHINE = find("rtx3090")


def gpt2(batch_size):
    """Four blocks, with the products, dropouts and norms of the real one."""

    def step(model, tokens):
        model(tokens).backward()
        model.zero_grad()

    model = GPT2(num_layers=4, width=64, num_heads=2, vocabulary=256, length=128)
    return model, torch.randint(256, (batch_size, 128)), step


def small_resnet(batch_size):
    """Two blocks a stage, ReLU in place, on pictures of 96 x 96."""

    def step(model, inputs):
        pixels, labels = inputs
        nn.functional.cross_entropy(model(pixels), labels).backward()
        model.zero_grad()

    inputs = (torch.randn(batch_size, 3, 96, 96), torch.randint(10, (batch_size,)))
    return build_resnet((2, 2, 2, 2), 10), inputs, step


def unet(batch_size):
    """A way down and up with skips, whose gradients the engine adds up."""

    def step(model, inputs):
        noisy, times = inputs
        nn.functional.mse_loss(model(noisy, times), noisy).backward()
        model.zero_grad()

    return UNet(), (torch.randn(batch_size, 3, 32, 32), torch.randint(1000, (batch_size,))), step


STEPS = {"gpt2": gpt2, "resnet": small_resnet, "unet": unet}


@functools.cache
def real_step(name):
    """The priced trace of one of `STEPS`."""
    return price(trace_step(STEPS[name], batch_size=8, optimizer="none"), MACHINE)
