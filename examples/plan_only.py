"""Will it fit? Plans a training step for a GPU that is not here, in seconds and without its memory.

pip install '.[plan]'
python examples/plan_only.py                          # inside 10 GiB of an RTX 4090
python examples/plan_only.py --memory-budget none     # what the step takes without a budget
"""

import argparse

import torch
from torch import nn

from torchdelta import Prediction, plan_step
from torchdelta.planners.prediction import predict
from torchdelta.trace.symbolic import trace_step
from torchdelta.units import format_bytes


def build(batch_size: int = 8) -> tuple[nn.Module, torch.Tensor]:
    """Return a model and its input. They are built on fake tensors, so that they take no memory, however large."""
    layer = nn.TransformerEncoderLayer(d_model=2048, nhead=16, dim_feedforward=8192, batch_first=True, norm_first=True)
    return nn.TransformerEncoder(layer, num_layers=6, enable_nested_tensor=False), torch.randn(batch_size, 2048, 2048)


def show(name: str, prediction: Prediction) -> None:
    """Print what was predicted."""
    print(
        f"{name}: {prediction.time_s * 1e3:.1f} ms a step ({prediction.overhead:+.1%}), "
        f"peak {format_bytes(prediction.peak_bytes)}, pinned host memory {format_bytes(prediction.pinned_host_bytes)}"
    )


def main() -> None:
    """Trace a step once, then predict it plainly and inside the budget."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--memory-budget", default="10GiB", help="'10GiB', '80%%' of the machine, bytes, or 'none'")
    parser.add_argument("--machine", default="rtx4090", help="a name of the catalog: see `torchdelta plan --help`")
    arguments = parser.parse_args()

    step = trace_step(build, batch_size=8, optimizer="adamw")
    show("plain", predict(step, arguments.machine))
    if arguments.memory_budget != "none":
        prediction = plan_step(step, arguments.machine, arguments.memory_budget)
        show(f"inside {arguments.memory_budget} on {arguments.machine}", prediction)


if __name__ == "__main__":
    main()
