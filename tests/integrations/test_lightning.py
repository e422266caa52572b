"""Lightning's Trainer inside a budget: the callback, what it logs, and what ends it."""

from __future__ import annotations

import csv
import gc
import json
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import BatchSizeFinder, Callback
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities.memory import is_oom_error
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.integrations.holding import held_bytes, share_of_peak
from tests.sampling import keep
from torchdelta import BudgetError, Config, MemoryBudget
from torchdelta.errors import ConfigError, SizeError
from torchdelta.host import num_processes_here
from torchdelta.integrations.lightning import MemoryBudgetCallback

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning:lightning.*"),
    pytest.mark.filterwarnings("ignore::FutureWarning:lightning.*"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:lightning.*"),
]
CONFIG = Config(tier="memory")
NUM_BATCHES = 4
ROOMY = 2**40


def samples(batch_size: int) -> DataLoader[Any]:
    """Return a loader of pictures and labels."""
    generator = torch.Generator().manual_seed(7)
    pictures = torch.randn(batch_size * NUM_BATCHES, 3, 32, 32, generator=generator)
    return DataLoader(TensorDataset(pictures, torch.arange(len(pictures)) % 10), batch_size=batch_size, shuffle=True)


class Classifier(LightningModule):
    """A net with batch norm and dropout, trained by automatic optimization, with a validation."""

    def __init__(self, batch_size: int = 16, fails_at: int = -1) -> None:
        super().__init__()
        self.batch_size = batch_size
        self.fails_at = fails_at
        self.losses: list[str] = []
        self.net = nn.Sequential(
            *(nn.Sequential(nn.Conv2d(n, 16, 3, padding=1), nn.BatchNorm2d(16), nn.GELU()) for n in (3, 16, 16, 16)),
            nn.Flatten(),
            nn.Dropout(0.1),
            nn.Linear(16 * 1024, 10),
        )

    def _loss(self, batch: list[torch.Tensor]) -> torch.Tensor:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def training_step(self, batch: list[torch.Tensor], _index: int) -> torch.Tensor:
        if len(self.losses) == self.fails_at:
            raise KeyError("a bug of the user's")
        loss = self._loss(batch)
        self.log("train_loss", loss)
        self.losses.append(loss.item().hex())
        return loss

    def validation_step(self, batch: list[torch.Tensor], _index: int) -> None:
        self.losses.append(self._loss(batch).item().hex())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)

    def train_dataloader(self) -> DataLoader[Any]:
        return samples(self.batch_size)

    def val_dataloader(self) -> DataLoader[Any]:
        return samples(16)


class Recorder(Classifier):
    """Reads its losses as arrays of numpy, which cannot be had of a step that does not fit."""

    def training_step(self, batch: list[torch.Tensor], _index: int) -> torch.Tensor:
        loss = self._loss(batch)
        self.losses.append(loss.detach().numpy().item().hex())
        return loss


