"""Training below parameters + gradients + optimizer states, in the decision class "all"."""

from __future__ import annotations

import contextlib
import functools
import io
import warnings
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.same_bits.judge import bits_of
from tests.sampling import keep
from torchdelta import BudgetError, Config, MemoryBudget
from torchdelta._torch.list_functions import patch_list_functions

if TYPE_CHECKING:
    from collections.abc import Callable

NUM_STEPS = 4
VOCABULARY = 600


def gpt2() -> torch.nn.Module:
    """Return a small GPT-2 with random weights."""
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_positions=32, n_embd=96, n_layer=4, n_head=4, bos_token_id=0, eos_token_id=0
    )
    return transformers.GPT2LMHeadModel(config)


def bert() -> torch.nn.Module:
    """Return a small BERT with random weights."""
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=96,
        num_hidden_layers=4,
        num_attention_heads=4,
        intermediate_size=384,
        max_position_embeddings=32,
    )
    return transformers.BertForMaskedLM(config)


def vit() -> torch.nn.Module:
    """Return a small ViT with random weights."""
    transformers = pytest.importorskip("transformers")
    config = transformers.ViTConfig(
        hidden_size=96,
        num_hidden_layers=4,
        num_attention_heads=4,
        intermediate_size=384,
        image_size=32,
        patch_size=8,
        num_labels=10,
    )
    return transformers.ViTForImageClassification(config)


def convnext() -> torch.nn.Module:
    """Return a small ConvNeXt with random weights."""
    transformers = pytest.importorskip("transformers")
    config = transformers.ConvNextConfig(
        hidden_sizes=[64, 64, 128, 128], depths=[1, 1, 6, 2], image_size=32, num_labels=10
    )
    return transformers.ConvNextForImageClassification(config)


def batch_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return a random batch for a model."""
    if type(model).__name__.endswith("ForImageClassification"):
        return {"pixel_values": torch.randn(2, 3, 32, 32), "labels": torch.randint(0, 10, (2,))}
    ids = torch.randint(0, VOCABULARY, (2, 16))
    return {"input_ids": ids, "labels": ids}


def parameter_bytes(model: torch.nn.Module) -> int:
    """Return the bytes of all parameters."""
    return sum(parameter.nbytes for parameter in model.parameters())


def train(
    make: Callable[[], torch.nn.Module],
    optimizer_of: Callable[[Any], torch.optim.Optimizer],
    scope_of: Callable[[int], contextlib.AbstractContextManager[Any]],
    *,
    saves: bool = False,
) -> tuple[dict[str, Any], contextlib.AbstractContextManager[Any]]:
    """Train a model in a scope that is chosen by the bytes of its parameters. Return all that can be observed."""
    torch.manual_seed(0)
    model = make()
    optimizer = optimizer_of(model.parameters())
    scope = scope_of(parameter_bytes(model))
    losses: list[float] = []
    checkpoint = b""
    with scope:
        for step in range(NUM_STEPS):
            loss = model(**batch_of(model)).loss
            losses.append(loss.item())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if saves and step == 1:
                file = io.BytesIO()
                torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
                checkpoint = file.getvalue()
    observed = {
        "losses": losses,
        "model": bits_of(model.state_dict()),
        "optimizer": bits_of(list(optimizer.state_dict()["state"].values())),
        "checkpoint": checkpoint,
    }
    return observed, scope


def adamw(parameters: Any) -> torch.optim.Optimizer:
    """Return AdamW, one parameter at a time."""
    return torch.optim.AdamW(parameters, lr=1e-3, foreach=False)


def adam(parameters: Any) -> torch.optim.Optimizer:
    """Return Adam, one parameter at a time."""
    return torch.optim.Adam(parameters, lr=1e-3, foreach=False)


def plain_scope(_size_bytes: int) -> contextlib.AbstractContextManager[Any]:
    """Return no scope."""
    return contextlib.nullcontext()


@pytest.mark.parametrize("tier", ["memory", "disk"])
@pytest.mark.parametrize(
    ("make", "optimizer_of"),
    keep([(gpt2, adamw), (bert, adam), (vit, adamw), (bert, adamw), (convnext, adamw)], [(bert, adam), (vit, adamw)]),
)
def test_training_below_what_persists(make: Any, optimizer_of: Any, tier: Any) -> None:
    """A training fits into half of what parameters, gradients and states take together, with equal bits."""
    if (tier, make) == ("disk", bert):
        pytest.skip("the other models cover the disk")
    plain, _ = train(make, optimizer_of, plain_scope)

    def scope_of(size_bytes: int) -> MemoryBudget:
        return MemoryBudget(2 * size_bytes, Config(decision_class="all", tier=tier))

    observed, scope = train(make, optimizer_of, scope_of)
    assert observed == plain
    assert isinstance(scope, MemoryBudget)
    summary = scope.summary()
    assert len(summary.steps) == NUM_STEPS
    assert all(step.peak_bytes <= scope.budget_bytes for step in summary.steps[1:])
    assert max(step.peak_bytes for step in summary.steps) > 0.9 * scope.budget_bytes  # the measure is alive
    assert summary.peak_bytes == max(step.peak_bytes for step in summary.steps)  # not that of the scope's end


@pytest.mark.parametrize("optimizer_of", [adamw, adam])
def test_a_checkpoint_below_what_persists(optimizer_of: Any) -> None:
    """A checkpoint that is saved inside such a scope equals plain's to the byte, can be loaded, and costs no room."""
    plain, _ = train(gpt2, optimizer_of, plain_scope, saves=True)

    def scope_of(size_bytes: int) -> MemoryBudget:
        return MemoryBudget(2 * size_bytes, Config(decision_class="all"))

    observed, scope = train(gpt2, optimizer_of, scope_of, saves=True)
    assert plain["checkpoint"]
    assert observed["checkpoint"] == plain["checkpoint"]
    assert observed == plain
    assert isinstance(scope, MemoryBudget)
    assert all(step.peak_bytes <= scope.budget_bytes for step in scope.summary().steps[1:])
    loaded = torch.load(io.BytesIO(observed["checkpoint"]))
    model = gpt2()
    model.load_state_dict(loaded["model"])
    states = [state for of_parameter in loaded["optimizer"]["state"].values() for state in of_parameter.values()]
    persistent_bytes = 2 * parameter_bytes(model) + sum(state.nbytes for state in states)  # with the gradients
    assert persistent_bytes > 1.9 * scope.budget_bytes


