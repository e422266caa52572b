"""transformers' Trainer with MemoryBudgetCallback: the same losses and parameters as plain, bit for bit."""

from __future__ import annotations

import gc
import logging
import shutil
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest
import torch
from transformers import Trainer, TrainerCallback

from tests.integrations.holding import held_bytes, share_of_peak
from tests.integrations.trainers import (
    SHARE,
    Run,
    arguments,
    assert_same,
    assert_under_pressure,
    finished,
    tiny_llama,
    token_data,
)
from tests.native.without import but_of_absence
from torchdelta import BudgetError, MemoryBudget
from torchdelta.errors import SizeError
from torchdelta.integrations.transformers import MemoryBudgetCallback
from torchdelta.notices import warn_once

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = pytest.mark.usefixtures("no_budget_is_left")

FIGURES = {f"torchdelta/{name}" for name in ("peak_gib", "slowdown", "stall_ms", "recompute_ms", "swapped_gib")}

# Options of TrainingArguments, and the share of the plain peak that the budget is.
VARIANTS: dict[str, tuple[dict[str, Any], float]] = {
    "accumulation and clipping": (
        {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 4, "max_grad_norm": 0.1},
        0.7,  # gradients stay beside the second micro-batch
    ),
    "bf16": ({"bf16": True}, SHARE),
    "defaults": ({}, SHARE),
    "label smoothing": ({"label_smoothing_factor": 0.1}, SHARE),
    "evaluation and saving": (
        {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 2},
        SHARE,
    ),
    "exponential average": ({}, SHARE),
    # Most of what is left there is one layer, which checkpoint computes again in a piece.
    "every second layer checkpointed": (
        {"activation_checkpointing": True, "activation_checkpointing_kwargs": {"every_n_layers": 2}},
        0.8,
    ),
}


class Average(TrainerCallback):
    """Keeps an exponential average of the weights, as users do it."""

    def on_train_begin(self, _args, _state, _control, model=None, **_kwargs):
        decay = torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
        self.average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=decay)

    def on_step_end(self, _args, _state, _control, model=None, **_kwargs):
        self.average.update_parameters(model)


class FailOnce(TrainerCallback):
    """Raises in the middle of the first training."""

    def __init__(self) -> None:
        self.has_failed = False

    def on_step_end(self, _args, state, _control, **_kwargs):
        if state.global_step == 2 and not self.has_failed:
            self.has_failed = True
            raise ConnectionError("the disk of the data is away")


def budget_of(trainer: Trainer) -> MemoryBudget | None:
    """Return the budget of the latest training; None if it was plain."""
    callbacks = trainer.callback_handler.callbacks
    return next((each.budget for each in callbacks if isinstance(each, MemoryBudgetCallback)), None)


class OffloadWithoutPinning(torch.autograd.graph.saved_tensors_hooks):
    """torch's `save_on_cpu` as transformers calls it, without pinned memory: that needs a GPU."""

    def __init__(self, *, pin_memory: bool, device_type: str) -> None:
        assert pin_memory
        assert device_type == "cpu"
        super().__init__(lambda tensor: torch.empty_like(tensor).copy_(tensor), lambda packed: packed)


@pytest.fixture
def _offload(monkeypatch):
    """Let transformers' own offload run on CPU."""
    monkeypatch.setattr("transformers.modeling_utils.save_on_cpu", OffloadWithoutPinning)


@dataclass
class Training:
    """One way to train the tiny model."""

    directory: Path
    options: dict[str, Any] = field(default_factory=dict)
    others: Callable[[], list[TrainerCallback]] = list  # makes further callbacks

    def trainer(self, limit: int | str | None) -> Trainer:
        """Return a trainer; `limit` None is plain."""
        gc.collect()  # the trainer before this one is full of circles, and its tensors would count
        return Trainer(
            tiny_llama(),
            arguments(self.directory, **self.options),
            train_dataset=token_data(),
            eval_dataset=token_data(8, seed=2),
            callbacks=[*self.others(), *([MemoryBudgetCallback(limit)] if limit is not None else [])],
        )

    def run(self, limit: int | str | None = None, *, resume: str | None = None) -> Run:
        """Train."""
        trainer = self.trainer(limit)
        trainer.train(resume_from_checkpoint=resume)
        averages = [each.average for each in trainer.callback_handler.callbacks if isinstance(each, Average)]
        return finished(trainer, *averages)

    def limit(self, share: float = SHARE) -> int:
        """Return a share of the bytes that the training takes where everything fits."""
        held = held_bytes()
        return share_of_peak(self.run("1TiB").peak_bytes, share, held)


