"""One training run of the demo, in a process of its own: `python -m torchdelta.cli.demo_train JSON`.

Two runs cannot share a process, because its high-water mark of resident memory never goes down. Each finished step and
the final result are one JSON line on stdout, an error is text there; the parent (`demo.py`) draws the progress bar,
prints the text above it, and compares.
"""

import hashlib
import json
import os
import random
import resource
import sys
import sysconfig
import time
from pathlib import Path
from typing import Any

import msgspec
import torch

from torchdelta import BudgetError
from torchdelta.cli.allocator_peak import AllocatorPeak
from torchdelta.cli.demo_model import DemoResult, DemoRun, DemoStep
from torchdelta.cli.errors import EXIT_INFEASIBLE, prefix
from torchdelta.cli.script import EXIT_INTERRUPTED

__all__ = ["main", "read_stdlib_source", "train"]


def main() -> None:
    """Run the training described by the JSON object in sys.argv[1], and report on stdout."""
    try:
        _run(msgspec.json.decode(sys.argv[1], type=DemoRun))
    except BrokenPipeError:  # the parent was interrupted while it started this process
        os._exit(EXIT_INTERRUPTED)  # an ordinary exit would flush stdout, and fail again


def _run(run: DemoRun) -> None:
    try:
        result = train(run, report=lambda step: print(json.dumps(msgspec.to_builtins(step)), flush=True))
    except BudgetError as error:
        print(f"{prefix('demo')}: {error}", flush=True)
        sys.exit(EXIT_INFEASIBLE)
    except torch.OutOfMemoryError as error:
        print(f"{prefix('demo')}: {error}", flush=True)
        sys.exit(1)
    print(json.dumps(msgspec.to_builtins(result)), flush=True)


def train(run: DemoRun, report: Any) -> DemoResult:
    """Train a fresh model and measure it.

    Args:
        run: Size of the model, number of steps, and the budget, if any.
        report: Called with a `DemoStep` after each step.
    """
    from transformers import GPT2Config, GPT2LMHeadModel
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()
    torch.manual_seed(run.seed)
    text = read_stdlib_source()
    offsets = random.Random(run.seed)
    budget: Any = None
    if run.budget_bytes is not None:
        from torchdelta import Config, MemoryBudget

        budget = MemoryBudget(run.budget_bytes, Config(policy=run.policy))

    # All allocations and frees happen inside a segment of the meter, also those of the budget.
    meter = AllocatorPeak()
    with meter:
        model = GPT2LMHeadModel(
            GPT2Config(
                vocab_size=256,
                n_positions=run.sequence,
                n_embd=run.width,
                n_layer=run.layers,
                n_head=run.heads,
                use_cache=False,
                bos_token_id=0,
                eos_token_id=0,
            )
        ).train()
        # Without a warm-up, a larger learning rate makes a fresh model diverge.
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-5)
    steps: list[DemoStep] = []
    for index in range(run.steps):
        with meter:
            if index == 0 and budget is not None:
                budget.start()
            started_s = time.perf_counter()
            batch = _read_batch(text, offsets, run)
            loss = model(input_ids=batch, labels=batch).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            loss_value = loss.item()
            del batch, loss
            time_s = time.perf_counter() - started_s
            if index == run.steps - 1 and budget is not None:
                budget.stop()
        steps.append(DemoStep(index=index, loss=loss_value, loss_hex=loss_value.hex(), time_s=time_s))
        report(steps[-1])
    meter.check_live(_storage_bytes(_tensors_held(model, optimizer)))
    return DemoResult(
        budget_bytes=run.budget_bytes,
        peak_bytes=meter.peak_bytes,
        rss_peak_bytes=_rss_peak_bytes(),
        num_parameters=sum(parameter.numel() for parameter in model.parameters()),
        parameters_sha256=_hash_of(list(model.parameters())),
        rng_sha256=_hash_of([torch.get_rng_state()]),
        steps=tuple(steps),
        summary=None if budget is None else budget.summary().as_dict(),
    )


def read_stdlib_source(limit_bytes: int = 2**22) -> bytes:
    """Return the source of Python's standard library: its top-level modules, sorted by name."""
    parts: list[bytes] = []
    num_bytes = 0
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        parts.append(path.read_bytes())
        num_bytes += len(parts[-1])
        if num_bytes >= limit_bytes:
            break
    return b"".join(parts)


def _read_batch(text: bytes, offsets: random.Random, run: DemoRun) -> torch.Tensor:
    """Return windows of the text at random offsets; each byte is a token."""
    windows: list[list[int]] = []
    for _ in range(run.batch):
        offset = offsets.randrange(len(text) - run.sequence)
        windows.append(list(text[offset : offset + run.sequence]))
    return torch.tensor(windows, dtype=torch.int64)


def _tensors_held(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    held = [*model.parameters(), *model.buffers()]
    held += [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    for state in optimizer.state.values():
        held += [value for value in state.values() if isinstance(value, torch.Tensor)]
    return held


def _storage_bytes(tensors: list[torch.Tensor]) -> int:
    """Return the bytes of the tensors' distinct storages."""
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


def _hash_of(tensors: list[torch.Tensor]) -> str:
    """Return one hash of the tensors' bits, including -0.0 and NaN payloads."""
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _rss_peak_bytes() -> int:
    """Return the high-water mark of resident memory of this process alone."""
    try:
        # exec resets VmHWM; the figure of getrusage would include the parent's memory before the exec.
        for line in Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    unit_bytes = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit_bytes


if __name__ == "__main__":
    main()