LIST_OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw foreach": lambda parameters: torch.optim.AdamW(parameters, foreach=True, amsgrad=True),
    "adamw fused": lambda parameters: torch.optim.AdamW(parameters, fused=True),
    "adam fused": lambda parameters: torch.optim.Adam(parameters, fused=True, amsgrad=True),
    "sgd foreach": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, nesterov=True, foreach=True),
    "sgd fused": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.1, fused=True),
    "nadam foreach": lambda parameters: torch.optim.NAdam(parameters, foreach=True),
    "radam foreach": lambda parameters: torch.optim.RAdam(parameters, foreach=True),
    "rmsprop foreach": lambda parameters: torch.optim.RMSprop(parameters, momentum=0.9, centered=True, foreach=True),
    "adamax foreach": lambda parameters: torch.optim.Adamax(parameters, foreach=True),
    "adadelta foreach": lambda parameters: torch.optim.Adadelta(parameters, foreach=True),
    "asgd foreach": lambda parameters: torch.optim.ASGD(parameters, foreach=True),
    "rprop foreach": lambda parameters: torch.optim.Rprop(parameters, foreach=True),
    "adagrad fused": lambda parameters: torch.optim.Adagrad(parameters, fused=True),
    "adafactor foreach": lambda parameters: torch.optim.Adafactor(parameters, foreach=True),
}