class Gan(LightningModule):
    """Two networks that train against each other by manual optimization."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.losses: list[str] = []
        self.maker, self.judge = (
            nn.Sequential(nn.Linear(n, 192), nn.GELU(), nn.Linear(192, 192), nn.GELU(), nn.Linear(192, m))
            for n, m in ((32, 64), (64, 1))
        )

    def training_step(self, batch: list[torch.Tensor], _index: int) -> None:
        for_maker, for_judge = self.optimizers()  # pyright: ignore[reportGeneralTypeIssues]
        (real,) = batch
        made = self.maker(torch.randn(len(real), 32))
        loss = nn.functional.softplus(-self.judge(made)).mean()
        for_maker.zero_grad()
        self.manual_backward(loss)
        for_maker.step()
        self.losses.append(loss.item().hex())
        loss = nn.functional.softplus(self.judge(made.detach())).mean()
        loss = loss + nn.functional.softplus(-self.judge(real)).mean()
        for_judge.zero_grad()
        self.manual_backward(loss)
        for_judge.step()
        self.losses.append(loss.item().hex())

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        return [torch.optim.Adam(net.parameters(), lr=2e-4) for net in (self.maker, self.judge)]

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(TensorDataset(torch.randn(512 * NUM_BATCHES, 64)), batch_size=512)


def make_trainer(*callbacks: Callback, **options: Any) -> Trainer:
    """Make a quiet trainer of one epoch."""
    options = {"max_epochs": 1, "logger": False, "enable_checkpointing": False} | options
    return Trainer(
        accelerator="cpu",
        callbacks=list(callbacks),
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )


def fit(kind: type[Any], *callbacks: Callback, **options: Any) -> Any:
    """Train a model from the same start, and return it."""
    gc.collect()  # tensors of earlier trainers would count
    seed_everything(3, verbose=False)
    model = kind()
    make_trainer(*callbacks, **options).fit(model)
    return model


def assert_equal(model: Any, plain: Any) -> None:
    """Assert that losses, parameters and buffers have the same bits."""
    assert model.losses == plain.losses
    theirs = plain.state_dict()
    assert all(torch.equal(value, theirs[name]) for name, value in model.state_dict().items())


def tight(kind: type[Any], share: float = 0.6, **options: Any) -> MemoryBudgetCallback:
    """Make a callback with a share of the memory that training takes plainly."""
    held = held_bytes()
    roomy = MemoryBudgetCallback(ROOMY, CONFIG)
    fit(kind, roomy, **options)
    assert roomy.budget is not None
    return MemoryBudgetCallback(share_of_peak(roomy.budget.summary().peak_bytes, share, held), CONFIG)


def assert_pressed(callback: MemoryBudgetCallback) -> None:
    """Assert that tensors had to leave, that the budget held, and that it runs no more."""
    assert callback.budget is not None
    summary = callback.budget.summary()
    assert summary.swapped_out_bytes + summary.recomputed_bytes > 0
    assert summary.budget_bytes is not None
    assert summary.peak_bytes <= summary.budget_bytes
    assert MemoryBudget.current() is None


@pytest.mark.parametrize(
    "options",
    keep(
        [{}, {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}, {"precision": "bf16-mixed"}],
        [{"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}],
    ),
)
def test_automatic_optimization_has_the_same_bits(options: dict[str, Any]) -> None:
    """With a validation in inference mode before and after the epoch; accumulated, clipped, in mixed precision."""
    # Without instructions for half precision, the backward of a convolution takes more than a third of the peak itself.
    callback = tight(Classifier, 0.8 if options.get("precision") else 0.7, **options)
    assert_equal(fit(Classifier, callback, **options), fit(Classifier, **options))
    assert_pressed(callback)


def test_manual_optimization_has_the_same_bits() -> None:
    """A GAN: two optimizers step in each batch, and each is a step of the budget."""
    callback = tight(Gan, 0.8)
    assert_equal(fit(Gan, callback), fit(Gan))
    assert_pressed(callback)
    assert callback.budget is not None
    assert len(callback.budget.summary().steps) == 2 * NUM_BATCHES


def test_fit_can_be_called_again() -> None:
    """Each call has a budget of its own, which ends with it; validate() needs none."""
    callback = tight(Classifier, 0.7)
    models = []
    for callbacks in ([callback], []):
        seed_everything(3, verbose=False)
        model = Classifier()
        for _ in range(2):
            trainer = make_trainer(*callbacks)
            trainer.fit(model)
            assert MemoryBudget.current() is None
        trainer.validate(model, verbose=False)
        models.append(model)
    assert_equal(*models)
    assert_pressed(callback)


def test_an_exception_ends_the_budget() -> None:
    """The exception is the user's own, and the callback trains again afterwards."""
    callback = tight(Classifier, 0.7)
    with pytest.raises(KeyError, match="a bug of the user's"):
        fit(lambda: Classifier(fails_at=3), callback)  # pyright: ignore[reportArgumentType]
    assert MemoryBudget.current() is None
    assert_equal(fit(Classifier, callback), fit(Classifier))
    assert_pressed(callback)


def test_an_exception_leaves_the_signal_handlers_as_they_were() -> None:
    """Lightning saves those of the budget when `fit` begins, and puts them back after the budget has ended."""
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyError, match="a bug of the user's"):
        fit(lambda: Classifier(fails_at=3), MemoryBudgetCallback(ROOMY, CONFIG))  # pyright: ignore[reportArgumentType]
    assert signal.getsignal(signal.SIGINT) is before


def test_a_fit_inside_of_a_fit() -> None:
    """A training in a validation has its own budget; the outer one goes on with its own from the next batch on."""
    inner, limits = MemoryBudgetCallback(ROOMY, CONFIG), []

    class FitInside(Callback):
        def on_validation_end(self, trainer: Trainer, pl_module: Any) -> None:
            del pl_module
            if trainer.current_epoch == 0 and inner.budget is None:
                random_state = torch.get_rng_state()
                make_trainer(inner, max_steps=1, limit_val_batches=0).fit(Classifier())
                torch.set_rng_state(random_state)

        def on_train_batch_end(self, *_: Any) -> None:
            running = MemoryBudget.current()
            limits.append(None if running is None else running.budget_bytes)

    options = {"max_epochs": 2, "num_sanity_val_steps": 0}
    callback = tight(Classifier, 0.7, **options)
    assert_equal(fit(Classifier, FitInside(), callback, **options), fit(Classifier, **options))
    assert inner.budget is not None
    assert limits == [callback.limit] * 2 * NUM_BATCHES
    assert_pressed(callback)


