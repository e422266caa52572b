"""Every model class that `transformers` exports, tiny, in training mode, with dropout."""

from __future__ import annotations

import contextlib
import copy
import inspect
import re
import time
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from tests.same_bits import judge
from tools.sweep import tiny_configs, training_inputs
from tools.sweep.subjects import AUTOCAST, PLAIN, REPEATED, NotConstructibleError, Subject

if TYPE_CHECKING:
    from collections.abc import Collection

    from tests.same_bits.judge import Scope, Step

MOST_PARAMETERS = 36_000_000
MOST_STEP_S = 5.0
MOST_CHARACTERS = 160
FAMILY = "transformers_classes"
NO_MODEL = "no model: a layer, an output or another part that the library exports"
BASE_CLASS = re.compile("Pre[Tt]rained")
# Those that say least about how to train a class come last: a class is listed under its first task.
GENERIC = ("pretraining", "multimodal_lm", "text_encoding", "backbone", "image", "base")


def subjects() -> list[Subject]:
    """List every class of every auto mapping once, then every other model that the library exports."""
    from transformers.models.auto import modeling_auto

    mappings = {
        "base": modeling_auto.MODEL_MAPPING_NAMES,
        **{
            name.removeprefix("MODEL_FOR_").removesuffix("_MAPPING_NAMES").lower(): mapping
            for name, mapping in vars(modeling_auto).items()
            if name.startswith("MODEL_FOR_") and name.endswith("_MAPPING_NAMES")
        },
    }
    found: dict[str, Subject] = {}
    for task in sorted(mappings, key=lambda task: GENERIC.index(task) if task in GENERIC else -1):
        for model_type, names in mappings[task].items():
            for name in [names] if isinstance(names, str) else names:
                if name is not None and name not in found:
                    found[name] = Subject(family=FAMILY, name=name, group=model_type, task=task)
    for name, package in exported_elsewhere(found.keys()).items():
        found[name] = Subject(family=FAMILY, name=name, group=f"{package}, unmapped", task=task_of(name))
    return list(found.values())


def exported_elsewhere(mapped: Collection[str]) -> dict[str, str]:
    """Name what the library exports from its modeling files beside the mapped classes, with its package.

    Nothing is imported: what turns out to be no model is told so when it is built.
    """
    import transformers

    found: dict[str, str] = {}
    for name, module in sorted(transformers._class_to_module.items()):  # type: ignore[attr-defined]
        *_, package, file = ("", *module.split("."))
        is_model = file.startswith("modeling_") and package != "auto" and not BASE_CLASS.search(name)
        if is_model and name not in mapped and module.startswith("models."):
            found[name] = package
    return found


def task_of(name: str) -> str:
    """Tell a class's task from its name, as the auto mappings call it."""
    task = re.search(r"For([A-Z]\w*)$", name)
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", task[1]).lower() if task else "base"


def build(subject: Subject) -> tuple[dict[str, Step], dict[str, Any]]:
    """Make a class's steps from the first tiny configuration and inputs that train it.

    Raises:
        NotConstructibleError: None does.
    """
    import transformers

    model_class: Any = getattr(transformers, subject.name, None)
    if model_class is None:
        raise NotConstructibleError("transformers does not export it")
    try:  # a class whose packages are missing is a stand-in that raises whatever is asked of it
        config_class = getattr(model_class, "config_class", None)
        if not (inspect.isclass(model_class) and hasattr(model_class, "forward") and config_class is not None):
            raise NotConstructibleError(NO_MODEL)
        config_class.model_type  # noqa: B018
    except ImportError as error:
        raise NotConstructibleError(describe(error)) from None
    reasons: list[str] = []
    for index, sizes in enumerate(tiny_configs.variants()):
        try:
            template, num_parameters = build_model(model_class, sizes)
            inputs = working_inputs(template, subject.task, reasons)
        except ImportError as error:
            raise NotConstructibleError(describe(error)) from None
        except Exception as error:  # noqa: BLE001 - the next sizes may fit
            reasons.append(describe(error))
            continue
        if inputs is not None:
            steps = {
                PLAIN: make_step(template, inputs),
                AUTOCAST: make_step(template, inputs, autocast=True),
                REPEATED: make_repeated_step(template, inputs),
            }
            return steps, {
                "model_type": template.config.model_type,
                "num_parameters": num_parameters,
                "inputs": {name: list(getattr(value, "shape", ())) for name, value in inputs.items()},
                "variant": index,
            }
    raise NotConstructibleError(reasons[0] if reasons else "no configuration to try")