@pytest.mark.parametrize(
    "variant", [pytest.param(name, marks=[] if index < 2 else pytest.mark.rest) for index, name in enumerate(VARIANTS)]
)
def test_same_bits(variant, tmp_path):
    """Each way to train gives plain's losses, gradient norms and parameters in 60 to 80 % of its memory."""
    options, share = VARIANTS[variant]
    training = Training(tmp_path, options, (lambda: [Average()]) if "average" in variant else list)
    limit = training.limit(share)
    plain = training.run()
    budgeted = training.run(limit)
    assert_same(plain, budgeted)
    # What a bf16 matmul allocates inside itself is not known before its first run.
    assert_under_pressure(budgeted, limit, from_step=1 if "bf16" in variant else 0)


@pytest.mark.rest
def test_resuming(tmp_path):
    """A training that is resumed from its checkpoint ends as one that was never interrupted."""
    training = Training(tmp_path, {"max_steps": 4, "save_strategy": "steps", "save_steps": 2})
    limit = training.limit()
    plain = training.run()
    shutil.rmtree(tmp_path / "checkpoint-2")
    training.run(limit)
    resumed = training.run(limit, resume=str(tmp_path / "checkpoint-2"))
    assert_same(plain, resumed)
    assert_under_pressure(resumed, limit)


def test_figures_are_in_the_logs(tmp_path):
    """Each training log has the figures of its steps, the last one those of the training, an evaluation's none."""
    training = Training(tmp_path, {"eval_strategy": "steps", "eval_steps": 2, "gradient_accumulation_steps": 2})
    limit = training.limit()
    run = training.run(limit)
    for log in run.history:
        assert log.keys() & FIGURES == (set() if "eval_loss" in log else FIGURES)
    steps, whole = [log for log in run.history if "loss" in log], run.history[-1]
    assert whole["torchdelta/peak_gib"] == max(log["torchdelta/peak_gib"] for log in steps)
    assert 0 < whole["torchdelta/peak_gib"] <= limit / 2**30 + 1e-6
    assert whole["torchdelta/slowdown"] >= 1
    for name in ("stall_ms", "recompute_ms", "swapped_gib"):
        mean = sum(log[f"torchdelta/{name}"] for log in steps) / len(steps)
        assert whole[f"torchdelta/{name}"] == pytest.approx(mean, abs=2e-6)
    assert whole["torchdelta/swapped_gib"] * 3 == pytest.approx(run.summary.swapped_out_bytes / 2**30, abs=2e-6)


@pytest.mark.rest
def test_figures_reach_tensorboard(tmp_path):
    """TensorBoard's callback, which the Trainer puts before those of the user, writes the figures."""
    event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    for is_late in (False, True):
        log_dir = tmp_path / f"{is_late}"
        training = Training(log_dir, {"report_to": "tensorboard", "max_steps": 2})
        trainer = training.trainer(None if is_late else "1TiB")
        if is_late:
            trainer.add_callback(MemoryBudgetCallback("1TiB"))
        trainer.train()
        (file,) = log_dir.rglob("events.out.tfevents.*")
        events = event_accumulator.EventAccumulator(str(file))
        events.Reload()
        assert {f"train/{name}" for name in FIGURES} <= set(events.Tags()["scalars"])
        assert len(events.Scalars("train/torchdelta/peak_gib")) == 2 + 1


@pytest.mark.rest
def test_training_again_after_an_exception(tmp_path):
    """The budget ends with it; the next `train()` starts one of its own, and is bit-equal."""
    training = Training(tmp_path, others=lambda: [FailOnce()])
    runs = []
    limit = Training(tmp_path).limit()
    for trainer in (training.trainer(None), training.trainer(limit)):
        with pytest.raises(ConnectionError):
            trainer.train()
        assert MemoryBudget.current() is None
        trainer.train()
        runs.append(finished(trainer))
    assert_same(*runs)
    assert_under_pressure(runs[1], limit)