def test_a_training_that_ended_without_an_event_is_no_obstacle() -> None:
    """A loop that was left without `teardown` leaves a budget behind, which the next training replaces."""
    left, callback = MemoryBudgetCallback(ROOMY, CONFIG), MemoryBudgetCallback(ROOMY, CONFIG)
    left.setup(make_trainer(), Classifier(), "fit")
    assert MemoryBudget.current() is left.budget
    fit(Classifier, callback)
    assert callback.budget is not left.budget
    assert MemoryBudget.current() is None


def test_a_budget_around_the_trainer_is_used() -> None:
    """A budget that runs already counts, and goes on after `fit`."""
    callback = MemoryBudgetCallback("1kB", CONFIG)
    with MemoryBudget(ROOMY, CONFIG) as budget:
        fit(Classifier, callback)
        assert MemoryBudget.current() is budget
    assert callback.budget is budget


@pytest.mark.rest
def test_an_impossible_budget_is_its_own_error() -> None:
    """`fit` raises BudgetError, which names a budget that is enough."""
    limit, model = 2**20, None
    while model is None:
        callback = MemoryBudgetCallback(limit, CONFIG)
        try:
            model = fit(Classifier, callback)
        except BudgetError as error:
            limit = error.least_budget_bytes  # a lower bound before the first step: Lightning tries a validation then
        assert MemoryBudget.current() is None
    assert_equal(model, fit(Classifier))
    assert_pressed(callback)


def test_what_a_step_that_does_not_fit_makes_a_program_raise_is_told_as_its_budget_error() -> None:
    """Torch's words about a tensor without content come with it, but they would not say what is wrong."""
    options = {"num_sanity_val_steps": 0}
    callback = tight(Recorder, 0.3, **options)
    with pytest.raises(BudgetError, match="needs at least") as caught:
        fit(Recorder, callback, **options)
    assert "numpy()" in str(caught.value.__cause__)
    assert MemoryBudget.current() is None


def test_a_limit_that_is_no_size_is_refused_at_once() -> None:
    """Before any training."""
    with pytest.raises(SizeError, match="memory budget"):
        MemoryBudgetCallback("8 potatoes")
    MemoryBudgetCallback("auto")
    MemoryBudgetCallback("80%")


@pytest.mark.parametrize("config", [{"tier": "memory"}, "memory"])
def test_a_config_that_is_none_is_refused_at_once(config: Any) -> None:
    """Before any training, with what to write instead."""
    with pytest.raises(ConfigError, match=r"is not a torchdelta\.Config: use Config\(tier='memory'\)"):
        MemoryBudgetCallback("8GiB", config)


def test_figures_are_logged(tmp_path: Path) -> None:
    """The logger gets them in the rows of Lightning's own metrics, and the rest at the end."""
    callback = tight(Classifier, 0.7)
    logger = CSVLogger(tmp_path, flush_logs_every_n_steps=1)
    options = {"logger": logger, "log_every_n_steps": 3, "limit_val_batches": 0}
    assert_equal(fit(Classifier, callback, **options), fit(Classifier, limit_val_batches=0))
    with (Path(logger.log_dir) / "metrics.csv").open() as file:
        rows = [{name: float(value) for name, value in row.items() if value} for row in csv.DictReader(file)]
    figures = [row for row in rows if "torchdelta/peak_gib" in row]
    assert [row["step"] for row in figures] == [2, NUM_BATCHES - 1]
    assert callback.budget is not None
    summary = callback.budget.summary()
    for row in figures:
        assert 0 < row["torchdelta/peak_gib"] <= summary.peak_bytes / 2**30 + 1e-6
        assert row["torchdelta/slowdown"] > 1
        assert row["torchdelta/stall_ms"] >= 0
    moved = sum(row["torchdelta/swapped_gib"] + row["torchdelta/recompute_ms"] for row in figures)
    assert moved > 0
    assert [row["step"] for row in rows if "train_loss" in row] == [2]


@pytest.mark.parametrize("mode", keep(["power", "binsearch"], ["power"], 0))
def test_the_batch_size_finder_ends_at_a_batch_that_fits(mode: str, tmp_path: Path) -> None:
    """BudgetError is out of memory in its eyes: it shrinks the batch, and `fit` goes on with it inside the budget."""
    roomy = MemoryBudgetCallback(ROOMY, CONFIG)
    fit(Classifier, roomy)
    assert roomy.budget is not None
    budget_bytes = roomy.budget.summary().peak_bytes  # a batch of 16 fits without any eviction
    callback = MemoryBudgetCallback(budget_bytes, CONFIG)
    finder = BatchSizeFinder(mode=mode, init_val=8, steps_per_trial=2, max_val=4096)
    model = fit(Classifier, finder, callback, default_root_dir=tmp_path)
    assert_pressed(callback)
    assert callback.budget is not None
    assert callback.budget.summary().num_refused_steps > 0  # larger ones were tried
    assert 16 <= model.batch_size < 4096
    assert finder.optimal_batch_size == model.batch_size