def working_inputs(template: Any, task: str, reasons: list[str]) -> dict[str, Any] | None:
    """Return the first inputs that a model trains on; None where none do, and then the reasons grow."""
    judge.seed_everything()
    for inputs in training_inputs.attempts(template, task):
        state = torch.get_rng_state()
        judge.seed_everything()
        began_s = time.process_time()
        try:
            make_step(template, inputs)(contextlib.nullcontext)
        except Exception as error:  # noqa: BLE001 - the next inputs may fit
            reasons.append(f"{describe(error)} [{', '.join(inputs)}]")
        else:
            time_s = time.process_time() - began_s
            if time_s < MOST_STEP_S:
                return inputs
            reasons.append(f"too slow: a plain step takes more than {MOST_STEP_S:.0f} s of processor time")
        torch.set_rng_state(state)
    return None


def describe(error: Exception) -> str:
    """Say what went wrong in one short line."""
    words = " ".join(str(error).split())
    missing = re.search(r"requires the (\S+) library", words)
    if missing:
        return f"needs {missing[1]}, which is not installed"
    words = words.split(". ")[0][:MOST_CHARACTERS]
    return words if isinstance(error, NotConstructibleError) else f"{type(error).__name__}: {words}"


def build_model(model_class: Any, sizes: Any) -> tuple[Any, int]:
    """Make a tiny model in training mode, with the random weights of the judge's seed."""
    config = tiny_configs.tiny_config(model_class.config_class, sizes)
    for name in ("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id"):
        if tiny_configs.value_of(config, name) is None:
            setattr(config, name, tiny_configs.ALL_SIZES[name])
    with torch.device("meta"):
        num_parameters = sum(parameter.numel() for parameter in model_class(config).parameters())
    if num_parameters > MOST_PARAMETERS:
        raise NotConstructibleError(f"too large: {num_parameters / 1e6:.0f} million parameters")
    judge.seed_everything()
    return model_class(copy.deepcopy(config)).train(), num_parameters


def make_step(template: Any, inputs: dict[str, Any], *, autocast: bool = False) -> Step:
    """Make a training step of a copy of a model."""

    def step(scope: Scope) -> dict[str, Any]:
        return train(copy.deepcopy(template), inputs, scope, autocast=autocast)

    return step


def make_repeated_step(template: Any, inputs: dict[str, Any]) -> Step:
    """Make a training step of one copy of a model, which begins with the same values each time."""
    model = copy.deepcopy(template)

    def step(scope: Scope) -> dict[str, Any]:
        model.zero_grad(set_to_none=True)
        with torch.no_grad():
            for own, value in zip(state_tensors(model), state_tensors(template), strict=True):
                own.copy_(value)
        return train(model, inputs, scope)

    return step


def state_tensors(model: Any) -> list[torch.Tensor]:
    """Return the parameters and buffers of a model."""
    return [*model.parameters(), *model.buffers()]


def train(model: Any, inputs: dict[str, Any], scope: Scope, *, autocast: bool = False) -> dict[str, Any]:
    """Run one training step, and return what can be observed afterwards."""
    fresh = tree_map(lambda value: value.clone() if isinstance(value, torch.Tensor) else value, inputs)
    with scope():
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = loss_of(model(**fresh))
        loss.backward()
    if all(parameter.grad is None for parameter in model.parameters()):
        raise NotConstructibleError("no parameter gets a gradient")
    return judge.state_of(model, loss=loss)


def loss_of(output: Any) -> torch.Tensor:
    """Return the model's own loss, else one that reaches every differentiable output."""
    loss = getattr(output, "loss", None)
    if isinstance(loss, torch.Tensor) and loss.requires_grad:
        return loss.sum()
    tensors = [value for value in tree_leaves(output) if isinstance(value, torch.Tensor) and value.requires_grad]
    terms = [tensor.float().pow(2).mean() for tensor in tensors if tensor.is_floating_point()]
    if not terms:
        raise NotConstructibleError("no output has a gradient")
    return torch.stack(terms).sum()