@pytest.mark.rest
def test_another_trainer_after_an_exception(tmp_path):
    """It is made outside of the first one's budget, which its model would not fit into."""
    held = torch.zeros(2**20)
    with pytest.raises(BudgetError):
        Training(tmp_path).run("1MiB")
    assert MemoryBudget.current() is None
    other = Training(tmp_path).run("2TiB")
    assert other.summary.budget_bytes == 2 * 2**40
    del held


@pytest.mark.rest
def test_a_budget_outside_of_the_trainer_survives_its_exception(tmp_path):
    """`with MemoryBudget(...)` around a training that fails goes on."""
    with MemoryBudget("1TiB") as budget:
        with pytest.raises(ConnectionError):
            Training(tmp_path, others=lambda: [FailOnce()]).trainer("1GiB").train()
        assert MemoryBudget.current() is budget


def test_stop_after_an_exception(tmp_path):
    """`stop()` does nothing if the budget does not run any more."""
    trainer = Training(tmp_path, others=lambda: [FailOnce()]).trainer("1TiB")
    with pytest.raises(ConnectionError):
        trainer.train()
    callback = next(each for each in trainer.callback_handler.callbacks if isinstance(each, MemoryBudgetCallback))
    assert MemoryBudget.current() is None
    callback.stop()


@pytest.mark.rest
def test_a_trainer_inside_of_a_trainer(tmp_path):
    """A training between two steps has its own budget; the outer one goes on with its own."""

    class TrainInside(TrainerCallback):
        def on_step_end(self, _args, state, _control, **_kwargs):
            if state.global_step == 1:
                random_state = torch.get_rng_state()
                Training(tmp_path).run("1TiB")
                torch.set_rng_state(random_state)

    training = Training(tmp_path)
    limit = training.limit()
    plain = training.run()
    budgeted = Training(tmp_path, others=lambda: [TrainInside()]).run(limit)
    assert_same(plain, budgeted)
    assert_under_pressure(budgeted, limit)
    assert len(budgeted.summary.steps) == 2  # those after the inner training


@pytest.mark.rest
def test_a_budget_that_runs_already(tmp_path, caplog):
    """A budget around `train()` is used, logged once, and runs on after the training."""
    training = Training(tmp_path)
    limit = training.limit()
    plain = training.run()
    caplog.set_level(logging.INFO, "torchdelta")
    with MemoryBudget(limit) as budget:
        run = training.run("2TiB")
        assert MemoryBudget.current() is budget
    assert len([r for r in caplog.records if "runs already" in r.message and "'2TiB'" in r.message]) == 1
    assert_same(plain, run)
    assert_under_pressure(run, limit)
    assert all(log.keys() >= FIGURES for log in run.history)


@pytest.mark.rest
def test_a_budget_without_a_callback(tmp_path):
    """`with MemoryBudget(...): trainer.train()` is enough."""
    training = Training(tmp_path)
    limit = training.limit()
    plain = training.run()
    with MemoryBudget(limit) as budget:
        run = training.run()
    assert_same(plain, run)
    assert budget.summary().peak_bytes <= limit
    assert len(budget.summary().steps) == 3


@pytest.mark.rest
def test_auto_find_batch_size(tmp_path):
    """The Trainer takes BudgetError for out of memory and tries smaller batches until one fits."""
    attempts: list[list[tuple[int, int]]] = []  # (batch size, step) of each step that began

    class Watch(TrainerCallback):
        def on_train_begin(self, *_args, **_kwargs):
            attempts.append([])

        def on_step_begin(self, _args, state, _control, **_kwargs):
            attempts[-1].append((state.train_batch_size, state.global_step))

    class Fail(TrainerCallback):
        def on_step_begin(self, _args, state, _control, **_kwargs):
            if (state.train_batch_size, state.global_step) in failed:
                raise torch.OutOfMemoryError("CUDA out of memory.")

    options = {"auto_find_batch_size": True, "per_device_train_batch_size": 16}
    limit = Training(tmp_path, options).limit(0.25)
    budgeted = Training(tmp_path, options, lambda: [Watch()]).run(limit)
    failed = [steps[-1] for steps in attempts[:-1]]
    assert failed
    assert attempts[-1][-1][0] < 16
    assert_under_pressure(budgeted, limit)
    assert_same(Training(tmp_path, options, lambda: [Fail()]).run(), budgeted)