@pytest.mark.parametrize(
    "name", keep(list(LIST_OPTIMIZERS), ["adamw foreach", "adamw fused", "sgd foreach", "nadam foreach"])
)
def test_optimizers_that_take_lists_run_in_pieces(name: str) -> None:
    """They need not have everything here at once, and compute what they do as a whole."""
    plain, _ = train(gpt2, LIST_OPTIMIZERS[name], plain_scope)
    lengths: list[int] = []

    def note(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def update(parameters: Any, *args: Any, **kwargs: Any) -> Any:
            if parameters[0].device.type != "meta":  # as where a first step is tried
                lengths.append(len(parameters))
            return original(parameters, *args, **kwargs)

        return update

    def scope_of(size_bytes: int) -> MemoryBudget:
        return MemoryBudget(int(1.9 * size_bytes), Config(decision_class="all"))

    undo = patch_list_functions(note)  # below the scope's own patch
    try:
        observed, scope = train(gpt2, LIST_OPTIMIZERS[name], scope_of)
    finally:
        undo()
    assert observed == plain
    assert len(lengths) > 4 * NUM_STEPS
    assert sum(lengths) == NUM_STEPS * len(list(gpt2().parameters()))
    assert isinstance(scope, MemoryBudget)
    assert all(step.peak_bytes <= scope.budget_bytes for step in scope.summary().steps[1:])


def test_list_ops_run_in_pieces() -> None:
    """So do list ops outside of optimizers: clipping by norm, and an average of parameters."""

    def run(scope_of: Callable[[int], contextlib.AbstractContextManager[Any]]) -> dict[str, Any]:
        torch.manual_seed(0)
        model = gpt2()
        parameters = list(model.parameters())
        optimizer = torch.optim.AdamW(parameters, fused=True)
        average = torch.optim.swa_utils.AveragedModel(
            model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
        )
        norms: list[float] = []
        with scope_of(parameter_bytes(model)) as scope:
            for _ in range(NUM_STEPS):
                model(**batch_of(model)).loss.backward()
                norms.append(torch.nn.utils.clip_grad_norm_(parameters, 0.1, foreach=True).item())
                optimizer.step()
                optimizer.zero_grad()
                average.update_parameters(model)
        if isinstance(scope, MemoryBudget):
            assert all(step.peak_bytes <= scope.budget_bytes for step in scope.summary().steps[1:])
        return {"norms": norms, "model": bits_of(model.state_dict()), "average": bits_of(average.state_dict())}

    # The average is one more copy of the parameters.
    assert run(lambda size_bytes: MemoryBudget(2 * size_bytes, Config(decision_class="all"))) == run(plain_scope)


@pytest.mark.parametrize("optimizer_of", [adamw, LIST_OPTIMIZERS["adamw fused"]])
def test_a_training_goes_on_below_what_is_there_already(optimizer_of: Any) -> None:
    """Parameters and optimizer states alone pass the budget when the scope begins, before any op has read them."""

    def run(scope_of: Callable[[int], contextlib.AbstractContextManager[Any]]) -> dict[str, Any]:
        torch.manual_seed(0)
        model = gpt2()
        optimizer = optimizer_of(model.parameters())
        scope = scope_of(parameter_bytes(model))
        for step in range(NUM_STEPS):
            if step == 1:
                scope.__enter__()
            model(**batch_of(model)).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        scope.__exit__(None, None, None)
        if isinstance(scope, MemoryBudget):
            assert all(step.peak_bytes <= scope.budget_bytes for step in scope.summary().steps[1:])
        return {"model": bits_of(model.state_dict()), "optimizer": bits_of(optimizer.state_dict()["state"])}

    assert run(lambda size_bytes: MemoryBudget(2 * size_bytes, Config(decision_class="all"))) == run(plain_scope)


def test_what_nobody_owns_does_not_pass_the_budget() -> None:
    """The negative control: before any parameter is known, small ops are not let through without a limit."""
    kept: list[torch.Tensor] = []
    with pytest.raises(BudgetError), MemoryBudget("16MiB", Config(decision_class="all")):
        kept += [torch.ones(2**18) for _ in range(40)]


def test_an_optimizer_whose_parameters_are_not_alike() -> None:
    """Adafactor takes a default from the first dtype; a parameter that is there twice is updated twice."""

    def run(kind: str, scope_of: Callable[[int], contextlib.AbstractContextManager[Any]]) -> bytes:
        torch.manual_seed(0)
        parameters = [torch.nn.Parameter(torch.randn(32, 32)) for _ in range(6)]
        with warnings.catch_warnings(action="ignore"):
            if kind == "mixed":
                mixed = [p if place % 2 else torch.nn.Parameter(p.bfloat16()) for place, p in enumerate(parameters)]
                parameters = [each.detach().requires_grad_() for each in mixed]
                optimizer: torch.optim.Optimizer = torch.optim.Adafactor(parameters, foreach=True)
            else:
                optimizer = torch.optim.Adam([*parameters, parameters[0]], foreach=True)
        with scope_of(sum(parameter.nbytes for parameter in parameters)):
            for _ in range(3):
                sum(parameter.float().square().sum() for parameter in parameters).backward()  # pyright: ignore[reportAttributeAccessIssue]
                optimizer.step()
                optimizer.zero_grad()
        return bits_of(parameters)

    for kind in ("mixed", "twice"):
        observed = run(kind, lambda size_bytes: MemoryBudget(12 * size_bytes, Config(decision_class="all")))
        assert observed == run(kind, plain_scope)


def test_the_class_saved_cannot() -> None:
    """The negative control: the same budget is impossible where only saved tensors may leave."""
    with pytest.raises(BudgetError):
        train(gpt2, adamw, lambda size_bytes: MemoryBudget(2 * size_bytes))
