"""What is trained when, and what goes wrong there: drawn from a seed, the same in both processes.

An episode is one scope: one model, policy, tier and share of the peak, for a few steps. Models and optimizers live on
from episode to episode, so that a wrong bit would never go away again.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Final

from torchdelta.config import POLICIES, TIERS

# Shares of what the largest batch takes above the models at rest. The U-Net's attention needs much at once.
SHARES: Final = {"gpt": (0.7, 0.6, 0.5), "unet": (0.9, 0.85, 0.8), "conv": (0.7, 0.6, 0.5)}
MODELS: Final = tuple(SHARES)
FAULT_SHARE: Final = 0.3
NUM_STEPS: Final = (8, 14)  # of an episode, at least and at most
NUM_PARTS: Final = (1, 1, 1, 2, 3)  # micro-batches of a step
BATCH_SIZES: Final = (2, 4, 6, 8)
LENGTHS: Final = (1, 2, 3, 4)  # in units of the subject
NUM_SHAPES: Final = 4  # of an episode
EVALUATION_SHARE: Final = 0.2
COLLECTOR_OFF_SHARE: Final = 0.2
# Both processes suffer these: a user's code could cause them.
SHARED_FAULTS: Final = (
    "error in forward",
    "error in backward",
    "error in leaf hook",
    "error in optimizer",
    "interrupt in forward",
    "interrupt in backward",
    "backward never called",
    "graph kept alive",
    "backwards out of order",
)
# Only the process with the budget can suffer these; it repeats the step if it was lost.
OWN_FAULTS: Final = ("tier write", "tier read", "out of memory", "batch too large")


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """One optimizer step, and the fault in it.

    Attributes:
        index: Position in the whole run; it seeds the generators.
        shapes: (batch size, length) of each micro-batch.
        evaluates: Whether a batch is evaluated first.
        fault: What goes wrong, "" for nothing.
        place: A number from which a fault takes its place.
        is_metered: Whether the peak is measured by the profiler too.
    """

    index: int
    shapes: tuple[tuple[int, int], ...]
    evaluates: bool
    fault: str
    place: int
    is_metered: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Episode:
    """One scope."""

    index: int
    model: str
    policy: str
    tier: str
    share: float
    collects: bool
    steps: tuple[Step, ...]


def num_episodes_a_round() -> int:
    """Return after how many episodes every model has met every policy on every tier."""
    return len(MODELS) * len(POLICIES) * len(TIERS)


def draw(seed: int, index: int, first_step: int) -> Episode:
    """Draw an episode. The combinations come in an order of their own in each round, each of them once."""
    combinations = [(model, policy, tier) for model in MODELS for policy in POLICIES for tier in TIERS]
    round_index, position = divmod(index, len(combinations))
    random.Random(f"{seed} round {round_index}").shuffle(combinations)
    model, policy, tier = combinations[position]
    numbers = random.Random(f"{seed} episode {index}")
    shapes = [(numbers.choice(BATCH_SIZES), numbers.choice(LENGTHS)) for _ in range(NUM_SHAPES)]
    steps: list[Step] = []
    num_steps = numbers.randint(*NUM_STEPS)
    for position_in_episode in range(num_steps):
        is_last = position_in_episode == num_steps - 1
        is_faulty = numbers.random() < FAULT_SHARE and not is_last
        parts = tuple(numbers.choice(shapes) for _ in range(numbers.choice(NUM_PARTS)))
        steps.append(
            Step(
                index=first_step + position_in_episode,
                shapes=(max(shapes, key=_size),) if is_last else parts,
                evaluates=numbers.random() < EVALUATION_SHARE,
                fault=numbers.choice((*SHARED_FAULTS, *OWN_FAULTS)) if is_faulty else "",
                place=numbers.randrange(1 << 16),
                is_metered=is_last,
            )
        )
    return Episode(
        index=index,
        model=model,
        policy=policy,
        tier=tier,
        share=numbers.choice(SHARES[model]),
        collects=numbers.random() >= COLLECTOR_OFF_SHARE,
        steps=tuple(steps),
    )


def _size(shape: tuple[int, int]) -> int:
    return shape[0] * shape[1] * shape[1]