@pytest.mark.rest
def test_an_impossible_budget(tmp_path):
    """`train()` raises BudgetError with the least budget, and that budget is enough."""
    training = Training(tmp_path)
    plain = training.run()
    with pytest.raises(BudgetError) as caught:
        training.run(held_bytes() + 2**20)
    least_bytes = caught.value.least_budget_bytes
    del caught  # its traceback keeps the model alive
    assert_same(plain, training.run(least_bytes))


class Recorder(Trainer):
    """Reads its losses as arrays of numpy, which cannot be had of a step that does not fit."""

    def compute_loss(self, *args, **kwargs):
        loss = super().compute_loss(*args, **kwargs)
        loss.detach().numpy()
        return loss


def test_what_a_step_that_does_not_fit_makes_a_program_raise_is_told_as_its_budget_error(tmp_path):
    """Torch's words about a tensor without content come with it, but they would not say what is wrong."""
    limit = held_bytes() + 2**20
    callback = MemoryBudgetCallback(limit)
    trainer = Recorder(tiny_llama(), arguments(tmp_path), train_dataset=token_data(), callbacks=[callback])
    with pytest.raises(BudgetError, match="needs at least") as caught:
        trainer.train()
    assert "numpy()" in str(caught.value.__cause__)
    assert MemoryBudget.current() is None


def test_auto_find_batch_size_with_a_program_that_such_a_step_makes_raise(tmp_path):
    """The search for a batch size gets the BudgetError, too, and goes on with a smaller batch."""
    options = {"auto_find_batch_size": True, "per_device_train_batch_size": 16, "max_steps": 1}
    limit = Training(tmp_path, options).limit(0.15)
    callback = MemoryBudgetCallback(limit)
    trainer = Recorder(tiny_llama(), arguments(tmp_path, **options), train_dataset=token_data(), callbacks=[callback])
    trainer.train()
    assert trainer.state.train_batch_size < 16
    assert callback.budget.summary().peak_bytes <= limit
    assert MemoryBudget.current() is None


@pytest.mark.parametrize("limit", [8.0, "8 potatoes", "80", -1, "0%"])
def test_a_limit_that_cannot_be_parsed(limit):
    """It is refused when the callback is made."""
    with pytest.raises(SizeError, match="memory budget"):
        MemoryBudgetCallback(limit)


@pytest.mark.rest
@pytest.mark.usefixtures("_offload")
@pytest.mark.parametrize(("every_n_layers", "share"), [(1, 1.2), (2, 0.85)])
def test_offload_of_transformers_beside_the_budget(every_n_layers, share, tmp_path):
    """Its copies stay where it puts them, and what else is saved leaves: plain's bits, under the budget.

    Where it takes all layers, nothing else is saved: such a budget has to be as large as what it needs by itself.
    """
    options = {"every_n_layers": every_n_layers, "offload": True}
    training = Training(tmp_path, {"activation_checkpointing": True, "activation_checkpointing_kwargs": options})
    limit = training.limit(share)  # on CPU its copies count, too
    plain = training.run()
    budgeted = training.run(limit)
    assert_same(plain, budgeted)
    assert budgeted.peak_bytes <= limit
    if share < 1:
        assert_under_pressure(budgeted, limit)


@pytest.mark.rest
@pytest.mark.usefixtures("_offload")
@pytest.mark.parametrize(
    ("kwargs", "said"),
    [
        (None, "activation_checkpointing=True takes effect in all layers"),
        ({"every_n_layers": 2}, "activation_checkpointing=True takes effect in all of its layers"),
        ({"offload": True}, 'activation_checkpointing_kwargs={"offload": True} takes effect in all layers'),
    ],
)
def test_checkpointing_beside_the_budget_is_said_once(kwargs, said, tmp_path, caplog):
    """One warning names the option that is better left out; without it there is none."""
    warn_once.cache_clear()
    for _ in range(2):
        options = {"activation_checkpointing": True, "activation_checkpointing_kwargs": kwargs}
        Training(tmp_path, options).run("1TiB")
    (message,) = but_of_absence(caplog.messages)
    assert said in message
    caplog.clear()
    Training(tmp_path).run("1TiB")
    assert not caplog.records