def test_lightning_knows_the_error() -> None:
    """Its words for out of memory are in the one argument, on CPU and on CUDA."""
    with pytest.raises(BudgetError) as caught:
        fit(Classifier, MemoryBudgetCallback("1MiB", CONFIG))
    assert MemoryBudget.current() is None
    assert is_oom_error(caught.value)


class Saver(Callback):
    """Writes what each rank has seen into a file, as the ranks end before anybody could ask them."""

    def __init__(self, folder: Path, callback: MemoryBudgetCallback | None) -> None:
        self.folder = folder
        self.callback = callback

    def on_train_end(self, trainer: Trainer, pl_module: Any) -> None:
        """Write."""
        budget = None if self.callback is None else self.callback.budget
        answer = {
            "losses": pl_module.losses,
            "evicted": budget and budget.summary().swapped_out_bytes + budget.summary().recomputed_bytes,
            "peak_bytes": budget and budget.summary().peak_bytes,
            "num_processes": num_processes_here(),
        }
        kind = "plain" if budget is None else "inside"
        (self.folder / f"{kind}{trainer.global_rank}").write_text(json.dumps(answer))


def test_processes_that_lightning_starts_share_what_is_free() -> None:
    """Its own launchers set no LOCAL_WORLD_SIZE. The number is that of this `fit` only."""
    trainer = make_trainer(strategy="ddp_spawn", devices=2)
    callback = MemoryBudgetCallback("auto")
    callback.setup(trainer, Classifier(), "fit")
    assert num_processes_here() == 2
    assert callback.budget is not None
    half_bytes = callback.budget.budget_bytes
    callback.budget.stop()  # by a training inside of this one
    alone = MemoryBudgetCallback("8GiB")
    alone.setup(make_trainer(), Classifier(), "fit")
    alone.teardown(make_trainer(), Classifier(), "fit")
    callback.on_train_batch_start(trainer, Classifier(), None, 0)
    assert num_processes_here() == 2
    callback.teardown(trainer, Classifier(), "fit")
    assert num_processes_here() == 1
    with MemoryBudget("auto") as budget:
        assert half_bytes < 0.7 * budget.budget_bytes


def test_a_trainer_of_the_other_package_is_refused() -> None:
    """Its loop is another one than the callback prepares."""
    other = pytest.importorskip("pytorch_lightning")
    callback = MemoryBudgetCallback("8GiB")
    own: Any = type("Own", (other.Trainer,), {})
    for kind in (other.Trainer, own):
        with pytest.raises(ConfigError, match=r"use `from lightning\.pytorch import Trainer`"):
            callback.setup(kind(accelerator="cpu", logger=False), Classifier(), "fit")
    assert MemoryBudget.current() is None


class Accumulating(Classifier):
    """Accumulates the gradients of two batches by manual optimization."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: list[torch.Tensor], _index: int) -> None:
        optimizer = self.optimizers()
        assert isinstance(optimizer, LightningOptimizer)
        loss = self._loss(batch)
        self.log("train_loss", loss)
        self.manual_backward(loss)
        if _index % 2:
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("kind", [Accumulating, Gan])
def test_manual_optimization_is_logged_with_lightnings_numbers(kind: type[Any], tmp_path: Path) -> None:
    """Lightning counts batches there, however many optimizers step in each."""
    logger = CSVLogger(tmp_path, flush_logs_every_n_steps=1)
    fit(kind, MemoryBudgetCallback(ROOMY, CONFIG), logger=logger, log_every_n_steps=3, limit_val_batches=0)
    with (Path(logger.log_dir) / "metrics.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["torchdelta/peak_gib"]]
    assert [int(row["step"]) for row in rows] == [2, NUM_BATCHES - 1]
    assert all(float(row["torchdelta/peak_gib"]) > 0 for row in rows)


@pytest.mark.rest
@pytest.mark.long
def test_spawned_ranks_have_the_budget(tmp_path: Path) -> None:
    """Two spawned processes: each stays inside the budget with plain's losses, and the host budget is for both."""
    limit = tight(Classifier, 0.75).limit
    options = {"strategy": "ddp_spawn", "devices": 2, "limit_val_batches": 0}
    callback = MemoryBudgetCallback(limit, Config(tier="memory", host_budget="64MiB"))
    fit(Classifier, callback, Saver(tmp_path, callback), **options)
    fit(Classifier, Saver(tmp_path, None), **options)
    for rank in range(2):
        plain, inside = (json.loads((tmp_path / f"{kind}{rank}").read_text()) for kind in ("plain", "inside"))
        assert inside["losses"] == plain["losses"]
        assert len(plain["losses"]) == NUM_BATCHES // 2
        assert inside["evicted"] > 0
        assert inside["peak_bytes"] <= limit
        assert inside["num_processes"] == 2
